"""What a run keeps, in terms that hold in every build of the program: the side of a comparison.

A site is named by its layer, its kind and its stack without addresses, lines, folders and compiler's suffixes, without
the plumbing between the application and the allocator, and with recursion folded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import PurePosixPath

from leakscope.correlate.sites import folded_cache
from leakscope.correlate.wrappers import FUNCTIONS, KERNEL_ENTRY, MODULES, SLAB_ENTRY
from leakscope.detect.judge import NOT_JUDGED
from leakscope.detect.runs import joined
from leakscope.model.frames import parsed_frame
from leakscope.model.results import Growth, Report, Site, Verdict
from leakscope.model.runs import Run

Key = tuple[str, ...]
"""(layer, kind, frame…), outermost first."""

COMPARED_ANYWAY = frozenset({"pool_block"})
"""Blocks of a caching allocator are live tensors: alone they prove nothing, against equal work they do."""

_OFFSET = re.compile(r"\+?0x[0-9a-f]+$")
_SUFFIX = re.compile(r"(\.(isra|constprop|part|cold|lto_priv|llvm)(\.\d+)*)+$|::h[0-9a-f]{16}$|_noprof$")


@dataclass
class Side:
    """One site of one run, all of its stacks that fold to the same key together."""

    key: Key
    stack: tuple[str, ...]
    culprit: str = ""
    slab_cache: str = ""
    kept_objects: int = 0
    kept_bytes: int = 0
    allocated_objects: int = 0
    allocated_bytes: int = 0
    first_ns: int = 0
    last_ns: int = 0
    growth: Growth | None = None
    levelled_off: bool = False
    ids: tuple[str, ...] = ()
    source: int = 0

    @property
    def layer(self) -> str:
        """kernel, host or gpu."""
        return self.key[0]

    @property
    def kind(self) -> str:
        """A kind of memory (words.KINDS)."""
        return self.key[1]

    @property
    def frames(self) -> tuple[str, ...]:
        """Stable frames, outermost first."""
        return self.key[2:]


@dataclass(frozen=True)
class Known:
    """A leak that a run shows by other means than its sites: a counter, a cache, a snapshot."""

    layer: str
    what: tuple[str, ...]  # counter, slab cache, object, owner, frame
    kind: str
    growth: Growth | None = None


@dataclass
class Profile:
    """One run, one evidence: what it did and what it kept."""

    run: Run
    sides: dict[Key, Side] = field(default_factory=dict)
    leaks: tuple[Known, ...] = ()


def profile_of(report: Report, leave_out: Callable[[Site], bool] | None = None) -> Profile:
    """The profile of a report made with its runs. ``leave_out``: sites that do not count."""
    verdicts = (report.verdict, *report.findings)
    leaks = {
        (known.layer, known.what): known
        for verdict in reversed(verdicts)
        if verdict.verdict == "leak" and not verdict.sites and (known := known_of(verdict))
    }
    sites = [site for site in report.sites if not (leave_out and leave_out(site))]
    return Profile(joined(report.runs), sides_of(sites), tuple(leaks[key] for key in sorted(leaks)))


def known_of(verdict: Verdict) -> Known:
    """What a verdict without sites is about, in terms that hold in the next run."""
    culprit = verdict.culprit
    what: tuple[str, ...] = ()
    if culprit is not None:
        frame = stable_frame(culprit.frame) if culprit.frame else ""
        what = (culprit.counter, folded_cache(culprit.slab_cache), culprit.object, culprit.owner, frame)
    if not any(what) and verdict.growth is not None:
        what = (verdict.growth.counter,)
    return Known(verdict.layer, what, verdict.kind, verdict.growth)


def sides_of(sites: Iterable[Site]) -> dict[Key, Side]:
    """Sites whose frees can be seen and whose bytes are not those of others, by key."""
    found: dict[Key, Side] = {}
    for site in sites:
        if not site.frees_visible or site.kind in NOT_JUDGED - COMPARED_ANYWAY:
            continue
        key = key_of(site.layer, site.kind, site.stack)
        one = Side(
            key,
            tuple(site.stack),
            site.culprit_frame,
            folded_cache(site.slab_cache),
            site.live_objects,
            site.live_bytes,
            site.allocated_objects,
            site.allocated_bytes,
            site.first_ns,
            site.last_ns,
            site.growth,
            site.levelled_off and site.live_objects > 0,
            (site.id,),
            site.source,
        )
        found[key] = together(found[key], one) if key in found else one
    return found


def together(one: Side, other: Side) -> Side:
    """Two parts of one site: figures add up, rates too, their intervals in squares."""
    return replace(
        one,
        slab_cache=one.slab_cache or other.slab_cache,
        kept_objects=one.kept_objects + other.kept_objects,
        kept_bytes=one.kept_bytes + other.kept_bytes,
        allocated_objects=one.allocated_objects + other.allocated_objects,
        allocated_bytes=one.allocated_bytes + other.allocated_bytes,
        first_ns=min(one.first_ns, other.first_ns),
        last_ns=max(one.last_ns, other.last_ns),
        growth=sum_of(one.growth, other.growth),
        # One that still grows decides.
        levelled_off=(one.levelled_off or not one.kept_objects) and (other.levelled_off or not other.kept_objects),
        ids=one.ids + other.ids,
    )


def sum_of(one: Growth | None, other: Growth | None) -> Growth | None:
    """Sum of independent rates."""
    if one is None or other is None:
        return one or other
    rate = one.bytes_per_s + other.bytes_per_s
    below = ((one.bytes_per_s - one.ci_low) ** 2 + (other.bytes_per_s - other.ci_low) ** 2) ** 0.5
    above = ((one.ci_high - one.bytes_per_s) ** 2 + (other.ci_high - other.bytes_per_s) ** 2) ** 0.5
    return Growth(one.counter, rate, rate - below, rate + above)


def key_of(layer: str, kind: str, stack: Sequence[str]) -> Key:
    """The key of a site with the frame texts ``stack``, outermost first."""
    named = [stable_frame(text) for text in stack]
    kept = [text for text in named if not is_plumbing_text(text)] or named
    return (layer, kind, *dict.fromkeys(kept))  # a frame that comes again is recursion


def fingerprint(key: Key) -> str:
    """16 hexadecimal digits that name a key."""
    return hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]


@lru_cache(maxsize=65536)
def stable_frame(text: str) -> str:
    """``function (file)`` without folders and line, ``function``, or the module of a frame without a name."""
    function, file, _ = parsed_frame(text)
    function = _SUFFIX.sub("", _OFFSET.sub("", function)) or "[unknown]"
    name = PurePosixPath(file).name
    return f"{function} ({name})" if name else function


@lru_cache(maxsize=65536)
def is_plumbing_text(frame: str) -> bool:
    """Whether a stable frame allocates on behalf of others, or only enters the kernel, or has no name."""
    function = parsed_frame(frame)[0]
    return (
        function == "[unknown]"
        or function.startswith(MODULES)
        or any(pattern.fullmatch(function) for pattern in (FUNCTIONS, SLAB_ENTRY, KERNEL_ENTRY))
    )

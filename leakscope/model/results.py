"""Result types of an attribution: what ``attribute`` found, in the shape that every report renders.

Field names are those of the JSON report. Times are ``_ns`` on the clock of their source, ``_s`` since time
zero (the start of the capture), sizes are bytes. Stacks are lists of frame texts, outermost first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from leakscope.model.calibration import Calibrated
from leakscope.model.forecast import Forecast
from leakscope.model.runs import Run
from leakscope.model.stores import StoreAudit
from leakscope.model.words import KINDS_NOT_ADDED

if TYPE_CHECKING:
    from leakscope.model.timeline import Timeline

SCHEMA = "leakscope-report/1"
VERDICTS = ("leak", "inconclusive", "not_leak")
RULES = ("stack", "nesting", "event", "apportioned", "recorded on the thread", "argument")
"""How a link of a chain is known. ``stack``: a frame of the allocation's own stack; ``nesting``: same
thread, inside the call's enter and exit; ``event``: a column of the allocation itself; ``apportioned``: the
stack of a sampled sibling of the same call site; ``recorded on the thread``: the NVTX range that was open;
``argument``: a launch got a pointer into the allocation while it was alive."""


@dataclass(frozen=True)
class Growth:
    """Mean rate of kept bytes from the end of the warm-up to the end of the evidence, with a 95 %
    interval."""

    counter: str
    bytes_per_s: float
    ci_low: float
    ci_high: float
    per_unit: tuple[str, float] | None = None  # (running count of work, bytes for each unit of it)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        values: dict[str, Any] = {
            "counter": self.counter,
            "bytes_per_s": round(self.bytes_per_s, 3),
            "ci_low": round(self.ci_low, 3),
            "ci_high": round(self.ci_high, 3),
        }
        if self.per_unit:
            values["per_unit"] = {"unit": self.per_unit[0], "bytes": round(self.per_unit[1], 3)}
        return values


@dataclass(frozen=True)
class Culprit:
    """Who allocates what is kept: one frame, the stack around it, and the slab caches where it has some."""

    frame: str = ""
    stack: tuple[str, ...] = ()
    slab_cache: str = ""  # of the most kept bytes
    slab_caches: tuple[str, ...] = ()  # all of the finding, most kept bytes first
    counter: str = ""  # the narrowest counter that shows the cause
    object: str = ""  # what is kept, in words
    owner: str = ""  # of a cache: who pins or references it
    objects: tuple[str, ...] = ()  # names of what is kept, where it has some; not all where there are many

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; keys that do not apply are left out."""
        values: dict[str, Any] = {"frame": self.frame, "stack": list(self.stack)}
        values |= {"slab_cache": self.slab_cache, "slab_caches": list(self.slab_caches)}
        values |= {"counter": self.counter, "object": self.object, "owner": self.owner, "objects": list(self.objects)}
        return {key: value for key, value in values.items() if value}


@dataclass(frozen=True)
class Verdict:
    """One judgement. ``verdict`` is one of :data:`VERDICTS`; ``kind`` is its class (JSON key ``class``)."""

    verdict: str
    kind: str
    layer: str = ""
    confidence: float = 0.0  # 0..1
    culprit: Culprit | None = None
    growth: Growth | None = None
    leak_start_s: float | None = None
    kept_bytes: int = 0
    kept_objects: int = 0
    sites: tuple[str, ...] = ()  # ids, most kept bytes first
    consequences: tuple[str, ...] = ()  # ids of kernel sites that these allocations cause
    reasons: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    smallest_provable_bytes_per_s: float | None = None
    forecast: Forecast | None = None  # of a leak: when it reaches the limit

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "verdict": self.verdict,
            "class": self.kind,
            "layer": self.layer or None,
            "confidence": round(self.confidence, 3),
            "culprit": self.culprit.to_json() if self.culprit else None,
            "growth": self.growth.to_json() if self.growth else None,
            "leak_start_s": None if self.leak_start_s is None else round(self.leak_start_s, 3),
            "kept_bytes": self.kept_bytes,
            "kept_objects": self.kept_objects,
            "sites": list(self.sites),
            "consequences": list(self.consequences),
            "reasons": list(self.reasons),
            "missing": list(self.missing),
            "smallest_provable_bytes_per_s": (
                None if self.smallest_provable_bytes_per_s is None else round(self.smallest_provable_bytes_per_s, 3)
            ),
            "forecast": self.forecast.to_json() if self.forecast else None,
        }


@dataclass(frozen=True)
class TouchingKernel:
    """Launches of one kernel that got a pointer into what a site keeps."""

    kernel: str  # '' where its name is unknown
    launches: int
    last_ns: int
    bytes: int  # of the allocations that they touched
    exact: bool  # some of these pointers are known to be arguments


@dataclass(frozen=True)
class Touches:
    """When kernels were last given what a site keeps at the end of the evidence.

    ``approximate``: some of these times rest on words that may be no arguments, or a later launch hides its
    arguments (a graph's, a kernel of unknown parameters). ``idle``: (seconds, bytes not touched for as long).
    """

    launches: int
    last_touch_ns: int  # 0 = never
    last_kernel: str
    touched_bytes: int
    live_bytes: int
    approximate: bool
    idle: tuple[tuple[int, int], ...] = ()
    kernels: tuple[TouchingKernel, ...] = ()  # at most 3, last touch first

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "last_touch_ns": self.last_touch_ns or None,
            "last_kernel": self.last_kernel or None,
            "touching_launches": self.launches,
            "touched_share": round(self.touched_bytes / max(1, self.live_bytes), 6),
            "touches_approximate": self.approximate,
            "idle": [{"seconds": seconds, "bytes": size} for seconds, size in self.idle],
        }


@dataclass(frozen=True)
class KeptCourse:
    """Bytes that a site keeps at ``start_s`` + i × ``step_s`` (i = 1, 2, …) since the start of its source."""

    start_s: float
    step_s: float
    kept_bytes: tuple[float, ...]


@dataclass
class Site:
    """Who allocates: (layer, kind, api, slab cache, stacks). The unit of attribution.

    ``live_bytes`` is what was kept when the evidence ended (for a process that exited: when its exit
    began). ``free_seen_share`` is the share of ended objects whose end was a visible free (None: nothing
    ended). ``stack_sampled`` sites carry bytes apportioned from allocations without a stack;
    ``standard_error_bytes`` is the sampling error of their ``live_bytes``.
    """

    id: str
    layer: str
    kind: str
    api: str
    slab_cache: str
    stack: list[str]
    culprit_frame: str
    live_bytes: int
    live_objects: int
    allocated_bytes: int
    allocated_objects: int
    kept_share: float
    first_ns: int
    last_ns: int
    free_seen_share: float | None
    frees_visible: bool
    outlives_process_bytes: int
    ended_with_process_bytes: int
    processes: int
    stack_sampled: bool
    standard_error_bytes: float
    growth: Growth | None = None
    source: int = 0
    ranges: tuple[str, ...] = ()  # NVTX ranges around what is kept, outermost first
    touches: Touches | None = None  # None: launch arguments were not recorded, or it is no such memory
    bytes_sampled: bool = False  # all figures are estimates from a sample of allocations (--sample-bytes)
    levelled_off: bool = False  # grew, and stopped growing
    course: KeptCourse | None = None  # where asked for; not in JSON
    frame_kinds: tuple[str, ...] = ()  # of the frames of ``stack`` (stack_tree.FRAME_KINDS); not in JSON

    @property
    def added(self) -> bool:
        """Whether the site's bytes count in its layer's total (words.KINDS_NOT_ADDED)."""
        return self.kind not in KINDS_NOT_ADDED

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        growth = self.growth
        return {
            "id": self.id,
            "source": self.source,
            "layer": self.layer,
            "kind": self.kind,
            "api": self.api,
            "slab_cache": self.slab_cache or None,
            "culprit_frame": self.culprit_frame or None,
            "ranges": list(self.ranges),
            "stack": self.stack,
            "stack_sampled": self.stack_sampled,
            "bytes_sampled": self.bytes_sampled,
            "standard_error_bytes": round(self.standard_error_bytes, 1),
            "live_bytes": self.live_bytes,
            "live_objects": self.live_objects,
            "growth_bytes_per_s": round(growth.bytes_per_s, 3) if growth else None,
            "growth_ci_low": round(growth.ci_low, 3) if growth else None,
            "growth_ci_high": round(growth.ci_high, 3) if growth else None,
            "allocated_bytes": self.allocated_bytes,
            "allocated_objects": self.allocated_objects,
            "kept_share": round(self.kept_share, 6),
            "first_ns": self.first_ns,
            "last_ns": self.last_ns,
            "free_seen_share": None if self.free_seen_share is None else round(self.free_seen_share, 6),
            "frees_visible": self.frees_visible,
            "outlives_process": self.outlives_process_bytes > 0,
            "outlives_process_bytes": self.outlives_process_bytes,
            "ended_with_process_bytes": self.ended_with_process_bytes,
            "processes": self.processes,
            "added_to_layer": self.added,
        } | (self.touches.to_json() if self.touches else {})


@dataclass(frozen=True)
class ChainLink:
    """One link of a chain. ``what``: range, frame, call, syscall, slab_cache, kind, map, device or launches."""

    what: str
    name: str
    rule: str
    confidence: float
    count: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "what": self.what,
            "name": self.name,
            "rule": self.rule,
            "confidence": round(self.confidence, 3),
            "count": self.count,
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class Chain:
    """From application code to the bytes, outermost first; ``detail`` are allocations caused below the
    site."""

    site: str
    links: tuple[ChainLink, ...]
    detail: tuple[ChainLink, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "site": self.site,
            "links": [link.to_json() for link in self.links],
            "detail": [link.to_json() for link in self.detail],
        }


@dataclass(frozen=True)
class LayerTotal:
    """One layer's sums over the sites that count in it, and what is listed apart."""

    layer: str
    live_bytes: int
    live_objects: int
    allocated_bytes: int
    growth: Growth | None
    frees_not_visible_bytes: int = 0
    not_added_bytes: int = 0
    source: int = 0  # the input that it is about
    standard_error_bytes: float = 0.0  # of live_bytes, where allocations were sampled by bytes

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "layer": self.layer,
            "source": self.source,
            "live_bytes": self.live_bytes,
            "standard_error_bytes": round(self.standard_error_bytes, 1),
            "live_objects": self.live_objects,
            "allocated_bytes": self.allocated_bytes,
            "growth": self.growth.to_json() if self.growth else None,
            "frees_not_visible_bytes": self.frees_not_visible_bytes,
            "not_added_bytes": self.not_added_bytes,
        }


@dataclass(frozen=True)
class Row:
    """A row of ``losses`` (``unit`` count) or ``reconciliation`` (``unit`` bytes)."""

    source: str
    what: str
    value: int | None  # None: the source did not say
    unit: str
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        row: dict[str, Any] = {"source": self.source, "what": self.what, self.unit: self.value}
        return row | ({"detail": self.detail} if self.detail else {})


JOIN_RULES = ("identity", "nesting", "order", "window", "stack", "range")
"""How evidence of two sources is joined, strongest first (leakscope.correlate.joins). ``identity``: one allocation,
launch or call that both saw."""


@dataclass(frozen=True)
class JoinOutcome:
    """What one rule did with two sources. ``left`` and ``right`` say what was joined, with the names of the sources.

    ``matched`` rows of the left have a partner, ``ambiguous`` ones had several and got none, ``refused`` ones may not
    be joined by this rule; ``reasons`` says why, ``confidence`` is that of the links (None: it differs by link).
    """

    rule: str
    left: str
    right: str
    matched: int = 0
    ambiguous: int = 0
    refused: int = 0
    reasons: tuple[str, ...] = ()
    confidence: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "rule": self.rule,
            "left": self.left,
            "right": self.right,
            "matched": self.matched,
            "ambiguous": self.ambiguous,
            "refused": self.refused,
            "reasons": list(self.reasons),
            "confidence": None if self.confidence is None else round(self.confidence, 3),
        }


@dataclass
class Report:
    """Everything that ``attribute`` says about its inputs."""

    verdict: Verdict
    findings: list[Verdict] = field(default_factory=list)
    layers: list[LayerTotal] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)  # ranked; at most correlate.sites.MAX_SITES a capture
    sites_total: int = 0
    losses: list[Row] = field(default_factory=list)
    reconciliation: list[Row] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    joins: list[JoinOutcome] = field(default_factory=list)
    clocks: list[Row] = field(default_factory=list)  # one a source that was aligned: its residual, with how
    runs: list[Run] = field(default_factory=list)  # one a capture, where asked for; not in JSON
    timelines: list[Timeline] = field(default_factory=list)  # where asked for; not in JSON
    stores: list[StoreAudit] = field(default_factory=list)  # audits of key-value stores
    calibration: list[Calibrated] = field(default_factory=list)  # of counters over two windows of 180 readings
    judged: bool = True  # False: evidence that has no memory in it; its verdict does not count beside others

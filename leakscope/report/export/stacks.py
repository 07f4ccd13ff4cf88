"""What flame graphs are made of: stacks of sites with a number each.

Every byte stands in one stack. Kinds whose bytes another kind already counts (words.KINDS_NOT_ADDED) are left out
unless they are asked for, and what a report does not list by site stands in a stack of its own, so that the sum over a
layer is the total that the report states.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from leakscope.model.frames import parsed_frame
from leakscope.model.results import Report, Site
from leakscope.quantities import counted, size
from leakscope.report.text import printable

MEASURES = {
    "live": ("live bytes", "bytes"),
    "growth": ("growth in bytes an hour", "bytes"),
    "allocated": ("allocated bytes", "bytes"),
}
"""What can be drawn: its name for people, and its unit as speedscope and pprof know it."""
OTHER = "[sites not listed]"
SECONDS_AN_HOUR = 3600


@dataclass(frozen=True)
class StackValue:
    """One site as a stack. ``frames``: outermost first, the last says what was allocated. Values are bytes, objects,
    and bytes a second."""

    source: str  # name of the evidence
    layer: str
    kind: str
    api: str
    frames: tuple[str, ...]
    live: int
    growth_bytes_per_s: float
    allocated: int
    live_objects: int
    allocated_objects: int
    site: Site | None = None  # None: several together

    @property
    def growth(self) -> int:
        """Bytes an hour."""
        return round(self.growth_bytes_per_s * SECONDS_AN_HOUR)

    def value(self, of: str) -> int:
        """The measure ``of``, a key of :data:`MEASURES`."""
        return {"live": self.live, "growth": self.growth, "allocated": self.allocated}[of]


def stack_values(
    report: Report, names: Sequence[str], kinds: Collection[str] = ()
) -> tuple[list[StackValue], list[str]]:
    """The stacks of ``report``, and lines on what is not in them. ``names``: of the evidence, by ``Site.source``.

    ``kinds``: only these, whether or not another kind counts their bytes as well.
    """
    chosen = [site for site in report.sites if (site.kind in kinds if kinds else site.added)]
    values = [_of_site(site, names[site.source]) for site in chosen]
    if not kinds:
        values += _not_listed(report, values, names)
    return values, _notes(report, kinds)


def _of_site(site: Site, source: str) -> StackValue:
    live = site.live_bytes if site.frees_visible else 0
    grows = site.growth is not None and site.frees_visible and not site.levelled_off
    growth = site.growth.bytes_per_s if site.growth and grows else 0.0
    return StackValue(
        source,
        site.layer,
        site.kind,
        site.api,
        (*site.stack, f"[{site.kind} {site.slab_cache or site.api}]"),
        live,
        max(0.0, growth),
        site.allocated_bytes,
        site.live_objects if site.frees_visible else 0,
        site.allocated_objects,
        site,
    )


def _not_listed(report: Report, listed: Sequence[StackValue], names: Sequence[str]) -> list[StackValue]:
    """The rest of each layer's total; it has no stacks."""
    rest = []
    for total in report.layers:
        name = names[total.source]
        same = [value for value in listed if (value.source, value.layer) == (name, total.layer)]
        live = total.live_bytes - sum(value.live for value in same)
        allocated = total.allocated_bytes - sum(value.allocated for value in same)
        objects = total.live_objects - sum(value.live_objects for value in same)
        if live > 0 or allocated > 0:
            rest.append(
                StackValue(
                    name, total.layer, "", "", (OTHER,), max(0, live), 0, max(0, allocated), max(0, objects), 0
                )
            )  # fmt: skip
    return rest


def _notes(report: Report, kinds: Collection[str]) -> list[str]:
    notes = []
    if kinds and not any(site.kind in kinds for site in report.sites):
        notes.append(f"no site is of kind {', '.join(sorted(kinds))}")
    if not kinds:
        apart: dict[str, int] = {}
        for site in report.sites:
            if not site.added and site.live_bytes:
                apart[site.kind] = apart.get(site.kind, 0) + site.live_bytes
        notes += [
            f"{size(left)} of kind {kind} are left out, other kinds count these bytes; --kind {kind} exports them"
            for kind, left in sorted(apart.items())
        ]
    hidden = [site for site in report.sites if not site.frees_visible and site.live_bytes and (site.added or kinds)]
    if hidden:
        left = sum(site.live_bytes for site in hidden)
        notes.append(
            f"{counted(len(hidden), 'site')} whose frees cannot be seen ({size(left)} allocated and not seen freed) "
            "have no live bytes and no growth"
        )
    more = report.sites_total - len(report.sites)
    if more > 0:
        notes.append(f"{counted(more, 'site')} with the least kept bytes are not listed one by one; --sites raises it")
    return notes


def frame_parts(text: str) -> tuple[str, str, int]:
    """(name, file, line) of a frame, without control characters; what was allocated is all name."""
    name, file, line = (text, "", 0) if text.startswith("[") else parsed_frame(text)
    return printable(name), printable(file), line

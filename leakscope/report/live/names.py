"""The frame to blame for a site, found once, and only for sites that are shown."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from leakscope.correlate.stacks import Frame
from leakscope.correlate.wrappers import culprit
from leakscope.model.live import GrowingSite, Stack

BUDGET_S = 0.02
"""Time that finding names may take at a time; what is left gets its name the next time."""
MOST_NAMES = 4096


class SiteNames:
    """Remembers the names of sites by their keys."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._names: dict[int, str] = {}

    def named(self, sites: Sequence[GrowingSite]) -> tuple[GrowingSite, ...]:
        """The sites with their frames; one whose name would take longer than there is time for has none yet."""
        until = time.monotonic() + self._budget_s
        if len(self._names) > MOST_NAMES:
            self._names.clear()
        for site in sites:
            if site.key not in self._names and time.monotonic() < until:
                self._names[site.key] = name_of(site)
        return tuple(replace(site, frame=self._names.get(site.key, "")) for site in sites)


def name_of(site: GrowingSite) -> str:
    """``function (file:line)`` of the frame to blame, as `attribute` would name it without the rest of the evidence;
    the slab cache or kind of a site without stacks."""
    frame = culprit(_frames(site.user), _frames(site.python), _frames(site.kernel))
    return frame.text if frame is not None else site.slab_cache or site.kind


def _frames(stack: Stack) -> list[Frame]:
    return [Frame(*frame) for frame in stack]


@dataclass(frozen=True)
class Leader:
    """Sites of one layer and frame together: ``what`` is the slab cache or kind that gained most, ``others`` how many
    more there are."""

    layer: str
    frame: str
    what: str
    others: int
    range: str
    kept_bytes: int
    growth_bytes: int
    window_s: float
    sampled: bool

    @property
    def bytes_per_s(self) -> float:
        """Growth over the window."""
        return self.growth_bytes / self.window_s if self.window_s > 0 else 0.0


def leaders(sites: Sequence[GrowingSite], most: int = 5) -> list[Leader]:
    """The ``most`` frames whose sites gained most, a row for each layer. The first of each layer goes before others: a
    leak of kernel memory is small beside what a process maps."""
    groups: dict[tuple[str, str], list[GrowingSite]] = {}
    for site in sites:
        groups.setdefault((site.layer, site.frame), []).append(site)
    found = []
    for (layer, frame), members in groups.items():
        members.sort(key=lambda site: -site.growth_bytes)
        whats = list(dict.fromkeys(site.slab_cache or site.kind for site in members))
        found.append(
            Leader(
                layer,
                frame,
                whats[0],
                len(whats) - 1,
                next((site.range for site in members if site.range), ""),
                sum(site.kept_bytes for site in members),
                sum(site.growth_bytes for site in members),
                members[0].window_s,
                any(site.sampled for site in members),
            )
        )
    found.sort(key=lambda leader: -leader.growth_bytes)
    firsts: dict[str, Leader] = {}
    for leader in found:
        firsts.setdefault(leader.layer, leader)
    chosen = [*firsts.values(), *(leader for leader in found if leader is not firsts[leader.layer])][:most]
    return sorted(chosen, key=lambda leader: -leader.growth_bytes)

"""Kept bytes by something else than the site: by process, NVTX range or slab cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakscope.model.results import Growth

BY = ("site", "pid", "range", "cache")
"""What a report can be broken down by: the culprit of a site with its slab cache or kind, the process, the NVTX ranges
open at the allocation, the slab cache (other memory: its kind)."""


@dataclass(frozen=True)
class Group:
    """What belongs together in one layer of one capture.

    ``growth`` is the mean rate of the group's kept bytes after the warm-up, None where frees are not visible. The
    groups that count in a layer sum to the growth of the layer (by range only where no stacks were sampled).
    ``layer_share`` is of the layer's total, None for what does not count in it.
    """

    name: str
    layer: str
    added: bool  # counts in the layer's total (words.KINDS_NOT_ADDED)
    frees_visible: bool
    live_bytes: int
    live_objects: int
    allocated_bytes: int
    allocated_objects: int
    growth: Growth | None = None
    layer_share: float | None = None
    kind: str = ""  # by site: slab cache or kind; by cache: kind of what is in no slab cache
    pid: int | None = None  # by pid: None for short-lived processes together
    ranges: tuple[str, ...] = ()  # by range: outermost first
    sites: int | None = None  # how many are in it; None by range
    stack_sampled: bool = False  # its part of some bytes rests on sampled stacks
    bytes_sampled: bool = False  # figures are estimates from a sample of allocations
    standard_error_bytes: float = 0.0
    source: int = 0  # the input that it is about

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        growth = self.growth
        return {
            "name": self.name,
            "source": self.source,
            "layer": self.layer,
            "kind": self.kind or None,
            "pid": self.pid,
            "ranges": list(self.ranges),
            "sites": self.sites,
            "live_bytes": self.live_bytes,
            "live_objects": self.live_objects,
            "layer_share": None if self.layer_share is None else round(self.layer_share, 6),
            "growth_bytes_per_s": round(growth.bytes_per_s, 3) if growth else None,
            "growth_ci_low": round(growth.ci_low, 3) if growth else None,
            "growth_ci_high": round(growth.ci_high, 3) if growth else None,
            "allocated_bytes": self.allocated_bytes,
            "allocated_objects": self.allocated_objects,
            "stack_sampled": self.stack_sampled,
            "bytes_sampled": self.bytes_sampled,
            "standard_error_bytes": round(self.standard_error_bytes, 1),
            "frees_visible": self.frees_visible,
            "added_to_layer": self.added,
        }


@dataclass
class Breakdown:
    """All kept bytes of a report by one of :data:`BY`, most kept bytes first.

    In each capture and layer the groups that are ``added`` with visible frees sum to the layer's total, to the byte;
    those that are not added, and those whose frees are not visible, sum to what the layer says of them.
    """

    by: str
    groups: list[Group]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"by": self.by, "groups": [group.to_json() for group in self.groups]}

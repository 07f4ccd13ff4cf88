"""The difference between two runs: what B keeps, and how fast it grows, against A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leakscope.model.results import Growth, Verdict
from leakscope.model.runs import CounterCourse

SCHEMA = "leakscope-diff/1"


@dataclass(frozen=True)
class Holding:
    """What one run has of a site or a layer. All zero where it has nothing of it."""

    live_bytes: int = 0
    live_objects: int = 0
    allocated_bytes: int = 0
    growth: Growth | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "live_bytes": self.live_bytes,
            "live_objects": self.live_objects,
            "allocated_bytes": self.allocated_bytes,
            "growth": self.growth.to_json() if self.growth else None,
        }


@dataclass(frozen=True)
class LayerDiff:
    """One layer in both runs; ``expected_bytes``: what A's live bytes give for the work of B."""

    layer: str
    a: Holding
    b: Holding
    expected_bytes: float

    @property
    def more_bytes(self) -> float:
        """Live bytes of B beyond A's for the same work."""
        return self.b.live_bytes - self.expected_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "layer": self.layer,
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "more_bytes": round(self.more_bytes, 3),
        }


@dataclass(frozen=True)
class SiteDiff:
    """One site in both runs. ``change``: new, grown, same, improved or vanished; all but same are beyond chance."""

    change: str
    layer: str
    kind: str
    culprit: str
    slab_cache: str
    stack: tuple[str, ...]  # outermost first
    a: Holding
    b: Holding
    expected_bytes: float
    key: str  # names the site in every build of the program
    frames: tuple[tuple[str, str], ...] = ()  # (text, one of stack_tree.FRAME_KINDS) by which it is found in both runs

    @property
    def more_bytes(self) -> float:
        """Live bytes of B beyond A's for the same work."""
        return self.b.live_bytes - self.expected_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "change": self.change,
            "layer": self.layer,
            "kind": self.kind,
            "culprit": self.culprit or None,
            "slab_cache": self.slab_cache or None,
            "stack": list(self.stack),
            "a": self.a.to_json(),
            "b": self.b.to_json(),
            "more_bytes": round(self.more_bytes, 3),
            "key": self.key,
        }


@dataclass(frozen=True)
class CounterDiff:
    """One counter in both runs; None where a run does not have it. ``apart``: the intervals of its two rates are."""

    name: str
    a: CounterCourse | None
    b: CounterCourse | None
    apart: bool
    in_bytes: bool

    @property
    def more(self) -> float:
        """Rise in B less that in A, as they were recorded."""
        return (self.b.rise if self.b else 0.0) - (self.a.rise if self.a else 0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "counter": self.name,
            "a": _course(self.a),
            "b": _course(self.b),
            "rates_apart": self.apart,
            "in_bytes": self.in_bytes,
        }


def _course(course: CounterCourse | None) -> dict[str, Any] | None:
    if course is None:
        return None
    low, mean, high = course.rate or (None, None, None)
    values = {"first": course.first, "last": course.last, "peak": course.peak, "rise": course.rise}
    return values | {"rate": mean, "rate_low": low, "rate_high": high}


@dataclass(frozen=True)
class Diff:
    """``verdict`` is that of a gate with A as baseline; ``ratio``: work of B for one unit of A's (``unit``)."""

    verdict: Verdict
    others: tuple[Verdict, ...]
    unit: str
    a_work: float
    b_work: float
    ratio: float
    work_known: bool  # False: nothing says what the runs did, figures stand beside each other as they are
    layers: tuple[LayerDiff, ...]
    sites: tuple[SiteDiff, ...]  # that gained most bytes first
    counters: tuple[CounterDiff, ...]  # those whose rates are apart first

    @property
    def changed(self) -> tuple[SiteDiff, ...]:
        """Sites that differ beyond chance."""
        return tuple(site for site in self.sites if site.change != "same")

    def to_json(self) -> dict[str, Any]:
        """The object of ``diff --json``."""
        changed = self.changed
        return {
            "schema": SCHEMA,
            "verdict": self.verdict.to_json(),
            "findings": [verdict.to_json() for verdict in self.others],
            "work": {
                "unit": self.unit,
                "a": round(self.a_work, 3),
                "b": round(self.b_work, 3),
                "ratio": round(self.ratio, 6),
                "known": self.work_known,
            },
            "layers": [layer.to_json() for layer in self.layers],
            "sites": [site.to_json() for site in changed],
            "sites_unchanged": len(self.sites) - len(changed),
            "counters": [counter.to_json() for counter in self.counters],
        }

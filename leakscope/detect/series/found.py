"""What a rule finds: one explanation of what some counters do."""

from __future__ import annotations

from dataclasses import dataclass

from leakscope.detect.series.trend import Trend


@dataclass(frozen=True)
class Found:
    """One finding of a rule.

    ``kind`` is the class of the verdict. ``counter`` shows the cause, ``growth`` is the counter in bytes whose course
    ``trend`` is. ``weight``: bytes that it explains, for ranking. ``explains``: counters that need no other reason.
    """

    verdict: str
    kind: str
    layer: str
    counter: str
    growth: str
    trend: Trend
    reasons: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    object: str = ""
    slab_cache: str = ""
    weight: float = 0.0
    explains: frozenset[str] = frozenset()
    per_unit: tuple[str, float] | None = None  # (work counter, bytes a unit)
    general: bool = False  # gives way to any finding that is not

"""How much work one run did for a unit of the other's: what makes two runs comparable.

In this order: running counts of work that both have (``*_total``), NVTX ranges that both opened, the allocations of
the sites that both have, and time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from leakscope.detect.profile import Profile
from leakscope.errors import BadInputError

MIN_COUNT = 20
"""Fewer units in one of the two runs say little about their ratio."""
ALLOCATIONS, SECONDS = "allocations", "seconds"


@dataclass(frozen=True)
class Work:
    """``ratio``: work of head for one unit of the baseline's; ``unit``: what is counted, in both."""

    unit: str
    base: float
    head: float
    known: bool = True  # False: nothing says what the two runs did

    @property
    def ratio(self) -> float:
        """Head for one unit of the baseline's."""
        return self.head / self.base if self.base > 0 and self.head > 0 else 1.0


def work_of(base: Profile, head: Profile, unit: str | None = None) -> Work:
    """The work of two runs. ``unit``: a running count, a range, ``allocations`` or ``seconds``; None chooses.

    Raises BadInputError when the named unit is missing in one of the runs.
    """
    if unit is not None:
        return _named(base, head, unit)
    for ours, theirs in ((base.run.totals, head.run.totals), (base.run.marks, head.run.marks)):
        if (found := _typical(ours, theirs)) is not None:
            return found
    allocations = _allocations(base, head)
    if allocations.known or base.sides or head.sides:
        return allocations
    return _seconds(base, head)


def _named(base: Profile, head: Profile, unit: str) -> Work:
    if unit == ALLOCATIONS:
        return _allocations(base, head)
    if unit == SECONDS:
        return _seconds(base, head)
    values = [run.totals.get(unit) or run.marks.get(unit) or 0.0 for run in (base.run, head.run)]
    if not all(values):
        which = "the baseline" if not values[0] else "the evidence"
        raise BadInputError(f"--per {unit}: {which} has no such count of work (a counter *_total, or an NVTX range)")
    return Work(unit, float(values[0]), float(values[1]))


def _typical(base: Mapping[str, float], head: Mapping[str, float]) -> Work | None:
    """The count whose ratio is the median of all that both have; of an even number the lower."""
    common = sorted(name for name in base if base[name] >= MIN_COUNT and head.get(name, 0) >= MIN_COUNT)
    if not common:
        return None
    ranked = sorted(common, key=lambda name: (head[name] / base[name], name))
    name = ranked[(len(ranked) - 1) // 2]
    return Work(name, float(base[name]), float(head[name]))


def _allocations(base: Profile, head: Profile) -> Work:
    """Median ratio of the allocations of common sites, weighted by them: some may have changed, most have not."""
    common = [key for key in head.sides if key in base.sides and base.sides[key].allocated_objects]
    if not common:
        return Work(ALLOCATIONS, 0.0, 0.0, known=False)
    was = np.array([base.sides[key].allocated_objects for key in common], np.float64)
    now = np.array([head.sides[key].allocated_objects for key in common], np.float64)
    order = np.argsort(now / was, kind="stable")
    middle = order[int(np.searchsorted(np.cumsum(was[order]), was.sum() / 2))]
    ratio = float(now[middle] / was[middle]) or 1.0
    return Work(ALLOCATIONS, float(was.sum()), float(was.sum()) * ratio, known=bool(was.sum() >= MIN_COUNT))


def _seconds(base: Profile, head: Profile) -> Work:
    spans = (base.run.duration_s, head.run.duration_s)
    return Work(SECONDS, *spans, known=all(spans))

"""Memory over time, in the shape that reports draw: few enough points for a page, whatever the length of the evidence.

Times are seconds since time zero of the evidence (that of ``Verdict.leak_start_s``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MAX_POINTS = 2000
"""Points of a series: what is longer is given by the least and the greatest value of each of half as many buckets."""

FINDING, LIVE, COUNTER, UNEXPLAINED = "finding", "live", "counter", "unexplained"
"""What a series is: kept bytes of a finding; live bytes of a layer by events; readings of a counter; growth of a
counter beyond what events keep."""


@dataclass(frozen=True)
class Series:
    """One line over time: float64[n] times (rising) and values, n at most :data:`MAX_POINTS`."""

    name: str  # of the counter; of the layer; the first site of the finding
    label: str  # for people
    what: str  # FINDING, LIVE, COUNTER or UNEXPLAINED
    layer: str  # kernel, host, gpu
    in_bytes: bool
    t_s: FloatArray
    value: FloatArray
    readings: int = 0  # how many it was made of; 0: events
    shared: bool = False  # others are counted in it as well


@dataclass(frozen=True)
class Slope:
    """A fitted line of the series ``series`` (with ``what``): through ``value`` at ``at_s``, drawn over
    ``start_s`` … ``end_s``; rate a second with its 95 % interval."""

    series: str
    what: str
    start_s: float
    end_s: float
    at_s: float
    value: float
    rate: float
    low: float
    high: float

    def at(self, t_s: float, rate: float | None = None) -> float:
        """The line's value at a time, or that of a line of another rate through the same point."""
        return self.value + (self.rate if rate is None else rate) * (t_s - self.at_s)


@dataclass(frozen=True)
class Moment:
    """What changed when: ``what`` is warm-up, leak, restart, start, exit or change; ``label`` for people; ``layer``:
    where it belongs to one."""

    t_s: float
    what: str
    label: str
    layer: str = ""


@dataclass(frozen=True)
class Survival:
    """What became of the memory that one layer allocated in each of n equal windows of birth: float64[n + 1] edges,
    int64[n] bytes allocated in a window and bytes of these that were kept at the end."""

    layer: str
    edges_s: FloatArray
    allocated_bytes: npt.NDArray[np.int64]
    kept_bytes: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Timeline:
    """Everything over time of the sources of one clock. ``name``: of the evidence. ``notes``: what is not drawn."""

    name: str
    start_s: float
    end_s: float
    series: tuple[Series, ...] = ()
    slopes: tuple[Slope, ...] = ()
    moments: tuple[Moment, ...] = ()
    survival: tuple[Survival, ...] = ()
    notes: tuple[str, ...] = field(default=())

"""What a run did: the facts by which two runs are compared. One a capture."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CounterCourse:
    """One counter of a run, summed over the processes (groups, devices) that were read at the same time.

    ``rise``: median of the last tenth of its readings minus that of the first tenth after the warm-up. ``rate``: mean
    rise a second after the warm-up with its 95 % interval; None where there are too few readings.
    """

    name: str
    first: float
    last: float
    peak: float
    rise: float
    rate: tuple[float, float, float] | None  # low, mean, high, a second
    in_bytes: bool


@dataclass(frozen=True)
class Run:
    """Bounds of the evidence on its own clock, and its work.

    ``totals``: rise of each running count of work (counters named ``*_total``); ``marks``: how often each NVTX range
    was opened; ``counters``: all other counters.
    """

    zero_ns: int = 0  # time zero of `leak_start_s`
    start_ns: int = 0
    end_ns: int = 0
    totals: dict[str, float] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    counters: tuple[CounterCourse, ...] = ()

    @property
    def duration_s(self) -> float:
        """Seconds of evidence."""
        return max(0, self.end_ns - self.start_ns) / 1e9

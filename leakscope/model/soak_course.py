"""How a soak went over time, in few enough points to draw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CounterPoints:
    """The course of one counter of the watched processes together.

    ``t_s`` (since the start of the capture) and ``value``: all readings, or of each bucket of time the least and the
    greatest. The figures are those of all readings.
    """

    name: str
    in_bytes: bool
    t_s: tuple[float, ...]
    value: tuple[float, ...]
    readings: int
    first: float
    last: float
    least: float
    most: float

    @property
    def shown(self) -> str:
        """The name with its unit, as verdicts give it."""
        return f"{self.name}_bytes" if self.in_bytes else self.name


@dataclass(frozen=True)
class FittedSlope:
    """The growth of a verdict as a line over the readings of its counter: it has the value ``middle`` at
    ``middle_s``, the median of the readings there, and the slope of the verdict with its 95 % interval."""

    counter: str  # as CounterPoints.shown
    verdict: str
    from_s: float
    to_s: float
    middle_s: float
    middle: float
    per_s: float
    low_per_s: float
    high_per_s: float


@dataclass(frozen=True)
class WatchedProcess:
    """From when to when a process was watched; ``end_s`` None: it was alive at the end."""

    pid: int
    name: str
    start_s: float
    end_s: float | None
    root: bool


@dataclass(frozen=True)
class Gap:
    """A stretch in which nobody recorded."""

    from_s: float
    to_s: float


@dataclass(frozen=True)
class SoakCourse:
    """Everything that is drawn of a soak besides its looks. ``counters``: those of verdicts and looks first.

    ``processes``: roots first, then those that were watched longest; ``processes_total`` of them were there.
    """

    counters: tuple[CounterPoints, ...] = ()
    counters_left_out: tuple[str, ...] = ()
    slopes: tuple[FittedSlope, ...] = ()
    processes: tuple[WatchedProcess, ...] = ()
    processes_total: int = 0
    gaps: tuple[Gap, ...] = ()

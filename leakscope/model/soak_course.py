"""Who was watched when in a soak, and when nobody watched."""

from __future__ import annotations

from dataclasses import dataclass


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
    """A stretch in which nobody recorded. ``killed``: the recorder before it was killed."""

    from_s: float
    to_s: float
    killed: bool = False


@dataclass(frozen=True)
class SoakCourse:
    """What is drawn of a soak besides its looks and counters. Times are since the start of the capture.

    ``processes``: roots in the order of their start, then the others that lived longest; ``processes_total`` were
    there.
    """

    processes: tuple[WatchedProcess, ...] = ()
    processes_total: int = 0
    gaps: tuple[Gap, ...] = ()

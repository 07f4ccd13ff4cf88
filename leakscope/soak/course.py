"""Who was watched when, from the capture of a soak."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from leakscope.capture import Capture
from leakscope.detect.recorded import BRIEF_PID, Life, Readings, settled
from leakscope.errors import BadInputError
from leakscope.model.soak_course import Gap, SoakCourse, WatchedProcess
from leakscope.soak.final import gap_spans, recordings_of
from leakscope.soak.replay import evidence_of

MAX_PROCESSES = 60


def soak_course(capture: Capture) -> SoakCourse:
    """What there is to draw of ``capture``, which a soak made or replayed; empty where it has no counters."""
    try:
        readings, lives = evidence_of(capture)
    except BadInputError:
        return SoakCourse()
    spans = gap_spans(capture) if recordings_of(capture) else []
    processes = watched(readings, lives)
    return SoakCourse(processes[:MAX_PROCESSES], len(processes), tuple(Gap(*span) for span in spans))


def watched(readings: Readings, lives: Sequence[Life]) -> tuple[WatchedProcess, ...]:
    """The processes of a recording: roots in the order of their start, then the others that lived longest."""
    end_s = max((float(t[-1]) for t, _ in readings.series.values() if len(t)), default=0.0)
    made = [
        WatchedProcess(life.pid, life.name, life.start_s, None if life.end_s == float("inf") else life.end_s, life.root)
        for life in settled(readings, lives)
        if life.pid != BRIEF_PID and np.isfinite(life.start_s)
    ]

    def order(one: WatchedProcess) -> tuple[bool, float, float, int]:
        lived = (end_s if one.end_s is None else one.end_s) - max(0.0, one.start_s)
        return not one.root, one.start_s if one.root else -lived, one.start_s, one.pid

    return tuple(sorted(made, key=order))

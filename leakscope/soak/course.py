"""How a soak went over time, from its capture: the courses of counters in few points, slopes, processes, gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from leakscope.capture import Capture
from leakscope.detect.recorded import BRIEF_PID, Life, Readings, settled, subjects
from leakscope.detect.series.counters import PROCESS_START, Counter
from leakscope.errors import BadInputError
from leakscope.model.results import Growth, Report, Verdict
from leakscope.model.soak import SoakSummary
from leakscope.model.soak_course import CounterPoints, FittedSlope, Gap, SoakCourse, WatchedProcess
from leakscope.soak.final import gap_spans, recordings_of
from leakscope.soak.replay import evidence_of
from leakscope.soak.watch import SHOWN, Plan

FloatArray = npt.NDArray[np.float64]

MAX_POINTS = 2000
MAX_COUNTERS = 40
MAX_PROCESSES = 60
MAX_SLOPES = 4


def soak_course(capture: Capture, plan: Plan, summary: SoakSummary, report: Report) -> SoakCourse:
    """What there is to draw of ``capture``, which a soak made or replayed; empty where it has no counters."""
    try:
        readings, lives = evidence_of(capture)
    except BadInputError:
        return SoakCourse()
    spans = gap_spans(capture) if recordings_of(capture) else []
    gaps = tuple(Gap(began, ended) for began, ended, _ in spans)
    return course_of(readings, lives, plan, summary, report, gaps)


def course_of(
    readings: Readings,
    lives: Sequence[Life],
    plan: Plan,
    summary: SoakSummary,
    report: Report,
    gaps: tuple[Gap, ...] = (),
) -> SoakCourse:
    """The same from readings and processes on one axis of time."""
    found = subjects(readings, lives, everyone=plan.everyone, cgroup=plan.cgroup)
    counters = [c for one in found[:1] for c in one.counters if c.name != PROCESS_START and len(c.t_s)]
    verdicts = [report.verdict, *report.findings]
    looked = [look.verdict for look in reversed(summary.looks)]
    forecasts = [summary.forecast] if summary.forecast else []
    first = [*_named([*verdicts, *looked]), *(one.counter for one in forecasts)]
    ranked = sorted(counters, key=lambda counter: _rank(counter, first))
    processes = _processes(readings, lives)
    return SoakCourse(
        tuple(points(counter) for counter in ranked[:MAX_COUNTERS]),
        tuple(counter.shown for counter in ranked[MAX_COUNTERS:]),
        _slopes(verdicts, counters, max((h.elapsed_s for h in summary.happenings if h.what == "target"), default=0.0)),
        processes[:MAX_PROCESSES],
        len(processes),
        gaps,
    )


def points(counter: Counter, most: int = MAX_POINTS) -> CounterPoints:
    """The course of a counter in at most ``most`` points."""
    good = np.isfinite(counter.value) & np.isfinite(counter.t_s)
    t, v = counter.t_s[good], counter.value[good]
    if not len(t):
        return CounterPoints(counter.name, counter.in_bytes, (), (), 0, 0.0, 0.0, 0.0, 0.0)
    chosen = extremes(t, v, most)
    return CounterPoints(
        counter.name,
        counter.in_bytes,
        tuple(np.round(t[chosen], 3).tolist()),
        tuple(v[chosen].tolist()),
        len(t),
        float(v[0]),
        float(v[-1]),
        float(v.min()),
        float(v.max()),
    )


def extremes(t_s: FloatArray, value: FloatArray, most: int) -> npt.NDArray[np.int64]:
    """Which readings to draw, at most ``most`` (≥ 4): all, or the first, the last, and of each of equally long buckets
    of time the least and the greatest, so that no peak is lost. ``t_s`` rises."""
    if len(t_s) <= most:
        return np.arange(len(t_s))
    buckets = (most - 2) // 2
    span = max(float(t_s[-1] - t_s[0]), 1e-9)
    bucket = np.minimum(((t_s - t_s[0]) / span * buckets).astype(np.int64), buckets - 1)
    order = np.lexsort((value, bucket))
    begins = np.flatnonzero(np.diff(bucket[order], prepend=-1))
    ends = np.append(begins[1:], len(order)) - 1
    chosen: npt.NDArray[np.int64] = np.unique(np.concatenate([order[begins], order[ends], [0, len(t_s) - 1]]))
    return chosen


def _named(verdicts: Iterable[Verdict]) -> list[str]:
    """The counters that verdicts are about, in their order."""
    names: dict[str, None] = {}
    for verdict in verdicts:
        if verdict.growth:
            names.setdefault(verdict.growth.counter)
        if verdict.culprit and verdict.culprit.counter:
            names.setdefault(verdict.culprit.counter)
    return list(names)


def _rank(counter: Counter, first: Sequence[str]) -> tuple[int, int, str]:
    for place, names in enumerate((first, SHOWN)):
        for name in (counter.shown, counter.name):
            if name in names:
                return place, list(names).index(name), counter.name
    return 2, 0 if counter.in_bytes else 1, counter.name


def _slopes(verdicts: Sequence[Verdict], counters: Sequence[Counter], since_s: float) -> tuple[FittedSlope, ...]:
    """Of what grows, in the last life: a restart begins at another level."""
    by_name = {name: counter for counter in counters for name in (counter.name, counter.shown)}
    found: dict[str, FittedSlope] = {}
    for verdict in verdicts:
        growth = verdict.growth
        if growth is None or verdict.verdict == "not_leak" or growth.counter in found:
            continue
        counter = by_name.get(growth.counter)
        slope = (
            None
            if counter is None
            else fitted(counter, growth, verdict.verdict, max(since_s, verdict.leak_start_s or 0.0))
        )
        if slope is not None:
            found[growth.counter] = slope
    return tuple(found.values())[:MAX_SLOPES]


def fitted(counter: Counter, growth: Growth, verdict: str, from_s: float) -> FittedSlope | None:
    """The line of a growth through the readings since ``from_s``: its intercept is the median of what the slope leaves
    (the intercept of Theil and Sen). None where there are too few readings."""
    since = (counter.t_s >= from_s) & np.isfinite(counter.value)
    t, v = counter.t_s[since], counter.value[since]
    if len(t) < 3:
        return None
    middle_s = float((t[0] + t[-1]) / 2)
    middle = float(np.median(v - growth.bytes_per_s * (t - middle_s)))
    return FittedSlope(
        counter.shown, verdict, float(t[0]), float(t[-1]), middle_s, middle,
        growth.bytes_per_s, growth.ci_low, growth.ci_high,
    )  # fmt: skip


def _processes(readings: Readings, lives: Sequence[Life]) -> tuple[WatchedProcess, ...]:
    """Roots in the order of their start, then the others that lived longest."""
    end_s = max((float(t[-1]) for t, _ in readings.series.values() if len(t)), default=0.0)
    known = [life for life in settled(readings, lives) if life.pid != BRIEF_PID and np.isfinite(life.start_s)]
    made = [
        WatchedProcess(life.pid, life.name, life.start_s, None if life.end_s == float("inf") else life.end_s, life.root)
        for life in known
    ]

    def order(one: WatchedProcess) -> tuple[bool, float, float, int]:
        lived = (end_s if one.end_s is None else one.end_s) - max(0.0, one.start_s)
        return not one.root, one.start_s if one.root else -lived, one.start_s, one.pid

    return tuple(sorted(made, key=order))

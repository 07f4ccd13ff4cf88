"""All counters of one source, each judged once, and what follows from two of them together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from leakscope.detect.series.counters import PROCESS_START, WORK, Counter
from leakscope.detect.series.lives import restarts, trend_of_lives
from leakscope.detect.series.trend import Course, Trend, trend

FloatArray = npt.NDArray[np.float64]

NOTHING = Trend(Course.SHORT)


class Book:
    """Counters by name with their courses; names that are not there have a course that grew nowhere."""

    def __init__(self, counters: Sequence[Counter]) -> None:
        self.counters = {counter.name: counter for counter in counters if counter.name != PROCESS_START}
        start = next((counter for counter in counters if counter.name == PROCESS_START), None)
        self.restarted_s: FloatArray = restarts(start.t_s, start.value) if start is not None else np.empty(0)
        self._trends: dict[str, Trend] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.counters

    def __getitem__(self, name: str) -> Trend:
        """The course of counter ``name``."""
        if name not in self._trends:
            counter = self.counters.get(name)
            self._trends[name] = (
                NOTHING if counter is None else trend_of_lives(counter.t_s, counter.value, self.restarted_s)
            )
        return self._trends[name]

    def matching(self, pattern: re.Pattern[str], in_bytes: bool | None = None) -> list[str]:
        """Names that ``pattern`` matches in full, those of counters in bytes (or not) where that is asked."""
        return [
            name
            for name, counter in self.counters.items()
            if pattern.fullmatch(name) and (in_bytes is None or counter.in_bytes == in_bytes)
        ]

    def work(self) -> list[str]:
        """Running counts of work that moved."""
        return [n for n in self.matching(WORK, in_bytes=False) if np.ptp(self.counters[n].value) > 0]

    def shown(self, name: str) -> str:
        """The counter's name with its unit."""
        counter = self.counters.get(name)
        return counter.shown if counter is not None else name

    def rising(self, *names: str) -> str:
        """The first of ``names`` that rises for good, by time or by work, '' for none."""
        return next((name for name in names if self.course(name).rising), "")

    def course(self, name: str) -> Trend:
        """As ``self[name]``, but a counter that stopped only while the work stopped still rises."""
        trend = self[name]
        if trend.course is not Course.PLATEAU or WORK.fullmatch(name):
            return trend
        key = f"{name} by work"
        if key not in self._trends:
            self._trends[key] = next((t for t in map(partial(by_work, self, name), self.work()) if t), trend)
        return self._trends[key]

    def add(self, name: str, parts: Sequence[tuple[float, str]]) -> str:
        """Enter the weighted sum of counters as a counter of its own (readings that all have); '' if one is missing."""
        if any(part not in self for _, part in parts):
            return ""
        first = self.counters[parts[0][1]]
        times = first.t_s
        for _, part in parts[1:]:
            times = np.intersect1d(times, self.counters[part].t_s)
        if len(times) < 2:
            return ""
        value = np.zeros(len(times))
        for weight, part in parts:
            other = self.counters[part]
            value += weight * other.value[np.searchsorted(other.t_s, times)]
        self.counters[name] = Counter(name, times, value, first.in_bytes)
        return name

    def pair(self, one: str, other: str) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(times, values, values) at the times when both were read."""
        a, b = self.counters[one], self.counters[other]
        times = np.intersect1d(a.t_s, b.t_s)
        return times, a.value[np.searchsorted(a.t_s, times)], b.value[np.searchsorted(b.t_s, times)]

    def correlation(self, one: str, other: str) -> float:
        """Correlation of two counters over all readings; 0 where either does not move."""
        if one not in self or other not in self:
            return 0.0
        _, a, b = self.pair(one, other)
        if len(a) < 4 or np.ptp(a) == 0 or np.ptp(b) == 0:
            return 0.0
        return float(np.corrcoef(a, b)[0, 1])

    def span_s(self) -> float:
        """From the first reading of any counter to the last."""
        times = [counter.t_s for counter in self.counters.values() if len(counter.t_s)]
        return float(max(t[-1] for t in times) - min(t[0] for t in times)) if times else 0.0

    def names(self) -> Iterator[str]:
        """All counters."""
        return iter(list(self.counters))


PAUSE_SHARE = 0.1
MAX_PAUSE_SHARE = 0.5
"""Work that stands still for this last share of the time has stopped; for more, nothing can be told of the end."""


def by_work(book: Book, name: str, work: str) -> Trend | None:
    """The course of ``name`` against ``work`` in place of time, where the work stopped before the end and the counter
    goes on rising with it; times and rates are given back in seconds. None otherwise."""
    times, done, value = book.pair(work, name)
    if len(times) < 16 or np.ptp(done) == 0:
        return None
    ended = times[int(np.argmax(done >= done[-1]))]
    if not PAUSE_SHARE <= (times[-1] - ended) / (times[-1] - times[0]) <= MAX_PAUSE_SHARE:
        return None
    moved = np.r_[True, np.diff(np.maximum.accumulate(done)) > 0]
    if moved.sum() < 16:
        return None
    against = trend(done[moved].astype(np.float64), value[moved])
    if not against.rising:
        return None
    start = (
        float(np.interp(against.start_s, done[moved], times[moved])) if against.start_s > done[0] else float(times[0])
    )
    per_second = (done[-1] - max(against.start_s, done[0])) / max(times[-1] - start, 1e-9)
    return replace(
        against,
        rate=against.rate * per_second,
        low=against.low * per_second,
        high=against.high * per_second,
        start_s=start,
        end_s=float(times[-1]),
        smallest_rate=against.smallest_rate * per_second,
    )

"""Counters and histograms that only rise, over the last minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from leakscope.detect.slo.latency import Jitter, latency_p95, p99_jitter, percentile

FloatArray = npt.NDArray[np.float64]

WINDOW_S = 300.0
SLOT_S = 10.0
SLACK = 0.9
"""Readings come a little early or late: so much of a slot or window is enough."""


class Counters:
    """Readings of counters that only rise. One that falls was reset, and what was before is forgotten."""

    def __init__(self, keep_s: float = WINDOW_S) -> None:
        self._keep_s = keep_s
        self._readings: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, now_s: float, values: Mapping[str, float]) -> None:
        """One reading of all of them."""
        if self._readings and any(value < self._readings[-1][1].get(name, 0.0) for name, value in values.items()):
            self._readings.clear()
        self._readings.append((now_s, dict(values)))
        while len(self._readings) > 2 and self._readings[1][0] <= now_s - self._keep_s:
            self._readings.popleft()

    def increase(self, name: str) -> float:
        """How much it rose over the window, as far as there are readings."""
        if len(self._readings) < 2:
            return 0.0
        return self._readings[-1][1].get(name, 0.0) - self._readings[0][1].get(name, 0.0)


class Latencies:
    """Readings of one histogram of latencies: its percentiles over the window and by slots of ten seconds."""

    def __init__(self, bounds: FloatArray) -> None:
        """:param bounds: upper bounds in seconds, float64[n], rising."""
        self.bounds = bounds
        self._readings: deque[tuple[float, FloatArray]] = deque()

    def add(self, now_s: float, counts: FloatArray) -> None:
        """Observations in each bucket alone since the server began; one that falls begins anew."""
        if self._readings and (counts < self._readings[-1][1]).any():
            self._readings.clear()
        if self._readings and now_s - self._readings[-1][0] < SLACK * SLOT_S:
            return
        self._readings.append((now_s, counts))
        while len(self._readings) > 2 and self._readings[1][0] <= now_s - WINDOW_S:
            self._readings.popleft()

    def jitter(self) -> Jitter | None:
        """Of the P99 of the slots of the window."""
        counts = [counts for _, counts in self._readings]
        slots = [after - before for before, after in pairwise(counts)]
        p99 = [percentile(self.bounds, slot, 0.99) for slot in slots]
        values = np.array([np.nan if value is None else value for value in p99], np.float64)
        return p99_jitter(values, np.array([slot.sum() for slot in slots], np.float64))

    def latest_p99(self) -> float | None:
        """Of the last slot; None without a request in it."""
        if len(self._readings) < 2:
            return None
        return percentile(self.bounds, self._readings[-1][1] - self._readings[-2][1], 0.99)

    def p95(self) -> float | None:
        """Over the window."""
        return latency_p95(self.bounds, self._readings[-1][1] - self._readings[0][1]) if self._readings else None


class Levels:
    """Readings of RSS and used memory of one cache."""

    def __init__(self, keep_s: float, every_s: float) -> None:
        """:param every_s: the least time between two that are kept."""
        self._keep_s, self._every_s = keep_s, every_s
        self._readings: deque[tuple[float, float, float]] = deque()

    def add(self, now_s: float, rss_bytes: float, used_bytes: float) -> None:
        """One reading."""
        if not self._readings or now_s - self._readings[-1][0] >= SLACK * self._every_s:
            self._readings.append((now_s, rss_bytes, used_bytes))
        while self._readings[0][0] < now_s - self._keep_s:
            self._readings.popleft()

    def clear(self) -> None:
        """The server began anew."""
        self._readings.clear()

    def arrays(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(times, RSS, used), float64[n] each."""
        columns = np.array(self._readings, np.float64).reshape(-1, 3)
        return columns[:, 0], columns[:, 1], columns[:, 2]

    def since(self, seconds: float) -> tuple[float, float] | None:
        """(growth of RSS, growth of used) since the reading that is nearest to so old, at most twice as old; None where
        there is none."""
        if not self._readings:
            return None
        now_s, rss, used = self._readings[-1]
        ages = [(abs(now_s - at - seconds), at, before) for at, *before in self._readings]
        _, at, (rss_then, used_then) = min(ages)
        if not SLACK * seconds <= now_s - at <= 2 * seconds:
            return None
        return rss - rss_then, used - used_then

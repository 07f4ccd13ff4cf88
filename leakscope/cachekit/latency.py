"""Quantiles of latencies in little memory."""

from __future__ import annotations

import math
from collections import Counter

GROWTH = 1.04
"""Ratio of the bounds of a bucket: quantiles are at most 2 % off."""
_LOG = math.log(GROWTH)
MAX_NS = 3_600 * 10**9
STEPS = 18
"""Buckets of a bound that is told: twice the one before, near enough."""
FIRST_EDGE, LAST_EDGE = 10, 35


class LatencyHistogram:
    """Counts by geometric buckets, at most about 740 of them. Not thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self._buckets: Counter[int] = Counter()

    def add(self, latency_ns: int) -> None:
        """One latency, of 1 ns to an hour; others count as the nearest of these."""
        clipped = min(max(latency_ns, 1), MAX_NS)
        self.count += 1
        self.total_ns += clipped
        self._buckets[int(math.log(clipped) / _LOG)] += 1

    def cumulative(self) -> tuple[list[float], list[int]]:
        """(upper bounds in ns, latencies below each), exact counts, of :data:`STEPS` buckets together each.

        From a microsecond to a minute; what lies above the last bound is in :attr:`count` alone.
        """
        edges = range(STEPS * FIRST_EDGE, STEPS * LAST_EDGE + 1, STEPS)
        buckets = list(self._buckets.items())
        return [GROWTH**edge for edge in edges], [sum(n for i, n in buckets if i < edge) for edge in edges]

    def quantile_ns(self, share: float) -> float:
        """The latency that ``share`` (0…1) of all do not exceed, within 2 %; NaN of none."""
        left = max(1, math.ceil(share * self.count))
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return GROWTH ** (bucket + 0.5)
        return math.nan

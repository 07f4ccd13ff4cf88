"""What any cache tells, over time: the values of its objectives, and the families that caches share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from leakscope.detect.slo.hidden import RATIO_WINDOW_S, hidden_growth, hidden_growth_ratio
from leakscope.detect.slo.hits import bound_of_events, hit_ratio, relative_hit_ratio
from leakscope.detect.slo.states import (
    HIDDEN_GROWTH,
    HIDDEN_GROWTH_RATIO,
    HIT_RATIO,
    HIT_RATIO_RELATIVE,
    LATENCY_P95,
    P99_JITTER,
    P99_JITTER_ROBUST,
)
from leakscope.report.export.metrics import Metric
from leakscope.serve.source import count, gauge
from leakscope.serve.windows import Counters, Latencies, Levels

HIDDEN_WINDOW_S = 3600.0
Values = dict[str, float | None]
"""By name; None: unknown."""


class CacheBook:
    """What any cache tells, over time, and the values of its objectives."""

    def __init__(self, name: str, every_s: float, bound: float | None = None) -> None:
        """:param bound: the hit ratio of an infinite cache for the same keys, where it is known."""
        self._name, self._bound = name, bound
        self.counters = Counters()
        self._latencies: Latencies | None = None
        self._levels = Levels(HIDDEN_WINDOW_S, every_s)

    def hits(self, hits: str, lookups: str, repeated: float | None = None) -> Values:
        """Of two counters; ``repeated``: lookups that missed what had been there before, where that is known."""
        found, asked = self.counters.increase(hits), self.counters.increase(lookups)
        ratio = hit_ratio(found, asked)
        bound = self._bound if repeated is None else bound_of_events(found, asked, repeated)
        return {HIT_RATIO.name: ratio, HIT_RATIO_RELATIVE.name: relative_hit_ratio(ratio, bound)}

    def share(self, part: str, whole: str) -> float | None:
        """Of two counters over the window; None with few lookups."""
        return hit_ratio(self.counters.increase(part), self.counters.increase(whole))

    def latencies(self, now_s: float, bounds: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> Values:
        """Of one histogram."""
        if self._latencies is None or not np.array_equal(self._latencies.bounds, bounds):
            self._latencies = Latencies(bounds)
        self._latencies.add(now_s, counts)
        jitter = self._latencies.jitter()
        return {
            LATENCY_P95.name: self._latencies.p95(),
            P99_JITTER.name: jitter.ratio if jitter else None,
            P99_JITTER_ROBUST.name: jitter.robust if jitter else None,
        }

    def memory(self, now_s: float, rss: float, used: float, *, restarted: bool) -> tuple[Values, list[Metric]]:
        """Of RSS and used memory, in bytes."""
        if restarted:
            self._levels.clear()
        self._levels.add(now_s, rss, used)
        growth = self._levels.since(RATIO_WINDOW_S)
        slope = hidden_growth(*self._levels.arrays())
        name = (self._name,)
        ends = (slope.bytes_per_s, slope.low, slope.high) if slope else (None, None, None)
        hidden = [
            gauge("cache.hidden", "By", "RSS beyond used memory.", [(name, rss - used)]),
            gauge("cache.hidden.growth", "By/s", "Slope of RSS - used over the last hour.", [(name, ends[0])]),
            gauge("cache.hidden.growth.low", "By/s", "Lower end of its 95 % interval.", [(name, ends[1])]),
            gauge("cache.hidden.growth.high", "By/s", "Upper end of its 95 % interval.", [(name, ends[2])]),
        ]
        values: Values = {
            HIDDEN_GROWTH_RATIO.name: hidden_growth_ratio(*growth, used) if growth else None,
            HIDDEN_GROWTH.name: slope.per_hour if slope else None,
        }
        return values, hidden

    def p99(self) -> Metric:
        """Of the last ten seconds."""
        latest = self._latencies.latest_p99() if self._latencies else None
        return gauge(
            "latency.p99", "s", "99th percentile of the latencies of the last ten seconds.", [((self._name,), latest)]
        )


def store_metrics(name: str, values: Mapping[str, float | None]) -> list[Metric]:
    """The families that caches share, of what is known of them."""
    one = (name,)
    return [
        gauge("cache.used", "By", "Memory that the cache says it uses.", [(one, values.get("used"))]),
        gauge("cache.rss", "By", "Resident memory of its process.", [(one, values.get("rss"))]),
        gauge(
            "cache.limit", "By", "Memory that it may use; absent without a limit.", [(one, values.get("limit") or None)]
        ),
        gauge("cache.keys", "1", "Keys.", [(one, values.get("keys"))]),
        gauge("cache.keys.without.ttl", "1", "Keys that never expire.", [(one, values.get("keys_nottl"))]),
        count("cache.lookups", "Lookups; of inference engines, tokens looked up.", [(one, values.get("lookups"))]),
        count("cache.hits", "Lookups that found something.", [(one, values.get("hits"))]),
        count("cache.evictions", "Objects that were evicted for room.", [(one, values.get("evicted"))]),
        count("cache.expirations", "Objects whose time to live ended.", [(one, values.get("expired"))]),
    ]

"""Metrics endpoints as sources: inference engines, beside their KV events, and services with caches of cachekit."""

from __future__ import annotations

import math

from leakscope.detect.slo.states import (
    HIT_RATIO,
    HIT_RATIO_RELATIVE,
    LATENCY_P95,
    P99_JITTER,
    P99_JITTER_ROBUST,
    STALE_RATIO,
)
from leakscope.errors import BadInputError
from leakscope.report.export.metrics import Metric
from leakscope.report.text import printable
from leakscope.serve.cache_book import CacheBook, Values, store_metrics
from leakscope.serve.kv_events import KvEvents
from leakscope.serve.objectives import Objectives
from leakscope.serve.source import gauge
from leakscope.streams.address import Address
from leakscope.streams.engine_metrics import EngineMetrics, readings_of
from leakscope.streams.latency_histograms import SERVICE_LATENCY, histogram_of

GREATEST = ("kv_cache_usage_ratio", "num_kv_block_tokens", "num_kv_page_tokens")
"""Of several ranks the greatest counts; the other counters add up."""
LOOKUPS, HITS, STALE = "prefix_cache_queries_total", "prefix_cache_hits_total", "stale_total"
CACHEKIT = {"cachekit_lookups_total": LOOKUPS, "cachekit_hits_total": HITS, "cachekit_stale_total": STALE}
"""What a service with leakscope.cachekit.prometheus tells, over all of its caches."""
CACHEKIT_LATENCY = "cachekit_latency_seconds"


class EngineSource:
    """The metrics of one inference engine, or of any service with a histogram of its latencies or with cachekit."""

    kind = "engine"

    def __init__(
        self,
        address: Address,
        every_s: float,
        bound: float | None = None,
        request_latency: tuple[str, ...] = (),
        cache_latency: tuple[str, ...] = (),
        events: KvEvents | None = None,
    ) -> None:
        """:param request_latency: names of histograms of the latencies of requests, before those that are known;
        ``cache_latency``: of those of a cache; ``events``: the KV events of the same engine."""
        self.name, self.every_s = printable(address.shown), every_s
        self._server = EngineMetrics(address, every_s)
        self._request_latency = (*request_latency, *SERVICE_LATENCY)
        self._cache_latency = (*cache_latency, CACHEKIT_LATENCY)
        self._events = events
        self._book = CacheBook(self.name, every_s, bound)
        self._cache = CacheBook(self.name, every_s)  # for its latencies alone
        self._objectives = Objectives(
            self.name, P99_JITTER, P99_JITTER_ROBUST, HIT_RATIO, HIT_RATIO_RELATIVE, LATENCY_P95, STALE_RATIO
        )

    def read(self, now_s: float) -> list[Metric]:
        """See :class:`Source`."""
        text = self._server.text()
        told = self._counters(text)
        requests = histogram_of(text, self._request_latency, self.name)
        cache = histogram_of(text, self._cache_latency, self.name)
        if not told and requests is None and cache is None:
            raise BadInputError(
                f"{self.name}: answers, but with no counter of vLLM, SGLang, LMCache or cachekit and no histogram of "
                "latencies; is this the address of /metrics? --latency-histogram names that of another service"
            )
        objectives = self._hits(now_s, told)
        more: list[Metric] = []
        if cache is not None:
            objectives |= self._cache.latencies(now_s, *cache)
        if requests is not None:  # these count for jitter, and are no latencies of a cache
            found = self._book.latencies(now_s, *requests)
            del found[LATENCY_P95.name]
            objectives |= found
        if cache is not None or requests is not None:
            more.append((self._cache if requests is None else self._book).p99())
        shared = store_metrics(self.name, {"lookups": told.get(LOOKUPS), "hits": told.get(HITS)})
        return [
            *(one for one in shared if one.samples),
            *self._engine(told),
            *more,
            *self._objectives.metrics(objectives, given=True),
        ]

    def close(self) -> None:
        """See :class:`Source`; each reading has a connection of its own."""

    def _counters(self, text: str) -> dict[str, float]:
        told: dict[str, float] = {}
        for (name, _), value in readings_of(text, self.name).items():
            told[name] = max(value, told.get(name, value)) if name in GREATEST else value + told.get(name, 0.0)
        return told if LOOKUPS in told else told | cachekit_counters(text)

    def _hits(self, now_s: float, told: dict[str, float]) -> Values:
        if LOOKUPS not in told:
            return {}
        counters = {name: told.get(name, 0.0) for name in (LOOKUPS, HITS, STALE)}
        repeated = self._events.repeated_tokens() if self._events else None
        self._book.counters.add(now_s, counters | ({} if repeated is None else {"repeated": repeated}))
        known = None if repeated is None else self._book.counters.increase("repeated")
        found = self._book.hits(HITS, LOOKUPS, known)
        return found | ({STALE_RATIO.name: self._book.share(STALE, LOOKUPS)} if STALE in told else {})

    def _engine(self, told: dict[str, float]) -> list[Metric]:
        running, waiting = told.get("num_requests_running"), told.get("num_requests_waiting")
        usage = told.get("kv_cache_usage_ratio")
        tokens = told.get("num_kv_tokens")
        if usage is None and tokens:
            free = told.get("num_kv_tokens_available", 0.0) + told.get("num_kv_tokens_evictable", 0.0)
            usage = (tokens - free) / tokens
        idle = usage if running == 0 and waiting == 0 else None
        name = (self.name,)
        metrics = [
            gauge("engine.requests.running", "1", "Requests that run.", [(name, running)]),
            gauge("engine.requests.waiting", "1", "Requests that wait.", [(name, waiting)]),
            gauge("engine.kv.usage.ratio", "1", "Share of the KV cache's blocks that requests hold.", [(name, usage)]),
            gauge(
                "engine.kv.idle.usage.ratio", "1",
                "The same while no request runs or waits, when it must be 0; absent else.", [(name, idle)],
            ),
            gauge(
                "engine.pinned", "{object}", "Objects that LMCache holds pinned.",
                [(name, told.get("lmcache_pinned_count"))],
            ),
        ]  # fmt: skip
        return [metric for metric in metrics if metric.samples]


def cachekit_counters(text: str) -> dict[str, float]:
    """The counters of :data:`CACHEKIT` in a text that was parsed before."""
    from prometheus_client.parser import text_string_to_metric_families

    told: dict[str, float] = {}
    if "cachekit_lookups" not in text:
        return told
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in CACHEKIT and math.isfinite(sample.value):
                name = CACHEKIT[sample.name]
                told[name] = told.get(name, 0.0) + sample.value
    return told

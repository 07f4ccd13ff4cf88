"""Inference engines as sources: their metrics, beside the KV events of the same engine where those are served too."""

from __future__ import annotations

from leakscope.detect.slo.states import HIT_RATIO, HIT_RATIO_RELATIVE, LATENCY_P95, P99_JITTER, P99_JITTER_ROBUST
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


class EngineSource:
    """The metrics of one inference engine, or of any service with a histogram of its latencies."""

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
        self._request_latency, self._cache_latency = (*request_latency, *SERVICE_LATENCY), cache_latency
        self._events = events
        self._book = CacheBook(self.name, every_s, bound)
        self._cache = CacheBook(self.name, every_s)  # for its latencies alone
        self._objectives = Objectives(
            self.name,
            P99_JITTER,
            P99_JITTER_ROBUST,
            HIT_RATIO,
            HIT_RATIO_RELATIVE,
            *([LATENCY_P95] if cache_latency else []),
        )

    def read(self, now_s: float) -> list[Metric]:
        """See :class:`Source`."""
        text = self._server.text()
        told = self._counters(text)
        requests = histogram_of(text, self._request_latency, self.name)
        cache = histogram_of(text, self._cache_latency, self.name) if self._cache_latency else None
        if not told and requests is None and cache is None:
            raise BadInputError(
                f"{self.name}: answers, but with no counter of vLLM, SGLang or LMCache and no histogram of latencies; "
                "is this the address of /metrics? --latency-histogram names that of another service"
            )
        objectives = self._hits(now_s, told)
        more: list[Metric] = []
        if requests is not None:
            found = self._book.latencies(now_s, *requests)
            del found[LATENCY_P95.name]  # whole requests are no cache
            objectives |= found
            more.append(self._book.p99())
        if cache is not None:
            objectives[LATENCY_P95.name] = self._cache.latencies(now_s, *cache)[LATENCY_P95.name]
        shared = store_metrics(
            self.name,
            {"lookups": told.get("prefix_cache_queries_total"), "hits": told.get("prefix_cache_hits_total")},
        )
        return [
            *(one for one in shared if one.samples),
            *self._engine(told),
            *more,
            *self._objectives.metrics(objectives),
        ]

    def close(self) -> None:
        """See :class:`Source`; each reading has a connection of its own."""

    def _counters(self, text: str) -> dict[str, float]:
        told: dict[str, float] = {}
        for (name, _), value in readings_of(text, self.name).items():
            told[name] = max(value, told.get(name, value)) if name in GREATEST else value + told.get(name, 0.0)
        return told

    def _hits(self, now_s: float, told: dict[str, float]) -> Values:
        if "prefix_cache_queries_total" not in told:
            return {}
        counters = {name: told.get(f"prefix_cache_{name}_total", 0.0) for name in ("queries", "hits")}
        repeated = self._events.repeated_tokens() if self._events else None
        self._book.counters.add(now_s, counters | ({} if repeated is None else {"repeated": repeated}))
        known = None if repeated is None else self._book.counters.increase("repeated")
        return self._book.hits("hits", "queries", known)

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

"""Metrics of caches for Prometheus. Of the kit this module alone needs prometheus_client; it is imported by itself.

from leakscope.cachekit.prometheus import CacheCollector
REGISTRY.register(CacheCollector([cache], {"answers": chain}))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from leakscope.cachekit.cache import Cache
from leakscope.cachekit.tiers import TierChain

NS = 1e-9


class CacheCollector(Collector):
    """Tells of caches by their names and of chains of tiers by the names given here, never of keys.

    A cache that is a tier of a chain is told of by the chain; name it once.
    """

    def __init__(self, caches: Iterable[Cache[Any, Any]] = (), chains: Mapping[str, TierChain] | None = None) -> None:
        self._caches, self._chains = list(caches), dict(chains or {})

    def collect(self) -> Iterator[Family]:
        """The families of one scrape."""
        lookups = CounterMetricFamily("cachekit_lookups", "Lookups.", labels=["cache"])
        hits = CounterMetricFamily("cachekit_hits", "Lookups that found something, in any tier.", labels=["cache"])
        stale = CounterMetricFamily("cachekit_stale", "Entries that a lookup found past their time.", labels=["cache"])
        dropped = CounterMetricFamily("cachekit_dropped_handles", "Strong handles not released.", labels=["cache"])
        evicted = CounterMetricFamily("cachekit_evictions", "Freed entries.", labels=["cache", "cause"])
        size = GaugeMetricFamily("cachekit_size", "What is resident, as getsizeof counts.", labels=["cache"])
        unreachable = GaugeMetricFamily("cachekit_unreachable_size", "Of it: found no more.", labels=["cache"])
        held = GaugeMetricFamily("cachekit_held_entries", "Entries with a strong handle.", labels=["cache"])
        latency = HistogramMetricFamily("cachekit_latency_seconds", "Of lookups in a tier.", labels=["cache", "tier"])
        for cache in self._caches:
            counts = cache.stats()
            name = [cache.name]
            lookups.add_metric(name, counts.hits + counts.misses)
            hits.add_metric(name, counts.hits)
            stale.add_metric(name, counts.stale)
            dropped.add_metric(name, counts.dropped_handles)
            for cause, number in counts.evictions.items():
                evicted.add_metric([*name, cause], number)
            size.add_metric(name, counts.size)
            unreachable.add_metric(name, counts.unreachable_size)
            held.add_metric(name, counts.held_entries)
        for chain_name, chain in self._chains.items():
            tiers = chain.stats()
            lookups.add_metric([chain_name], tiers[0].lookups if tiers else 0)
            hits.add_metric([chain_name], sum(tier.hits for tier in tiers))
            stale.add_metric([chain_name], sum(tier.stale for tier in tiers))
            for tier_name, bounds, below, count, total_ns in chain.latencies():
                buckets = [(repr(bound * NS), float(number)) for bound, number in zip(bounds, below, strict=True)]
                latency.add_metric([chain_name, tier_name], [*buckets, ("+Inf", float(count))], total_ns * NS)
        yield from (lookups, hits, stale, dropped, evicted, size, unreachable, held, latency)

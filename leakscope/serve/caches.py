"""Live caches as sources: Redis and memcached."""

from __future__ import annotations

import contextlib
from pathlib import Path

from leakscope.detect.slo.states import (
    HIDDEN_GROWTH,
    HIDDEN_GROWTH_RATIO,
    HIT_RATIO,
    HIT_RATIO_RELATIVE,
    LATENCY_P95,
    P99_JITTER,
    P99_JITTER_ROBUST,
    STALE_RATIO,
)
from leakscope.report.export.metrics import Metric
from leakscope.report.text import printable
from leakscope.serve.cache_book import CacheBook, Values, store_metrics
from leakscope.serve.objectives import Objectives
from leakscope.serve.verdicts import LiveVerdict
from leakscope.streams.address import Address
from leakscope.streams.collection import Collecting
from leakscope.streams.memcached import MemcachedAudit
from leakscope.streams.redis_counters import BOUNDS_S, RedisCounters
from leakscope.streams.redis_info import BYTES, counters_of

BYTE_COUNTERS = ("rss", *(f"redis_{name}" for name in BYTES))
HERE = ("127.0.0.1", "::1", "localhost")


class RedisSource:
    """One Redis server: INFO and LATENCY HISTOGRAM, no key is touched."""

    kind = "redis"

    def __init__(
        self,
        address: Address,
        every_s: float,
        bound: float | None = None,
        look_s: float = 300.0,
        limit_bytes: float | None = None,
    ) -> None:
        self.name, self.every_s = printable(address.shown), every_s
        self._server = RedisCounters(address, Collecting())
        self._live = LiveVerdict(self.name, look_s, limit_bytes, byte_counters=BYTE_COUNTERS)
        self._book = CacheBook(self.name, every_s, bound)
        self._objectives = Objectives(
            self.name, P99_JITTER, P99_JITTER_ROBUST, HIDDEN_GROWTH_RATIO, HIDDEN_GROWTH, HIT_RATIO,
            HIT_RATIO_RELATIVE, LATENCY_P95, STALE_RATIO,
        )  # fmt: skip
        self._run_id = ""

    def read(self, now_s: float) -> list[Metric]:
        """See :class:`Source`."""
        info = self._server.info()
        told = counters_of(info)
        hits, misses = float(info.get("keyspace_hits", 0)), float(info.get("keyspace_misses", 0))
        values: Values = {
            "used": told.get("redis_used_memory"),
            "rss": told.get("redis_used_memory_rss"),
            "limit": told.get("redis_maxmemory"),
            "keys": told.get("redis_keys"),
            "keys_nottl": told.get("redis_keys_nottl"),
            "lookups": hits + misses,
            "hits": hits,
            "evicted": told.get("redis_evicted_total"),
            "expired": told.get("redis_expired_total"),
        }
        run_id = str(info.get("run_id", ""))
        restarted, self._run_id = run_id != self._run_id, run_id
        self._book.counters.add(now_s, {"hits": hits, "lookups": hits + misses})
        objectives: Values = self._book.hits("hits", "lookups")
        more: list[Metric] = []
        counts = self._server.latencies()
        if counts is not None:
            objectives |= self._book.latencies(now_s, BOUNDS_S, counts)
            more.append(self._book.p99())
        if values["used"] is not None and values["rss"] is not None:
            found, hidden = self._book.memory(now_s, values["rss"], values["used"], restarted=restarted)
            objectives |= found
            more += hidden
        with contextlib.suppress(KeyError, ValueError):
            objectives[STALE_RATIO.name] = float(info["expired_stale_perc"]) / 100
        verdict = self._live.told(now_s, told | {"rss": values["rss"]})
        return [*store_metrics(self.name, values), *more, *self._objectives.metrics(objectives), *verdict]

    def close(self) -> None:
        """See :class:`Source`."""
        self._server.close()


class MemcachedSource:
    """One memcached server: ``stats`` alone. Where it runs on this host, its RSS is read from /proc."""

    kind = "memcached"

    def __init__(self, address: Address, every_s: float, bound: float | None = None) -> None:
        self._address, self._server = address, MemcachedAudit(address, Collecting())
        self.name, self.every_s = printable(address.shown), every_s
        self._book = CacheBook(self.name, every_s, bound)
        self._objectives = Objectives(
            self.name, HIDDEN_GROWTH_RATIO, HIDDEN_GROWTH, HIT_RATIO, HIT_RATIO_RELATIVE, LATENCY_P95, STALE_RATIO
        )
        self._pid = ""

    def read(self, now_s: float) -> list[Metric]:
        """See :class:`Source`."""
        stats = self._server.stats()
        told = {name: float(value) for name, value in stats.items() if value.isdecimal()}
        hits, misses = told.get("get_hits", 0.0), told.get("get_misses", 0.0)
        pid = stats.get("pid", "")
        restarted, self._pid = pid != self._pid, pid
        values: Values = {
            "used": told.get("bytes"),
            "rss": self._rss(pid),
            "limit": told.get("limit_maxbytes"),
            "keys": told.get("curr_items"),
            "lookups": hits + misses,
            "hits": hits,
            "evicted": told.get("evictions"),
        }
        self._book.counters.add(now_s, {"hits": hits, "lookups": hits + misses})
        objectives: Values = self._book.hits("hits", "lookups")
        more: list[Metric] = []
        if values["used"] is not None and values["rss"] is not None:
            found, hidden = self._book.memory(now_s, values["rss"], values["used"], restarted=restarted)
            objectives |= found
            more += hidden
        return [*store_metrics(self.name, values), *more, *self._objectives.metrics(objectives)]

    def close(self) -> None:
        """See :class:`Source`; each reading has a connection of its own."""

    def _rss(self, pid: str) -> float | None:
        """Of a server on this host, in bytes. The PID that it tells may be of another host or namespace."""
        if self._address.host not in HERE or not pid.isdecimal():
            return None
        from leakscope.record.samplers.process import ProcessSampler

        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "memcached":
                readings = ProcessSampler(lambda: [int(pid)]).sample(0)
                return next((float(one.value) for one in readings if one.counter == "rss"), None)
        return None

"""What a Redis server tells of itself again and again: INFO, and its own histograms of latencies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from leakscope.errors import BadInputError
from leakscope.streams.redis_audit import RedisAudit

POWERS = 40
BOUNDS_S = np.array([2.0**power * 1e-6 for power in range(POWERS)])
"""Upper bounds of the buckets of LATENCY HISTOGRAM: powers of two of a microsecond (Redis 7.0, "LATENCY HISTOGRAM")."""
ADMINISTRATION = frozenset(
    {
        *("acl", "auth", "client", "cluster", "command", "config", "dbsize", "debug", "hello", "info", "latency"),
        *("memory", "module", "monitor", "object", "ping", "psubscribe", "psync", "pttl", "pubsub", "quit", "replconf"),
        *("scan", "script", "select", "slowlog", "ssubscribe", "subscribe", "ttl", "type"),
    }
)
"""Not what a service asks of its cache, and in part our own."""
BLOCKING = frozenset(
    {
        *("blmove", "blmpop", "blpop", "brpop", "brpoplpush", "bzmpop", "bzpopmax", "bzpopmin", "wait", "waitaof"),
        *("xread", "xreadgroup"),
    }
)
"""Their time is that of waiting for others."""
MAX_REFUSALS = 3


class RedisCounters(RedisAudit):
    """One server, asked for nothing but numbers about itself: INFO and LATENCY HISTOGRAM."""

    _refusals = 0

    def info(self) -> Mapping[str, Any]:
        """The answer to INFO. Raises BadInputError without any secret where there is none."""
        answer: Mapping[str, Any] = self._asked(self._client(self._only or 0).info)
        return answer

    def latencies(self) -> npt.NDArray[np.float64] | None:
        """Commands of services by bucket of :data:`BOUNDS_S`, since the server began; None where it does not tell
        (before 7.0, or its ACL lacks +latency|histogram)."""
        if self._refusals >= MAX_REFUSALS:
            return None
        try:
            answer = self._asked(self._client(self._only or 0).execute_command, "LATENCY", "HISTOGRAM")
        except BadInputError:
            self._refusals += 1
            return None
        self._refusals = 0
        return buckets_of(answer)

    def close(self) -> None:
        """Close its connections."""
        for client in self._clients.values():
            client.close()


def buckets_of(answer: Any) -> npt.NDArray[np.float64]:
    """Counts by bucket, float64[:data:`POWERS`], of an answer to LATENCY HISTOGRAM: name, then (calls, N,
    histogram_usec, cumulative counts by upper bound) of each command. What is of another form counts as nothing."""
    counts = np.zeros(POWERS)
    for name, fields in _pairs(answer):
        command = _text(name).lower().partition("|")[0]
        if command in ADMINISTRATION or command in BLOCKING:
            continue
        of = {_text(key): value for key, value in _pairs(fields)}
        before = 0
        for bound, cumulative in _pairs(of.get("histogram_usec", ())):
            if not isinstance(bound, int) or not isinstance(cumulative, int) or bound < 1 or cumulative < before:
                break
            counts[min(round(math.log2(bound)), POWERS - 1)] += cumulative - before
            before = cumulative
    return counts


def _pairs(answer: Any) -> list[tuple[Any, Any]]:
    if isinstance(answer, Mapping):
        return list(answer.items())
    if isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
        return list(zip(answer[::2], answer[1::2], strict=False))
    return []


def _text(value: Any) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)

"""From what the user names to sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leakscope.errors import BadInputError
from leakscope.serve.source import Source
from leakscope.streams.address import Address

MAX_SOURCES = 64


@dataclass(frozen=True)
class Settings:
    """How to read. ``every_s``: between readings of live sources; ``look_s``: between verdicts."""

    every_s: float = 10.0
    look_s: float = 300.0
    memory: str = "2GiB"
    limit_bytes: float | None = None
    trace: Path | None = None
    request_latency: tuple[str, ...] = ()
    cache_latency: tuple[str, ...] = ()


def open_sources(
    addresses: Sequence[Address], captures: Sequence[Path], pids: Sequence[int], cgroup: Path | None, how: Settings
) -> list[Source]:
    """Sources of all that is named. Raises BadInputError for what cannot be one; a server that does not answer is
    none of these."""
    sources: list[Source] = []
    if captures:
        from leakscope.serve.captures import CaptureSource

        sources += [CaptureSource(path, how.look_s, how.memory, how.limit_bytes) for path in captures]
    if pids or cgroup is not None:
        from leakscope.serve.processes import ProcessSource, cgroup_of

        if pids:
            sources.append(ProcessSource(pids, None, how.every_s, how.look_s, how.limit_bytes))
        if cgroup is not None:
            sources.append(ProcessSource([], cgroup_of(cgroup), how.every_s, how.look_s, how.limit_bytes))
    sources += _live(addresses, how)
    names = [source.name for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInputError(f"{twice}: named twice")
    if len(sources) > MAX_SOURCES:
        raise BadInputError(f"{len(sources)} sources; one server reads at most {MAX_SOURCES}")
    if not sources:
        raise BadInputError("nothing to serve: name captures or live sources, -p PID or --cgroup PATH")
    return sources


def _live(addresses: Sequence[Address], how: Settings) -> list[Source]:
    bound = None if how.trace is None else infinite_hit_ratio(how.trace)
    sources: list[Source] = []
    events = []
    engines = [address for address in addresses if address.kind == "engine_metrics"]
    for address in addresses:
        if address.kind == "redis":
            from leakscope.serve.caches import RedisSource

            sources.append(RedisSource(address, how.every_s, bound, how.look_s, how.limit_bytes))
        elif address.kind == "memcached":
            from leakscope.serve.caches import MemcachedSource

            sources.append(MemcachedSource(address, how.every_s, bound))
        elif address.kind == "kv_events":
            from leakscope.serve.kv_events import KvEvents

            events.append(KvEvents(address, how.every_s))
    sources += events
    of_engine = events[0] if len(events) == len(engines) == 1 else None  # else whose events these are is not known
    for address in engines:
        from leakscope.serve.engines import EngineSource

        sources.append(
            EngineSource(address, how.every_s, bound, how.request_latency, how.cache_latency, events=of_engine)
        )
    return sources


def infinite_hit_ratio(trace: Path) -> float:
    """Of a request trace: hits of all references in a cache that never evicts. Raises BadInputError."""
    from leakscope.cache.simulate import INFINITE, replay
    from leakscope.cache.traces import read_trace

    return 1.0 - replay(read_trace(trace), INFINITE, math.inf).miss_ratio

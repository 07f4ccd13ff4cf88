"""What Redis says of itself (INFO) as counters over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from nsight_parsers.arrow import build_table

BYTES = (
    *("used_memory", "used_memory_rss", "used_memory_dataset", "used_memory_overhead", "used_memory_startup"),
    *("allocator_allocated", "allocator_active", "allocator_resident", "maxmemory"),
    *("mem_clients_normal", "mem_replication_backlog", "mem_aof_buffer"),
)
"""Fields of INFO memory in bytes; the counter has ``redis_`` in front."""
COUNTS = {
    "expired_keys": "redis_expired_total",
    "evicted_keys": "redis_evicted_total",
    "total_commands_processed": "redis_commands_total",
    "connected_clients": "redis_connections_count",
}
ENOUGH_READINGS = 20
"""From so many on the readings are a source of their own, judged as counters are."""


def counters_of(info: Mapping[str, Any]) -> dict[str, float]:
    """Counter → value of one answer to INFO, over all databases; fields that the server lacks are left out."""
    found = {f"redis_{name}": float(info[name]) for name in BYTES if _is_number(info.get(name))}
    found |= {counter: float(info[name]) for name, counter in COUNTS.items() if _is_number(info.get(name))}
    keys, expires = keyspace(info)
    total, expiring = sum(keys.values()), sum(expires.values())
    return found | {"redis_keys": float(total), "redis_keys_nottl": float(total - expiring)}


def keyspace(info: Mapping[str, Any]) -> tuple[dict[int, int], dict[int, int]]:
    """(keys, keys with a TTL) by number of the database."""
    keys, expires = {}, {}
    for name, value in info.items():
        if name.startswith("db") and name[2:].isdecimal() and isinstance(value, Mapping):
            keys[int(name[2:])] = int(value.get("keys", 0))
            expires[int(name[2:])] = int(value.get("expires", 0))
    return keys, expires


def samples_of(readings: list[tuple[int, dict[str, float]]], server: str) -> pa.Table:
    """``samples`` of readings, (time in ns, counters) each."""
    rows = [(ts_ns, name, value) for ts_ns, counters in readings for name, value in counters.items()]
    ts_ns, names, values = (list(column) for column in zip(*rows, strict=True))
    return build_table("samples", len(rows), ts_ns=ts_ns, scope="service", scope_id=server, counter=names, value=values)


def byte_counters(readings: list[tuple[int, dict[str, float]]]) -> list[str]:
    """The names among ``readings`` that count bytes."""
    names = {name for _, counters in readings for name in counters}
    return sorted(names & ({f"redis_{name}" for name in BYTES} | {"rss", "redis_biggest_key"}))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""What an audit of a key-value store (Redis, memcached) says: keys without a TTL, idle ones, large ones, dead ones.

One audit is a moment. It can say what is kept and how long nobody asked for it, but not that it grows: that is for
counters over time. Where only a part of the keys was read, every figure is an estimate with its 95 % interval; keys
come in the order of the hash table, which makes the part a random sample (stratified by database).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from leakscope.model.manifest import Source
from leakscope.model.results import Culprit, Verdict
from leakscope.model.stores import Figure, KeyGroup, StoreAudit
from leakscope.model.words import NEVER

if TYPE_CHECKING:
    import duckdb

STORES = {"redis": "Redis", "memcached": "memcached"}
STALE_S = 7 * 86_400
"""Keys without a TTL that nobody asked for in seven days are what a cleaning would look at first."""
Z95 = 1.96
BIG_SHARE = 0.1
BIG_BYTES = 1 << 20
SPARE = ("fragmentation: free pieces of pages in use", "pages that the allocator keeps")
SPARE_SHARE = 0.3
SPARE_BYTES = 64 << 20
CONTAINERS = ("list", "set", "zset", "hash", "stream")


def audit_of(con: duckdb.DuckDBPyConnection, source: Source) -> StoreAudit | None:
    """The audit that ``source`` is, None where no key was read."""
    rows = con.execute(
        """
        WITH keys AS (
            SELECT owner, size_bytes::DOUBLE AS size, expires_ns = $never AS forever,
                   CASE WHEN last_access_ns > 0 THEN (ts_ns - last_access_ns) / 1e9 ELSE 0 END AS idle_s
            FROM cache_events WHERE source_id = $source AND op = 'state'
        ), marked AS (SELECT *, forever AND idle_s >= $stale AS stale FROM keys)
        SELECT owner, count(*) AS n, sum(size) AS b, sum(size * size) AS b2, max(idle_s) AS idle_s,
               count(*) FILTER (forever) AS nt, coalesce(sum(size) FILTER (forever), 0) AS ntb,
               coalesce(sum(size * size) FILTER (forever), 0) AS ntb2,
               count(*) FILTER (stale) AS st, coalesce(sum(size) FILTER (stale), 0) AS stb,
               coalesce(sum(size * size) FILTER (stale), 0) AS stb2
        FROM marked GROUP BY owner ORDER BY ntb DESC, b DESC, owner
        """,
        {"never": NEVER, "source": source.id, "stale": STALE_S},
    ).df()
    if not len(rows):
        return None
    scanned = int(rows["n"].sum())
    total = max(scanned, 0 if source.facts.get("complete") else int(source.facts.get("keys", 0)))
    whole = rows.drop(columns=["owner", "idle_s"]).sum()
    whole["idle_s"] = rows["idle_s"].max()
    groups = tuple(_group(str(row["owner"]), row, scanned, total) for _, row in rows.iterrows())
    largest = con.execute(
        "SELECT object, size_bytes FROM cache_events WHERE source_id = ? AND op = 'state' "
        "ORDER BY size_bytes DESC, object LIMIT 20",
        [source.id],
    ).fetchall()
    kinds = [str(kind) for kind in source.facts.get("largest_types", [])]
    kinds += [""] * (len(largest) - len(kinds))
    named = tuple((str(name), int(size), kind) for (name, size), kind in zip(largest, kinds, strict=False))
    memory = memory_split(_last_readings(con, source.id))
    return StoreAudit(
        source=source.name,
        kind=source.kind,
        all_keys=_group("", whole, scanned, total),
        groups=groups,
        scanned=scanned,
        total=total,
        largest=named,
        memory=tuple(memory),
        resident_bytes=sum(size for _, size in memory),
        zombies=source.facts.get("zombies"),
        cost=dict(source.facts.get("cost", {})),
    )


def _group(pattern: str, row: pd.Series, scanned: int, total: int) -> KeyGroup:
    def count(name: str) -> Figure:
        return _estimate(float(row[name]), float(row[name]), scanned, total)

    def size(name: str) -> Figure:
        return _estimate(float(row[name]), float(row[f"{name}2"]), scanned, total)

    return KeyGroup(
        pattern, count("n"), size("b"), count("nt"), size("ntb"), count("st"), size("stb"), float(row["idle_s"])
    )


def _estimate(summed: float, squares: float, scanned: int, total: int) -> Figure:
    """The total of a figure over ``total`` keys from its sum and sum of squares over a random ``scanned`` of them.

    Simple random sampling without replacement (Cochran, Sampling Techniques, 3rd ed., 2.5–2.9).
    """
    if scanned >= total or scanned < 2:
        return Figure(summed)
    mean = summed / scanned
    variance = max(0.0, (squares - scanned * mean * mean) / (scanned - 1))
    return Figure(total * mean, Z95 * total * float(np.sqrt(variance / scanned * (1 - scanned / total))))


def judge_store(audit: StoreAudit | None, source: Source) -> list[Verdict]:
    """What the audit that ``source`` is says (None: no key was read), the leading verdict first."""
    if audit is None:
        return [Verdict("not_leak", "cache_warmup", "host", 0.9, reasons=("the store has no keys",))]
    found = [_without_ttl(audit, source), *_largest(audit), *_dead(source), *_spare(audit)]
    return sorted(found, key=lambda v: v.verdict != "inconclusive")


def memory_split(counters: dict[str, float]) -> list[tuple[str, int]]:
    """What the resident memory of Redis is made of, from INFO memory; the parts add up to it exactly.

    From ``used_memory`` over ``allocator_allocated``, ``allocator_active`` and ``allocator_resident`` to
    ``used_memory_rss`` each step is a part (redis.io, INFO, section memory). The last is negative for swapped memory.
    """
    names = ("used_memory_dataset", "used_memory", "allocator_allocated", "allocator_active", "allocator_resident")
    steps = [counters.get(f"redis_{name}") for name in (*names, "used_memory_rss")]
    known = [int(step) for step in steps if step is not None]
    if len(known) < len(steps):
        return []
    parts = (
        "keys and values",
        "the server's own: clients, buffers, tables",
        "the allocator's rounding",
        *SPARE,
        "outside the allocator (code, stacks; negative: swapped)",
    )
    sizes = np.diff([0, *known])
    return list(zip(parts, map(int, sizes), strict=True))


def _last_readings(con: duckdb.DuckDBPyConnection, source_id: int) -> dict[str, float]:
    rows = con.execute(
        "SELECT counter::VARCHAR, last(value ORDER BY ts_ns) FROM samples WHERE source_id = ? GROUP BY counter",
        [source_id],
    ).fetchall()
    return {str(name): float(value) for name, value in rows}


def _without_ttl(audit: StoreAudit, source: Source) -> Verdict:
    facts, every = source.facts, audit.all_keys
    exact = facts.get("keys_without_ttl")
    without = Figure(float(exact)) if exact is not None else every.without_ttl
    reasons: list[str] = [] if audit.complete else [_coverage(audit)]
    if not without.value:
        return Verdict(
            "not_leak", "cache_warmup", "host", 0.85, reasons=(f"all {audit.total:,} keys have a TTL", *reasons)
        )
    top = audit.groups[0]
    said = f"{without} of {audit.total:,} keys have no TTL ({every.without_ttl_bytes} bytes)"
    reasons.insert(0, said)
    if top.without_ttl.value:
        reasons.append(f"most of it under {top.pattern}: {top.without_ttl} keys, {top.without_ttl_bytes} bytes")
    if every.stale.value:
        reasons.append(
            f"{every.stale} of them ({every.stale_bytes} bytes) were not asked for in {STALE_S // 86_400} days or more"
        )
    policy, limit = str(facts.get("policy", "")), int(facts.get("maxmemory", 0) or 0)
    if source.kind == "memcached" or (limit and policy.startswith("allkeys")):
        reasons.append(f"the store evicts them when it is full ({policy or 'LRU'}, limit {limit:,} bytes)")
        return Verdict("not_leak", "cache_warmup", "host", 0.7, reasons=tuple(reasons))
    reasons.append(
        f"nothing ever evicts them ({policy or 'policy unknown'}, {f'limit {limit:,} bytes' if limit else 'no limit'})"
    )
    return Verdict(
        "inconclusive",
        "keys_without_ttl",
        "host",
        0.5,
        Culprit(object=f"keys {top.pattern} without TTL", counter="redis_keys_nottl", owner=top.pattern),
        kept_bytes=round(top.without_ttl_bytes.value),
        kept_objects=round(top.without_ttl.value),
        reasons=tuple(reasons),
        missing=("their number over time: one audit cannot tell a data set from a leak (--duration SECONDS)",),
    )


def _coverage(audit: StoreAudit) -> str:
    share = audit.scanned / audit.total
    return f"{audit.scanned:,} of {audit.total:,} keys were read ({share:.1%}, a random sample): figures are estimates"


def _largest(audit: StoreAudit) -> list[Verdict]:
    name, size, kind = audit.largest[0] if audit.largest else ("", 0, "")
    share = size / audit.all_keys.bytes.value if audit.all_keys.bytes.value else 0.0
    if size < BIG_BYTES or share < BIG_SHARE:
        return []
    return [
        Verdict(
            "inconclusive",
            "undrained_container" if kind in CONTAINERS else "retained_growth",
            "host",
            0.4,
            Culprit(object=f"{kind or 'key'} {name}", owner=name),
            kept_bytes=size,
            kept_objects=1,
            reasons=(f"one key, {name}{f' ({kind})' if kind else ''}, takes {size:,} bytes, {share:.0%} of all keys",),
            missing=("its size over time",),
        )
    ]


def _dead(source: Source) -> list[Verdict]:
    """Keys past their TTL that were still there."""
    dead, keys = source.facts.get("zombies"), int(source.facts.get("keys", 0))
    stale = float(source.facts.get("expired_stale_percent", 0.0))
    if not dead and stale < 1.0:
        return []
    reasons = [f"up to {dead:,} of {keys:,} keys were past their TTL and still there"] if dead else []
    if stale >= 1.0:
        reasons.append(f"of the keys with a TTL the server itself takes {stale:.1f} % to be expired and not deleted")
    return [Verdict("not_leak", "pending_free", "host", 0.7, kept_objects=dead or 0, reasons=tuple(reasons))]


def _spare(audit: StoreAudit) -> list[Verdict]:
    spare = sum(size for what, size in audit.memory if what in SPARE)
    if spare < SPARE_BYTES or spare < SPARE_SHARE * audit.resident_bytes:
        return []
    text = f"{spare:,} of {audit.resident_bytes:,} resident bytes are free inside the allocator"
    return [Verdict("not_leak", "fragmentation", "host", 0.8, kept_bytes=spare, reasons=(text,))]

"""The verdict on an engine's KV cache: what its events and its metrics say together.

The events name blocks that outlived a whole turnover of the pool (:mod:`leakscope.detect.kv_cache`), the metrics say
how many blocks are held while no request runs. Each can stand alone; where both speak, the metrics decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from leakscope.detect.kv_cache import Pool, pools_of
from leakscope.model.manifest import Source
from leakscope.model.results import Culprit, Verdict

if TYPE_CHECKING:
    import duckdb

EVENTS, METRICS = "kv_events", "engine_metrics"
CLASS = "pinned_never_unpinned"
CONFIRMED_S = 0.5
"""Idle readings at least so far apart that agree."""
NAMED = 100
"""Names of held blocks that a verdict carries at most."""


@dataclass(frozen=True)
class Idle:
    """What the metrics of one engine say. Blocks are usable ones; of SGLang, which counts tokens, its pages.

    ``held``: blocks held at the last reading without a request, None where there was none. ``confirmed``: two readings
    say the same.
    """

    engine: str
    pool_blocks: int | None
    held: float | None
    ratio: float
    confirmed: bool
    readings: int
    end_ns: int
    notes: tuple[str, ...] = field(default_factory=tuple)


def judge_kv(con: duckdb.DuckDBPyConnection, sources: Sequence[Source]) -> list[Verdict]:
    """Verdicts on the KV caches in one capture: one a pool, or one an engine where there are metrics alone."""
    idles = [idle for source in sources if source.kind == METRICS for idle in idles_of(con, source.id)]
    streams = [source for source in sources if source.kind == EVENTS]
    only = idles[0] if len(idles) == 1 else None
    verdicts = []
    for source in streams:
        pool_blocks = source.facts.get("pool_blocks") or (only.pool_blocks if only else None)
        pools = pools_of(con, source, pool_blocks)
        idle = only if len(streams) == 1 and len(pools) <= 1 else None
        verdicts += [judge_pool(pool, idle, source) for pool in pools]
        if not pools:
            missing = "no KV event came"
            verdicts.append(Verdict("inconclusive", "missing_data", "gpu", 0.5, missing=(missing,)))
    if not streams or any(len(streams) > 1 or v.kind == "missing_data" for v in verdicts) or len(idles) > 1:
        verdicts += [verdict for idle in idles if (verdict := judge_idle(idle)) is not None]
    return verdicts


def judge_pool(pool: Pool, idle: Idle | None, source: Source) -> Verdict:
    """One pool, with what the metrics of its engine say, if there are any."""
    told = pool.turnover >= 1
    facts: list[str] = [_turnover(pool)]
    if pool.gaps:
        facts.append(
            f"{pool.gaps:,} gaps in the sequence: blocks that were cached before the last one are unknown since"
        )
    idle_held = idle.held if idle else None
    missing = ["the size of the pool, estimated from its content (--pool-blocks, ?pool= or the metrics address say it)"]
    missing = missing if pool.estimated else []
    if idle_held is None and told and pool.held:
        missing.append("whether requests run: the metrics address (http://…/metrics) of the engine, idle for a moment")
    if pool.held and told and not (idle_held is not None and idle_held <= 0):
        age_s = (pool.end_ns - pool.held_since_ns) / 1e9
        reasons = [
            f"{len(pool.held):,} blocks are held by {pool.holders:,} requests or more: they outlived "
            f"{pool.turnover:.1f} turnovers of the pool, the oldest is {age_s:,.0f} s old",
            *facts,
        ]
        if idle and idle_held:
            reasons.append(_while_idle(idle))
            if idle_held > len(pool.held) + 0.5:
                reasons.append(
                    f"{idle_held - len(pool.held):,.0f} of these are not told by the events: used again lately"
                )
        else:
            reasons.append(
                "a request that has run for so long, or a prompt that is repeated whole and answered in less than a "
                "block, looks the same"
            )
        confidence = 0.98 if idle and idle_held and idle.confirmed else 0.9 if idle_held else 0.6
        confidence -= 0.1 if pool.estimated else 0.0
        return Verdict(
            "leak",
            CLASS,
            "gpu",
            confidence,
            Culprit(object=f"KV blocks in {pool.medium} that no request gives up", objects=pool.held[:NAMED]),
            leak_start_s=max(0.0, (pool.held_since_ns - source.start_ns) / 1e9),
            kept_objects=len(pool.held),
            reasons=tuple(reasons),
            missing=tuple(missing),
        )
    if idle is not None and idle_held is not None:
        found = judge_idle(idle)
        assert found is not None
        if pool.held and told:
            facts.append(f"{len(pool.held):,} blocks outlived a turnover, but none is held while no request runs")
        return _with_reasons(found, facts, () if told else (f"not enough turnover: {pool.turnover:.2f} of 1.0",))
    if not told:
        return Verdict(
            "inconclusive",
            "window_too_short",
            "gpu",
            0.5,
            reasons=(f"not enough turnover: {pool.turnover:.2f} of 1.0", *facts),
            missing=(*missing, "evictions: record on until the pool has turned over once, or add the metrics address"),
        )
    why = (f"no block outlived its use: {pool.cached:,} are cached", *facts)
    return Verdict("not_leak", "cache_warmup", "gpu", 0.8, reasons=why, missing=tuple(missing))


def judge_idle(idle: Idle) -> Verdict | None:
    """What the metrics say alone; None where they say nothing of a KV cache."""
    if idle.held is None:
        if not idle.readings:
            return None
        return Verdict(
            "inconclusive",
            "missing_data",
            "gpu",
            0.5,
            reasons=(f"requests ran or waited at all {idle.readings:,} readings", *idle.notes),
            missing=("a moment without requests: what is held then is a leak",),
        )
    if idle.held <= 0:
        return Verdict(
            "not_leak", "cache_warmup", "gpu", 0.9, reasons=("no block is held while no request runs", *idle.notes)
        )
    return Verdict(
        "leak",
        CLASS,
        "gpu",
        0.95 if idle.confirmed else 0.8,
        Culprit(object="KV blocks that are held while no request runs", counter="kv_cache_usage_ratio"),
        kept_objects=round(idle.held),
        reasons=(_while_idle(idle), *idle.notes),
    )


def idles_of(con: duckdb.DuckDBPyConnection, source_id: int) -> list[Idle]:
    """What the samples of one metrics source say, an engine each."""
    rows = con.execute(
        "SELECT scope_id::VARCHAR AS engine, counter::VARCHAR AS counter, ts_ns, value FROM samples "
        "WHERE source_id = ? ORDER BY ts_ns",
        [source_id],
    ).df()
    found = []
    for engine, of_engine in rows.groupby("engine", sort=True):
        table = of_engine.pivot_table(index="ts_ns", columns="counter", values="value", aggfunc="last")
        found.append(_idle(str(engine), {str(name): table[name].to_numpy() for name in table}, table.index.to_numpy()))
    return found


def _idle(engine: str, counters: dict[str, np.ndarray], ts_ns: np.ndarray) -> Idle:
    unknown = np.full(len(ts_ns), np.nan)
    pool, ratio = _pool_and_ratio(counters, unknown)
    idle = (counters.get("num_requests_running", unknown) == 0) & (counters.get("num_requests_waiting", unknown) == 0)
    idle &= np.isfinite(ratio)
    notes = []
    unpins = counters.get("lmcache_forced_unpins_total")
    if unpins is not None and np.nanmax(unpins) > np.nanmin(unpins):
        notes.append(f"LMCache forced {np.nanmax(unpins) - np.nanmin(unpins):,.0f} pins off that timed out")
    readings = int(np.isfinite(ratio).sum())
    end_ns = int(ts_ns[-1]) if len(ts_ns) else 0
    if not idle.any():
        return Idle(engine, pool, None, 0.0, False, readings, end_ns, tuple(notes))
    at = np.flatnonzero(idle)
    last = float(ratio[at[-1]])
    same = at[ratio[at] == last]
    confirmed = bool(ts_ns[same[-1]] - ts_ns[same[0]] >= CONFIRMED_S * 1e9) and bool(idle[same[0] : same[-1] + 1].all())
    held = last * pool if pool else (1.0 if last > 0 else 0.0)
    held = float(np.round(held)) if last <= 0 or round(held) else held
    return Idle(engine, pool, held, last, confirmed, readings, end_ns, tuple(notes))


def _pool_and_ratio(counters: dict[str, np.ndarray], unknown: np.ndarray) -> tuple[int | None, np.ndarray]:
    """Usable blocks of the pool, and the share of them that is held, at each reading.

    vLLM keeps one block of ``num_gpu_blocks`` for itself (its null block) and leaves it out of the usage. SGLang counts
    tokens: what is neither available nor evictable is held.
    """
    total = counters.get("num_kv_tokens")
    if total is not None:
        page = counters.get("num_kv_page_tokens", np.ones(1))
        free = counters.get("num_kv_tokens_available", unknown) + counters.get("num_kv_tokens_evictable", unknown)
        with np.errstate(divide="ignore", invalid="ignore"):
            return max(1, int(np.nanmax(total) // max(1.0, np.nanmax(page)))), (total - free) / total
    blocks = counters.get("num_kv_blocks")
    pool = int(np.nanmax(blocks)) - 1 if blocks is not None and np.nanmax(blocks) > 1 else None
    return pool, counters.get("kv_cache_usage_ratio", unknown)


def _turnover(pool: Pool) -> str:
    size = f"about {pool.size:,}" if pool.estimated else f"{pool.size:,}"
    return f"{pool.evictions:,} evictions from a pool of {size} blocks, {pool.turnover:.2f} turnovers"


def _while_idle(idle: Idle) -> str:
    blocks = (
        f"{idle.held:,.0f} of {idle.pool_blocks:,} blocks are" if idle.pool_blocks else f"{idle.ratio:.2%} of it is"
    )
    return f"with no request running or waiting {blocks} held"


def _with_reasons(verdict: Verdict, more: Sequence[str], missing: Sequence[str]) -> Verdict:
    from dataclasses import replace

    return replace(verdict, reasons=(*verdict.reasons, *more), missing=(*verdict.missing, *missing))

"""What was kept in each NVTX range, over all sites at once: for reports by range.

Ranges are folded as in :mod:`leakscope.correlate.marks`. The rows of a range are summed over sites in the database, so
this stays small however many sites there are. Objects without a stack of their own have a range like all others; only
whether their frees can be seen is known by site, and where the sites of their call site differ in that, each range
gets the same share of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate import weights
from leakscope.correlate.aggregate import ALLOC, EXIT
from leakscope.correlate.changes import objects_unit
from leakscope.correlate.lives import BINS, FOLDED_PID
from leakscope.correlate.marks import make_paths, path_names
from leakscope.correlate.sites import POOL_KEY, SITE_KEY
from leakscope.model.words import KINDS_NOT_ADDED

if TYPE_CHECKING:
    import duckdb

FIGURES = ["live_bytes", "live_objects", "alloc_bytes", "alloc_objects"]


@dataclass
class RangeParts:
    """``table``: one row a (life, layer, added, visible, range), its columns these, range (index into ``paths``),
    :data:`FIGURES` (int64), variance (of live_bytes, where allocations were sampled by bytes) and shared (split by
    share). ``kept_bytes``: float64[len(table), BINS], at the end of each bin of the life. ``paths``: names of ranges,
    outermost first; the first is (), outside of all.
    """

    table: pd.DataFrame
    kept_bytes: npt.NDArray[np.float64]
    paths: list[tuple[str, ...]]


def range_parts(
    con: duckdb.DuckDBPyConnection, table: pd.DataFrame, sites: pd.DataFrame, lives: pd.DataFrame
) -> RangeParts:
    """Split all memory by range. ``table``: of holdings; ``sites``: of merge_sites, with visible.

    Needs the view ``events`` that :func:`leakscope.correlate.aggregate.aggregate` leaves behind.
    """
    make_paths(con)
    pools = _pools(table, sites)
    rows = _rows(con, sites.loc[~sites["visible"], SITE_KEY], pools, lives)
    cells = rows.groupby(["life", "layer", "added", "visible", "pool", "path"], sort=True)
    sums = cells[[*FIGURES, "variance"]].sum().reset_index()
    cell = cells.ngroup().to_numpy()
    steps = np.zeros((len(sums), BINS))
    np.add.at(steps, (cell, rows["bin"].to_numpy()), rows["live_bytes"].to_numpy(np.float64))
    unit = objects_unit(con)
    for column in ("live_objects", "alloc_objects"):
        sums[column] = np.rint(sums[column] / unit).astype(np.int64)
    sums[FIGURES] = sums[FIGURES].clip(lower=0)
    parts, kept = _split(sums, np.cumsum(steps, axis=1), pools)
    names = path_names(con, {int(path) for path in parts["path"] if path})
    paths = [(), *sorted(set(names.values()) - {()})]
    index = {path: at for at, path in enumerate(paths)}
    parts["range"] = [index[names[int(path)]] if path else 0 for path in parts["path"]]
    return RangeParts(parts.drop(columns=["path", "pool"]), kept, paths)


def _pools(table: pd.DataFrame, sites: pd.DataFrame) -> pd.DataFrame:
    """Objects without a stack, by life and call site, where some of them are of sites whose frees cannot be seen:
    :data:`POOL_KEY`, pool (a number), share (of their kept bytes whose frees can be seen)."""
    visible = table["site"].map(dict(zip(sites["site"], sites["visible"], strict=True))).fillna(True).astype(bool)
    alone = table["given_bytes"].isna()  # a pool that is a site of its own
    given = np.where(alone, table["live_bytes"], table["given_bytes"].fillna(0))
    rows = table.assign(given=given, seen=np.where(visible, given, 0), hidden=~visible, seen_rows=visible)
    rows = rows[rows["sampled"].astype(bool)]
    sums = rows.groupby(POOL_KEY, sort=True)[["given", "seen"]].sum().join(
        rows.groupby(POOL_KEY, sort=True)[["hidden", "seen_rows"]].any()
    )  # fmt: skip
    sums = sums[sums["hidden"]].reset_index()
    # Without kept bytes the shares do not matter to what is kept.
    share = np.where(sums["given"] > 0, sums["seen"] / np.maximum(sums["given"], 1), sums["seen_rows"].astype(float))
    return sums[POOL_KEY].assign(pool=np.arange(len(sums)), share=share, seen=sums["seen"].astype(np.int64))


def _rows(
    con: duckdb.DuckDBPyConnection, hidden: pd.DataFrame, pools: pd.DataFrame, lives: pd.DataFrame
) -> pd.DataFrame:
    """life, layer, added, visible, pool (-1: none that is split), path (0: none), bin and what changed there."""
    con.register("hidden_sites", hidden)
    con.register("split_pools", pools[[*POOL_KEY, "pool"]])
    con.register("folded_lives", lives.loc[lives["pid"] == FOLDED_PID, ["life"]])
    cache = "regexp_replace(slab_cache, '^kmalloc-rnd-[0-9]+-', 'kmalloc-')"
    not_added = ", ".join(f"'{kind}'" for kind in sorted(KINDS_NOT_ADDED))
    sign = f"CASE WHEN e.event = {ALLOC} THEN 1 ELSE -1 END"
    try:
        return con.execute(
            f"""
            WITH counted AS (
                SELECT * REPLACE ({cache} AS slab_cache) FROM events e
                WHERE e.event < {EXIT} OR (e.event = {EXIT} AND e.life IN (SELECT life FROM folded_lives))
            )
            SELECT e.life, e.layer::VARCHAR AS layer, e.kind NOT IN ({not_added}) AS added, h.layer IS NULL AS visible,
                   coalesce(s.pool, -1)::BIGINT AS pool, coalesce(p.path, 0)::UBIGINT AS path, e.bin,
                   sum({sign} * e.bytes)::BIGINT AS live_bytes, sum({sign} * e.objects)::BIGINT AS live_objects,
                   coalesce(sum(e.bytes) FILTER (e.event = {ALLOC}), 0)::BIGINT AS alloc_bytes,
                   coalesce(sum(e.objects) FILTER (e.event = {ALLOC}), 0)::BIGINT AS alloc_objects,
                   sum({sign} * e.variance)::DOUBLE AS variance
            FROM counted e
                 LEFT JOIN mark_paths p ON e.mark_id > 0 AND p.source_id = e.source_id AND p.id = e.mark_id
                 LEFT JOIN hidden_sites h ON e.weight > 0 AND {_same("h", SITE_KEY)}
                 LEFT JOIN split_pools s ON e.weight = 0 AND {_same("s", POOL_KEY)}
            GROUP BY ALL
            """
        ).df()
    finally:
        for name in ("hidden_sites", "split_pools", "folded_lives"):
            con.unregister(name)


def _same(other: str, columns: list[str]) -> str:
    return " AND ".join(f"{other}.{column} = e.{column}" for column in columns)


def _split(
    sums: pd.DataFrame, kept: npt.NDArray[np.float64], pools: pd.DataFrame
) -> tuple[pd.DataFrame, npt.NDArray[np.float64]]:
    """Rows of split pools twice: the part whose frees are seen and the rest. Kept bytes are exact in sum."""
    sums = sums.assign(shared=False)
    mixed = (sums["pool"] >= 0).to_numpy()
    if not mixed.any():
        return sums, kept
    rows, curves = sums[mixed], kept[mixed]
    pool = rows["pool"].to_numpy(np.int64)
    seen_share = pools["share"].to_numpy(np.float64)[pool]
    seen = rows.assign(visible=True, shared=(seen_share > 0) & (seen_share < 1))
    live = rows["live_bytes"].to_numpy(np.int64)
    total = np.bincount(pool, weights=live, minlength=len(pools)).astype(np.int64)
    seen["live_bytes"] = weights.largest_remainder(
        np.minimum(pools["seen"].to_numpy(np.int64), total),
        pool,
        weights.shares_within(pool, live.astype(np.float64), len(pools)),
    )
    for column in ("live_objects", "alloc_bytes", "alloc_objects"):
        seen[column] = np.rint(rows[column] * seen_share).astype(np.int64)
    rest = seen.assign(visible=False, **{column: rows[column] - seen[column] for column in FIGURES})
    seen["variance"], rest["variance"] = rows["variance"] * seen_share, rows["variance"] * (1 - seen_share)
    table = pd.concat([sums[~mixed], seen, rest], ignore_index=True)
    curves = np.concatenate([kept[~mixed], curves * seen_share[:, None], curves * (1 - seen_share)[:, None]])
    some = (table[FIGURES] != 0).any(axis=1).to_numpy()
    return table[some].reset_index(drop=True), curves[some]

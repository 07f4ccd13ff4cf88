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
    parts = parts.drop(columns=["path", "pool"])
    rest = _not_told(parts, table, sites)
    kept = np.concatenate([kept, np.zeros((len(rest), BINS))])
    return RangeParts(pd.concat([parts, rest], ignore_index=True), kept, paths)


def _not_told(parts: pd.DataFrame, table: pd.DataFrame, sites: pd.DataFrame) -> pd.DataFrame:
    """What is kept by all sites less what is kept in all ranges. They differ where allocations were lost whose frees
    were not: a site keeps no less than nothing, and neither does a range."""
    visible = table["site"].map(dict(zip(sites["site"], sites["visible"], strict=True)))
    whole = table.assign(visible=visible, added=~table["kind"].isin(KINDS_NOT_ADDED))[visible.notna()]
    key = ["life", "layer", "added", "visible"]
    whole = whole.astype({"visible": bool}).groupby(key)[FIGURES].sum()
    rest = whole.sub(parts.groupby(key)[FIGURES].sum(), fill_value=0).astype(np.int64)
    rest = rest[(rest != 0).any(axis=1)].reset_index()
    return rest.assign(variance=0.0, shared=False, range=0)


def _pools(table: pd.DataFrame, sites: pd.DataFrame) -> pd.DataFrame:
    """Objects without a stack, by life and call site, where some of them are of sites whose frees cannot be seen.

    Columns: :data:`POOL_KEY`, pool (a number), share (of their kept bytes whose frees can be seen), seen_bytes and
    seen_objects (that many).
    """
    visible = table["site"].map(dict(zip(sites["site"], sites["visible"], strict=True))).fillna(True).astype(bool)
    rows = table.assign(hidden=~visible, visible=visible)
    for unit in ("bytes", "objects"):  # a pool that was given to no stack is a site of its own
        given = table[f"given_{unit}"].where(table[f"given_{unit}"].notna(), table[f"live_{unit}"])
        rows[f"given_{unit}"], rows[f"seen_{unit}"] = given, given.where(visible, 0)
    how = dict.fromkeys(["given_bytes", "seen_bytes", "seen_objects"], "sum") | {"hidden": "any", "visible": "any"}
    sums = rows[rows["sampled"].astype(bool)].groupby(POOL_KEY, sort=True).agg(how).reset_index()
    sums = sums[sums["hidden"]].reset_index(drop=True)
    # Where nothing is kept the share is of what was allocated alone.
    share = np.where(
        sums["given_bytes"] > 0, sums["seen_bytes"] / np.maximum(sums["given_bytes"], 1), sums["visible"].astype(float)
    )
    seen = {column: sums[column].astype(np.int64) for column in ("seen_bytes", "seen_objects")}
    return sums[POOL_KEY].assign(pool=np.arange(len(sums)), share=share, **seen)


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
    for unit in ("bytes", "objects"):
        live = rows[f"live_{unit}"].to_numpy(np.int64)
        total = np.bincount(pool, weights=live, minlength=len(pools)).astype(np.int64)
        part = np.minimum(pools[f"seen_{unit}"].to_numpy(np.int64), total)
        shares = weights.shares_within(pool, live.astype(np.float64), len(pools))
        seen[f"live_{unit}"] = weights.largest_remainder(part, pool, shares)
        seen[f"alloc_{unit}"] = np.rint(rows[f"alloc_{unit}"] * seen_share).astype(np.int64)
    rest = seen.assign(visible=False, **{column: rows[column] - seen[column] for column in FIGURES})
    seen["variance"], rest["variance"] = rows["variance"] * seen_share, rows["variance"] * (1 - seen_share)
    table = pd.concat([sums[~mixed], seen, rest], ignore_index=True)
    curves = np.concatenate([kept[~mixed], curves * seen_share[:, None], curves * (1 - seen_share)[:, None]])
    some = (table[FIGURES] != 0).any(axis=1).to_numpy()
    return table[some].reset_index(drop=True), curves[some]

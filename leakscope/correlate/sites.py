"""Sites: who allocates, how much of it is kept, by process life and over time.

A *holding* is one (process life, site): the unit that is judged. Sites merge their holdings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate import weights
from leakscope.correlate.aggregate import curves

if TYPE_CHECKING:
    import duckdb

SITE_KEY = ["layer", "kind", "api", "slab_cache", "kernel_stack", "user_stack", "python_stack"]
POOL_KEY = ["life", "layer", "kind", "api", "slab_cache", "call_site"]
EVENTS = ("alloc", "call", "reuse", "context", "exit")
COUNTS = [f"{event}_{unit}" for event in EVENTS for unit in ("objects", "bytes")]
FINAL = ["live_bytes", "live_objects", "outlives_bytes", "ended_bytes"]
MAX_CURVES = 20_000
"""Holdings whose curves are built, those with most kept bytes first (38 MB at 120 bins)."""


@dataclass
class Holdings:
    """Every (life, site), and the curves of those that keep something.

    ``table``: one row a holding: holding, site, life, layer, kind, api, slab_cache (folded), call_site,
    stacks, :data:`COUNTS`, live_bytes, live_objects, outlives_bytes (live although its process exited),
    ended_bytes (given back only by the end of a short-lived process), first_ns, last_ns, smallest_bytes,
    largest_bytes, own_objects (with a stack of their own), sampled, standard_error_bytes; all int64 but the
    last two. ``curve_rows``: the holdings that have curves; ``kept_bytes``, ``kept_objects``: float64[len,
    BINS], at the end of each bin of the holding's life.
    """

    table: pd.DataFrame
    curve_rows: npt.NDArray[np.int64]
    kept_bytes: npt.NDArray[np.float64]
    kept_objects: npt.NDArray[np.float64]


def folded_cache(name: str) -> str:
    """The cache without its randomised part: ``kmalloc-rnd-07-64`` → ``kmalloc-64``
    (CONFIG_RANDOM_KMALLOC_CACHES, Linux 6.6: 16 copies of each kmalloc cache, chosen by call site)."""
    return re.sub(r"^kmalloc-rnd-\d+-", "kmalloc-", name)


def holdings(con: duckdb.DuckDBPyConnection, series: pd.DataFrame, lives: pd.DataFrame) -> Holdings:
    """Merge ``series`` (of :func:`leakscope.correlate.aggregate.aggregate`) into holdings and build their
    curves."""
    series = _with_final(series, lives)
    names = {name: folded_cache(name) for name in series["slab_cache"].unique()}
    series["slab_cache"] = series["slab_cache"].map(names)
    pooled = (series["weight"] == 0).to_numpy()
    own, pools_of = _own_rows(series[~pooled]), _pools(series[pooled])
    own_rows, pool_rows = own.table, pools_of.table
    own_rows, leftover, link = _apportion(own_rows, pool_rows)
    table = pd.concat([own_rows, leftover], ignore_index=True)
    table["holding"] = np.arange(len(table))
    table["site"] = table.groupby(SITE_KEY, sort=True).ngroup()
    return _with_curves(
        con, table, series, own, pools_of, link, len(own_rows), leftover.index.to_numpy(), lives
    )


def _with_final(series: pd.DataFrame, lives: pd.DataFrame) -> pd.DataFrame:
    """Add what is kept when the evidence ends, by the rules on the exit of processes."""
    folded = series["life"].isin(lives.loc[lives["pid"] == -1, "life"]).to_numpy()
    exited = series["life"].isin(lives.loc[(lives["exit_ns"] > 0) & lives["judged"], "life"]).to_numpy()
    # Something of the life was seen to end with it: else the recording stopped before the exit's frees.
    torn_down = (series.groupby("life")["exit_objects"].transform("sum") > 0).to_numpy()
    series = series.assign(folded=folded)
    for unit in ("bytes", "objects"):
        given_back = sum(series[f"{e}_{unit}"].to_numpy() for e in ("call", "reuse", "context"))
        open_at_exit = series[f"alloc_{unit}"].to_numpy() - given_back
        after = open_at_exit - series[f"exit_{unit}"].to_numpy()
        series[f"live_{unit}"] = np.maximum(0, np.where(folded, after, open_at_exit))
        if unit == "bytes":
            series["outlives_bytes"] = np.maximum(0, np.where(folded | (exited & torn_down), after, 0))
            series["ended_bytes"] = np.where(folded, series["exit_bytes"], 0)
    return series


@dataclass
class _Merged:
    """Rows of ``table`` and, for each input series, (its id, its row)."""

    table: pd.DataFrame
    series_ids: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]


def _merge(rows: pd.DataFrame, key: list[str], extra: list[str]) -> _Merged:
    groups = rows.groupby(key, sort=True)
    row: npt.NDArray[np.int64] = np.asarray(groups.ngroup(), dtype=np.int64)
    spans = {"first_ns": "min", "last_ns": "max", "smallest_bytes": "min", "largest_bytes": "max"}
    firsts = {"call_site": "min", "kernel_stack": "min", "user_stack": "min", "python_stack": "min", "folded": "max"}
    how = dict.fromkeys([*COUNTS, *FINAL, *extra], "sum") | spans | firsts
    table = groups.agg({k: v for k, v in how.items() if k not in key}).reset_index()
    return _Merged(table, rows["id"].to_numpy(np.int64), row)


def _own_rows(rows: pd.DataFrame) -> _Merged:
    """Rows with a stack of their own, merged over weights; with the masses that speak for the others."""
    others = rows["weight"].to_numpy(np.float64) - 1.0
    rows = rows.assign(
        live_mass=others * rows["live_bytes"],
        live_object_mass=others * rows["live_objects"],
        alloc_mass=others * rows["alloc_bytes"],
        ended_mass=others * (rows["alloc_bytes"] - rows["live_bytes"]),
        survivors=np.where(others > 0, rows["live_objects"], 0).astype(np.float64),
        own_objects=rows["alloc_objects"],
    )
    extra = ["live_mass", "live_object_mass", "alloc_mass", "ended_mass", "survivors", "own_objects"]
    return _merge(rows, ["life", *SITE_KEY], extra)


def _pools(rows: pd.DataFrame) -> _Merged:
    """Rows without a stack of their own, one pool a call site of a life."""
    return _merge(rows, POOL_KEY, [])


@dataclass
class _Link:
    """Pool ``pool`` gives ``share`` of its kept bytes to own row ``member``."""

    member: npt.NDArray[np.int64]
    pool: npt.NDArray[np.int64]
    byte_share: npt.NDArray[np.float64]
    object_share: npt.NDArray[np.float64]


def _apportion(own: pd.DataFrame, pools: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, _Link]:
    """Give pools to the sampled stacks of their call site. Returns the own rows, the pools left over (their
    index is the pool's), and who got what."""
    own = own.assign(sampled=False, standard_error_bytes=0.0)
    pools_out = pools.assign(sampled=True, standard_error_bytes=0.0, own_objects=0)
    nothing = np.empty(0, np.int64)
    link = _Link(nothing, nothing, np.empty(0), np.empty(0))
    keys = pools[POOL_KEY].assign(pool=np.arange(len(pools)))
    members = own.assign(member=np.arange(len(own)))[own["alloc_mass"] > 0].merge(keys, on=POOL_KEY)
    if not len(members):
        return own, pools_out, link
    pool, member = members["pool"].to_numpy(np.int64), members["member"].to_numpy(np.int64)

    def share(column: str) -> npt.NDArray[np.float64]:
        return weights.shares_within(pool, members[column].to_numpy(np.float64), len(pools))

    byte_share, object_share = share("live_mass"), share("live_object_mass")
    ended_share, alloc_share = share("ended_mass"), share("alloc_mass")
    survivors = np.bincount(pool, weights=members["survivors"].to_numpy(np.float64), minlength=len(pools))
    ended = np.bincount(pool, weights=members["ended_mass"].to_numpy(np.float64), minlength=len(pools))
    keeps = pools["live_bytes"].to_numpy() > 0
    given = np.bincount(pool, minlength=len(pools)).astype(bool) & ~(keeps & (survivors == 0))
    chosen = given[pool]
    ended_share = np.where(ended[pool] > 0, ended_share, alloc_share)
    # What a folded life gives back at its end has ended; all other frees by an exit are of what was kept.
    is_kept = {"exit": ~pools["folded"].to_numpy(bool), "live": np.ones(len(pools), bool)}
    is_kept["outlives"] = is_kept["live"]
    for column in [*COUNTS, *FINAL]:
        name, unit = column.rsplit("_", 1)
        if name == "alloc":
            continue
        kept = is_kept.get(name, np.zeros(len(pools), bool)) & keeps
        by = np.where(kept[pool], byte_share if unit == "bytes" else object_share, ended_share)
        totals = np.where(given, pools[column].to_numpy(np.int64), 0)
        parts = np.zeros(len(pool), np.int64)
        parts[chosen] = weights.largest_remainder(totals, pool[chosen], by[chosen])
        values = own[column].to_numpy(np.int64, copy=True)
        np.add.at(values, member, parts)
        own[column] = values
    for unit in ("bytes", "objects"):
        # Allocated = kept + ended, also in the parts: nobody keeps more than he allocated.
        ends = sum(own[f"{event}_{unit}"] for event in ("call", "reuse", "context"))
        own[f"alloc_{unit}"] = own[f"live_{unit}"] + ends + own[f"exit_{unit}"].where(own["folded"], 0)
    error = weights.standard_error(pools["live_bytes"].to_numpy(np.int64), pool, byte_share, survivors)
    squares = np.bincount(member, weights=np.where(chosen, error, 0.0) ** 2, minlength=len(own))
    own["standard_error_bytes"] = np.sqrt(squares)
    touched = np.zeros(len(own), bool)
    touched[member[chosen]] = True
    own["sampled"] = touched
    live = chosen & keeps[pool]
    link = _Link(member[live], pool[live], byte_share[live], object_share[live])
    return own, pools_out[~given], link


def _with_curves(
    con: duckdb.DuckDBPyConnection,
    table: pd.DataFrame,
    series: pd.DataFrame,
    own: _Merged,
    pools: _Merged,
    link: _Link,
    own_count: int,
    leftover_pools: npt.NDArray[np.int64],
    lives: pd.DataFrame,
) -> Holdings:
    live = table["live_bytes"].to_numpy(np.int64)
    ranked = np.argsort(-live, kind="stable")[:MAX_CURVES]
    wanted = np.sort(ranked[live[ranked] > 0])
    slot = np.full(len(table), -1, np.int64)
    slot[wanted] = np.arange(len(wanted))
    # Each series feeds holdings: its own with factor 1, those that a pool is apportioned to with their
    # shares.
    holding_of_pool = np.full(len(pools.table), -1, np.int64)
    holding_of_pool[leftover_pools] = own_count + np.arange(len(leftover_pools))
    order = np.argsort(link.pool, kind="stable")
    first = np.searchsorted(link.pool[order], pools.rows)
    repeats = np.searchsorted(link.pool[order], pools.rows, side="right") - first
    shared = np.repeat(np.arange(len(pools.rows)), repeats)
    within = np.arange(len(shared)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    entry = order[np.repeat(first, repeats) + within]
    ids = np.concatenate([own.series_ids, pools.series_ids, pools.series_ids[shared]])
    to = np.concatenate([own.rows, holding_of_pool[pools.rows], link.member[entry]])
    ones = np.ones(len(own.rows) + len(pools.rows))
    by_bytes = np.concatenate([ones, link.byte_share[entry]])
    by_objects = np.concatenate([ones, link.object_share[entry]])
    used = (to >= 0) & (slot[to] >= 0)
    ids, to, by_bytes, by_objects = ids[used], slot[to[used]], by_bytes[used], by_objects[used]
    unique, position = np.unique(ids, return_inverse=True)
    life = series.set_index("id")["life"].reindex(unique)
    folded = life.isin(lives.loc[lives["pid"] == -1, "life"]).to_numpy()
    raw_bytes, raw_objects = curves(con, unique, folded)
    kept_bytes = np.zeros((len(wanted), raw_bytes.shape[1]))
    kept_objects = np.zeros_like(kept_bytes)
    np.add.at(kept_bytes, to, by_bytes[:, None] * raw_bytes[position])
    np.add.at(kept_objects, to, by_objects[:, None] * raw_objects[position])
    return Holdings(table, wanted, kept_bytes, kept_objects)


def merge_sites(table: pd.DataFrame) -> pd.DataFrame:
    """Sites of a holdings table: one row a site, ordered by kept bytes (then by site number).

    Columns: site, :data:`SITE_KEY`, call_site, :data:`COUNTS`, live_bytes, live_objects, outlives_bytes,
    ended_bytes, own_objects, first_ns, last_ns, processes, sampled, standard_error_bytes, free_seen_share
    (NaN where nothing ended but by exit), kept_share.
    """
    seen = table[table["alloc_objects"] > 0]
    groups = seen.assign(variance=seen["standard_error_bytes"] ** 2).groupby("site", sort=True)
    how = dict.fromkeys([*COUNTS, *FINAL, "own_objects", "variance"], "sum") | dict.fromkeys(
        [*SITE_KEY, "call_site"], "first"
    )
    how |= {"first_ns": "min", "last_ns": "max", "sampled": "max", "life": "nunique"}
    sites = groups.agg(how).reset_index().rename(columns={"life": "processes"})
    sites["standard_error_bytes"] = np.sqrt(sites.pop("variance"))
    seen_frees = sites["call_objects"] + sites["context_objects"]
    ended = seen_frees + sites["reuse_objects"]
    sites["free_seen_share"] = np.where(ended > 0, seen_frees / np.maximum(ended, 1), np.nan)
    allocated = np.maximum(sites["alloc_bytes"], 1)
    sites["kept_share"] = np.minimum(1.0, sites["live_bytes"] / allocated)
    return sites.sort_values(["live_bytes", "site"], ascending=[False, True], ignore_index=True)

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
from leakscope.correlate.aggregate import BINS, curves
from leakscope.correlate.lives import FOLDED_PID

if TYPE_CHECKING:
    import duckdb

SITE_KEY = ["layer", "kind", "api", "slab_cache", "kernel_stack", "user_stack", "python_stack"]
POOL_KEY = ["life", "layer", "kind", "api", "slab_cache", "call_site"]
EVENTS = ("alloc", "call", "reuse", "context", "exit")
COUNTS = [f"{event}_{unit}" for event in EVENTS for unit in ("objects", "bytes")]
FINAL = ["live_bytes", "live_objects", "outlives_bytes", "ended_bytes"]
SAMPLING = {"sampling_variance": "sum", "stands_for": "max"}
"""Variance of live_bytes, and objects that a recorded one speaks for, where allocations were sampled by bytes."""
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
    BINS], at the end of each bin of the holding's life. ``pool_objects``: the same of all allocations of the
    holding's call site, those without a stack included, which needs no apportioning; NaN where all have one.
    ``standard_error_bytes`` covers the sampling of stacks and that by bytes (:data:`SAMPLING`).
    """

    table: pd.DataFrame
    curve_rows: npt.NDArray[np.int64]
    kept_bytes: npt.NDArray[np.float64]
    kept_objects: npt.NDArray[np.float64]
    pool_objects: npt.NDArray[np.float64]


def folded_cache(name: str) -> str:
    """The cache without its randomised part: ``kmalloc-rnd-07-64`` → ``kmalloc-64``
    (CONFIG_RANDOM_KMALLOC_CACHES, Linux 6.6: 16 copies of each kmalloc cache, chosen by call site)."""
    return re.sub(r"^kmalloc-rnd-\d+-", "kmalloc-", name)


def holdings(con: duckdb.DuckDBPyConnection, series: pd.DataFrame, lives: pd.DataFrame) -> Holdings:
    """Merge ``series`` (of :func:`leakscope.correlate.aggregate.aggregate`) into holdings, with their curves."""
    series = _with_final(series, lives)
    names = {name: folded_cache(name) for name in series["slab_cache"].unique()}
    series["slab_cache"] = series["slab_cache"].map(names)
    pooled = (series["weight"] == 0).to_numpy()
    series["speaks_for"] = _speaks_for(series)
    own, pools = _own_rows(series[~pooled]), _pools(series[pooled])
    own_table, given = _apportion(own.table, pools.table)
    leftover = pools.table[~given].assign(sampled=True, standard_error_bytes=0.0, own_objects=0)
    table = pd.concat([own_table, leftover], ignore_index=True)
    table["standard_error_bytes"] = np.hypot(table["standard_error_bytes"], np.sqrt(table["sampling_variance"]))
    table["holding"] = np.arange(len(table))
    table["site"] = table.groupby(SITE_KEY, sort=True).ngroup()
    # What each series adds to which holding's curve. The rest of a call site follows its sampled survivors, scaled so
    # that the end of the curve is the apportioned figure.
    others = series.loc[~pooled, "speaks_for"].to_numpy(np.float64)
    row_of_pool = np.where(given, -1, len(own_table) + np.cumsum(~given) - 1)
    terms = pd.DataFrame(
        {
            "id": np.concatenate([own.series_ids, pools.series_ids]),
            "row": np.concatenate([own.rows, row_of_pool[pools.rows]]),
            "bytes": np.concatenate([1.0 + others * _ratio(own_table, "bytes")[own.rows], np.ones(len(pools.rows))]),
            "objects": np.concatenate(
                [1.0 + others * _ratio(own_table, "objects")[own.rows], np.ones(len(pools.rows))]
            ),
        }
    )
    return _with_curves(con, table, terms, series, lives)


def _speaks_for(series: pd.DataFrame) -> npt.NDArray[np.float64]:
    """How many allocations without a stack one of each series speaks for: w - 1, the Horvitz-Thompson weight.

    Where a call site keeps objects without a stack but no sampled one survived, those that took their own stack while
    it was slow speak for them in equal parts: the best that is known, though they were not drawn at random.
    """
    weight = series["weight"].to_numpy(np.float64)
    live = series["live_bytes"].to_numpy(np.float64)
    key = [series[column] for column in POOL_KEY]

    def of_call_site(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return pd.Series(values, series.index).groupby(key).transform("sum").to_numpy(np.float64)

    drawn = np.maximum(0.0, weight - 1.0)
    nobody = (of_call_site(drawn * live) == 0) & (of_call_site(np.where(weight == 0, live, 0.0)) > 0)
    speaks: npt.NDArray[np.float64] = np.where(nobody & (weight > 0), 1.0, drawn)
    return speaks


def _ratio(own: pd.DataFrame, unit: str) -> npt.NDArray[np.float64]:
    """Kept of the pools that an own row was given, by what its survivors speak for; 0 where they are none."""
    mass = own["live_mass" if unit == "bytes" else "live_object_mass"].to_numpy(np.float64)
    given = own[f"given_{unit}"].to_numpy(np.float64)
    return np.divide(given, mass, out=np.zeros(len(own)), where=mass > 0)


def _with_final(series: pd.DataFrame, lives: pd.DataFrame) -> pd.DataFrame:
    """Add what is kept when the evidence ends, by the rules on the exit of processes."""
    folded = series["life"].isin(lives.loc[lives["pid"] == FOLDED_PID, "life"]).to_numpy()
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
    variance = series["live_variance"] - np.where(folded, series["exit_variance"], 0.0)
    series["sampling_variance"] = np.where(series["live_bytes"] > 0, np.maximum(variance, 0.0), 0.0)
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
    firsts = {
        "call_site": "min",
        "kernel_stack": "min",
        "user_stack": "min",
        "python_stack": "min",
        "folded": "max",
    }
    how = dict.fromkeys([*COUNTS, *FINAL, *extra], "sum") | SAMPLING | spans | firsts
    table = groups.agg({k: v for k, v in how.items() if k not in key}).reset_index()
    return _Merged(table, rows["id"].to_numpy(np.int64), row)


def _own_rows(rows: pd.DataFrame) -> _Merged:
    """Rows with a stack of their own, merged over weights; with the masses that speak for the others."""
    others = rows["speaks_for"].to_numpy(np.float64)
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


def _apportion(own: pd.DataFrame, pools: pd.DataFrame) -> tuple[pd.DataFrame, npt.NDArray[np.bool_]]:
    """Give pools to the sampled stacks of their call site.

    Returns the own rows, with given_bytes and given_objects (kept, out of pools), sampled and
    standard_error_bytes; and which pools were given.
    """
    own = own.assign(sampled=False, standard_error_bytes=0.0, given_bytes=0, given_objects=0)
    given = np.zeros(len(pools), bool)
    keys = pools[POOL_KEY].assign(pool=np.arange(len(pools)))
    members = own.assign(member=np.arange(len(own)))[own["alloc_mass"] > 0].merge(keys, on=POOL_KEY)
    if not len(members):
        return own, given
    pool, member = members["pool"].to_numpy(np.int64), members["member"].to_numpy(np.int64)

    def total(column: str) -> npt.NDArray[np.float64]:
        mass = np.bincount(pool, weights=members[column].to_numpy(np.float64), minlength=len(pools))
        return mass.astype(np.float64)

    def share(column: str) -> npt.NDArray[np.float64]:
        return weights.shares_within(pool, members[column].to_numpy(np.float64), len(pools))

    byte_share, object_share = share("live_mass"), share("live_object_mass")
    ended_share = np.where(total("ended_mass")[pool] > 0, share("ended_mass"), share("alloc_mass"))
    survivors = total("survivors")
    keeps = pools["live_bytes"].to_numpy() > 0
    given = np.bincount(pool, minlength=len(pools)).astype(bool) & ~(keeps & (survivors == 0))
    chosen = given[pool]
    before = own[["live_bytes", "live_objects"]].to_numpy(np.int64)
    # What a folded life gives back at its end has ended; all other frees by an exit are of what was kept.
    is_kept = {"live": keeps, "outlives": keeps, "exit": keeps & ~pools["folded"].to_numpy(bool)}
    for column in [*COUNTS, *FINAL]:
        name, unit = column.rsplit("_", 1)
        if name == "alloc":
            continue
        kept = is_kept.get(name, np.zeros(len(pools), bool))
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
    own["given_bytes"] = own["live_bytes"].to_numpy(np.int64) - before[:, 0]
    own["given_objects"] = own["live_objects"].to_numpy(np.int64) - before[:, 1]
    error = weights.standard_error(pools["live_bytes"].to_numpy(np.int64), pool, byte_share, survivors)
    squares = np.bincount(member, weights=np.where(chosen, error, 0.0) ** 2, minlength=len(own))
    of_pool = pools["sampling_variance"].to_numpy(np.float64)[pool] * byte_share**2
    own["sampling_variance"] += np.bincount(member, weights=np.where(chosen, of_pool, 0.0), minlength=len(own))
    own["standard_error_bytes"] = np.sqrt(squares)
    sampled = np.zeros(len(own), bool)
    sampled[member[chosen]] = True
    own["sampled"] = sampled
    return own, given


def _with_curves(
    con: duckdb.DuckDBPyConnection,
    table: pd.DataFrame,
    terms: pd.DataFrame,
    series: pd.DataFrame,
    lives: pd.DataFrame,
) -> Holdings:
    """``terms``: series id, row of ``table`` (-1 = none), and the factors of its bytes and objects there."""
    live = table["live_bytes"].to_numpy(np.int64)
    ranked = np.argsort(-live, kind="stable")[:MAX_CURVES]
    wanted = np.sort(ranked[live[ranked] > 0])
    slot = np.full(len(table) + 1, -1, np.int64)  # the last entry is for row -1
    slot[wanted] = np.arange(len(wanted))
    terms = terms.assign(slot=slot[terms["row"].to_numpy(np.int64)])
    terms = terms[terms["slot"] >= 0]
    to = terms["slot"].to_numpy(np.int64)
    folded_lives = lives.loc[lives["pid"] == FOLDED_PID, "life"]
    folded = table["life"].isin(folded_lives).to_numpy()[terms["row"].to_numpy(np.int64)]
    raw_bytes, raw_objects = curves(con, terms["id"].to_numpy(np.int64), folded)
    kept_bytes = np.zeros((len(wanted), raw_bytes.shape[1]))
    kept_objects = np.zeros_like(kept_bytes)
    np.add.at(kept_bytes, to, terms["bytes"].to_numpy()[:, None] * raw_bytes)
    np.add.at(kept_objects, to, terms["objects"].to_numpy()[:, None] * raw_objects)
    pool_objects = _pool_curves(con, table.iloc[wanted], series)
    return Holdings(table, wanted, kept_bytes, kept_objects, pool_objects)


def _pool_curves(con: duckdb.DuckDBPyConnection, rows: pd.DataFrame, series: pd.DataFrame) -> npt.NDArray[np.float64]:
    """Kept objects of all series of each row's call site where some of them have weight 0; else NaN."""
    result = np.full((len(rows), BINS), np.nan)
    pools = series.loc[series["weight"] == 0, POOL_KEY].drop_duplicates()
    pools = pools.merge(rows[POOL_KEY].drop_duplicates(), on=POOL_KEY).assign(pool=lambda p: np.arange(len(p)))
    if not len(pools):
        return result
    members = series[["id", "folded", *POOL_KEY]].merge(pools, on=POOL_KEY)
    _, objects = curves(con, members["id"].to_numpy(np.int64), members["folded"].to_numpy(bool))
    totals = np.zeros((len(pools), BINS))
    np.add.at(totals, members["pool"].to_numpy(np.int64), objects)
    of_row = rows[POOL_KEY].merge(pools, on=POOL_KEY, how="left")["pool"].to_numpy(np.float64)
    pooled = ~np.isnan(of_row)
    result[pooled] = totals[of_row[pooled].astype(np.int64)]
    return result


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
    how |= {"first_ns": "min", "last_ns": "max", "sampled": "max", "life": "nunique"} | SAMPLING
    sites = groups.agg(how).reset_index().rename(columns={"life": "processes"})
    sites["standard_error_bytes"] = np.sqrt(sites.pop("variance"))
    seen_frees = sites["call_objects"] + sites["context_objects"]
    ended = seen_frees + sites["reuse_objects"]
    sites["free_seen_share"] = np.where(ended > 0, seen_frees / np.maximum(ended, 1), np.nan)
    allocated = np.maximum(sites["alloc_bytes"], 1)
    sites["kept_share"] = np.minimum(1.0, sites["live_bytes"] / allocated)
    return sites.sort_values(["live_bytes", "site"], ascending=[False, True], ignore_index=True)

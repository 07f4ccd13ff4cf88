"""Kept bytes by culprit, process, NVTX range or slab cache: sums over all sites of a capture, listed or not.

Every byte is in one group, and a group is of one layer. What does not count in the layer's total (kinds that another
kind counts, memory whose frees cannot be seen) has groups of its own.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.lives import FOLDED_PID
from leakscope.correlate.range_parts import range_parts
from leakscope.correlate.sites import Holdings
from leakscope.detect.group_growth import group_growth
from leakscope.model.breakdown import Breakdown, Group
from leakscope.model.manifest import Source
from leakscope.model.results import Growth
from leakscope.model.words import KINDS_NOT_ADDED

if TYPE_CHECKING:
    import duckdb

MAX_GROUPS = 1000
"""Groups of a capture told one by one, those with most kept bytes first; the rest is one group a layer."""
NOT_LISTED = "sites not listed"
REST = "the rest"
NO_RANGE = "outside of all ranges"

_KEY = ["layer", "added", "visible", "label"]
_SUMS = ["live_bytes", "live_objects", "alloc_bytes", "alloc_objects", "variance"]


@dataclass(frozen=True)
class Label:
    """What a group is called: the fields of that name of model.breakdown.Group."""

    name: str
    kind: str = ""
    pid: int | None = None
    ranges: tuple[str, ...] = ()


@dataclass
class _Parts:
    """What groups are summed of. ``table``: layer, added, visible, life, label (index into ``labels``), :data:`_SUMS`,
    stack_sampled, bytes_sampled, site (-1 = of several). ``rows``: those of ``table`` that have one of ``curves``."""

    table: pd.DataFrame
    labels: list[Label]
    rows: npt.NDArray[np.int64]
    curves: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Names:
    """What groups are called after. ``culprits``: by number of site, of those that are listed ('' = unknown)."""

    culprits: Mapping[int, str]
    sources: Sequence[Source]


def breakdown(
    con: duckdb.DuckDBPyConnection,
    by: str,
    held: Holdings,
    sites: pd.DataFrame,
    lives: pd.DataFrame,
    names: Names,
    warm_up_s: float | None = None,
) -> Breakdown:
    """All of ``held`` by ``by``, one of model.breakdown.BY. ``sites``: of merge_sites, with visible.

    ``con`` has what :func:`leakscope.correlate.aggregate.aggregate` leaves behind.
    """
    if by == "range":
        parts = _ranges(con, held, sites, lives)
    else:
        parts = _holdings(held, sites, lives, by, names)
    return Breakdown(by, _groups(parts, lives, warm_up_s))


def _holdings(held: Holdings, sites: pd.DataFrame, lives: pd.DataFrame, by: str, names: Names) -> _Parts:
    position = np.full(int(held.table["site"].max()) + 1 if len(held.table) else 0, -1, np.int64)
    position[sites["site"]] = np.arange(len(sites))
    of_site = position[held.table["site"]]
    known = of_site >= 0
    table = held.table[known]
    table = table.assign(
        added=~table["kind"].isin(KINDS_NOT_ADDED),
        visible=sites["visible"].to_numpy(bool)[of_site[known]],
        bytes_sampled=table["stands_for"] > 1.0,
        # Which stack has which part of a call site is estimated from samples; which process and cache has it is not.
        stack_sampled=table["sampled"].astype(bool) & (by == "site"),
        variance=table["standard_error_bytes"] ** 2 if by == "site" else table["sampling_variance"],
    )
    what = table["slab_cache"].where(table["slab_cache"] != "", table["kind"])
    if by == "pid":
        numbers, labels = table["life"].to_numpy(np.int64), _processes(lives, names.sources)
    elif by == "cache":
        kind = table["kind"].where(table["slab_cache"] == "", "")
        numbers, found = _numbered(what, kind)
        labels = [Label(name, kind) for name, kind in found]
    else:
        listed = table["site"].isin(names.culprits.keys())
        culprit = table["site"].map(names.culprits).where(listed, NOT_LISTED)
        culprit = culprit.where(culprit != "", what)
        numbers, found = _numbered(culprit, what.where(listed, ""))
        labels = [Label(name, what) for name, what in found]
    new_row = np.cumsum(known) - 1
    has_curve = known[held.curve_rows]
    rows = new_row[held.curve_rows[has_curve]]
    return _Parts(table.assign(label=numbers).reset_index(drop=True), labels, rows, held.kept_bytes[has_curve])


def _numbered(*columns: pd.Series) -> tuple[npt.NDArray[np.int64], list[tuple[str, ...]]]:
    """A number for each row, and the values that each number stands for."""
    numbers, values = pd.MultiIndex.from_arrays(list(columns)).factorize()
    return np.asarray(numbers, dtype=np.int64), [tuple(map(str, value)) for value in values]


def _processes(lives: pd.DataFrame, sources: Sequence[Source]) -> list[Label]:
    """A label a life. The command of the process that a recording started is known whole, of others their name."""
    by_id = {source.id: source for source in sources}
    pids = lives.loc[lives["pid"] > 0, ["source_id", "pid"]].drop_duplicates()
    twice = set(pids.loc[pids.duplicated("pid", keep=False), "pid"])
    folded = lives[(lives["pid"] != FOLDED_PID) & ~lives["judged"].astype(bool)].groupby("source_id").size()
    labels = [Label("")] * (int(lives["life"].max()) + 1 if len(lives) else 0)
    judged = lives[lives["judged"].astype(bool)]
    for source_id, pid, life, process in judged[["source_id", "pid", "life", "name"]].to_numpy(object):
        source = by_id.get(int(source_id))
        if pid == FOLDED_PID:
            label = Label(f"short-lived processes ({int(folded.get(source_id, 0)):,})")
        elif pid <= 0:
            label = Label("process not known", pid=int(pid))
        else:
            started = source and source.scope.get("command_pid") == pid and source.command
            name = shlex.join(started) if started else str(process or f"process {pid}")
            where = f" in {source.name}" if source and pid in twice else ""
            label = Label(name + where, pid=int(pid))
        labels[int(life)] = label
    return labels


def _ranges(con: duckdb.DuckDBPyConnection, held: Holdings, sites: pd.DataFrame, lives: pd.DataFrame) -> _Parts:
    found = range_parts(con, held.table, sites, lives)
    sampled = held.table["stands_for"].gt(1.0).groupby(held.table["layer"]).any()
    table = found.table.rename(columns={"range": "label", "shared": "stack_sampled"})
    table = table.assign(bytes_sampled=table["layer"].map(sampled).fillna(False).astype(bool), site=-1)
    labels = [Label(" / ".join(path) or NO_RANGE, ranges=path) for path in found.paths]
    return _Parts(table, labels, np.arange(len(table)), found.kept_bytes)


def _groups(parts: _Parts, lives: pd.DataFrame, warm_up_s: float | None) -> list[Group]:
    cells = parts.table.groupby(_KEY, sort=True)
    number: npt.NDArray[np.int64] = np.asarray(cells.ngroup(), dtype=np.int64)
    sums = cells.agg(dict.fromkeys(_SUMS, "sum") | {"stack_sampled": "any", "bytes_sampled": "any"})
    sums["sites"] = cells["site"].nunique()
    sums = sums.reset_index()
    labels = [parts.labels[int(label)] for label in sums["label"]]
    if len(sums) > MAX_GROUPS:
        sums, labels, number = _folded(sums, labels, number)
    has_growth = sums["visible"].to_numpy(bool)[number[parts.rows]]
    rows = parts.rows[has_growth]
    life = parts.table["life"].to_numpy(np.int64)[rows]
    found = group_growth(parts.curves[has_growth], number[rows], life, lives, warm_up_s)
    rates = {
        int(at): Growth("live", float(mean), float(low), float(high))
        for at, (mean, low, high) in zip(found.index, found.to_numpy(), strict=True)
    }
    counts = sums["added"] & sums["visible"]
    totals = sums[counts].groupby("layer")["live_bytes"].sum()
    groups = []
    for index, (row, label) in enumerate(zip(sums.to_dict("records"), labels, strict=True)):
        groups.append(
            Group(
                label.name,
                row["layer"],
                bool(row["added"]),
                bool(row["visible"]),
                int(row["live_bytes"]),
                int(row["live_objects"]),
                int(row["alloc_bytes"]),
                int(row["alloc_objects"]),
                rates.get(index),
                row["live_bytes"] / max(1, int(totals[row["layer"]])) if counts[index] else None,
                label.kind,
                label.pid,
                label.ranges,
                int(row["sites"]) if (parts.table["site"] >= 0).all() else None,
                bool(row["stack_sampled"]),
                bool(row["bytes_sampled"]),
                float(max(0.0, row["variance"])) ** 0.5,
            )
        )
    return sorted(groups, key=lambda g: (-g.live_bytes, -g.allocated_bytes, g.layer, g.name, g.pid or 0))


def _folded(
    sums: pd.DataFrame, labels: list[Label], number: npt.NDArray[np.int64]
) -> tuple[pd.DataFrame, list[Label], npt.NDArray[np.int64]]:
    """Groups beyond :data:`MAX_GROUPS`, least kept bytes first, in one group for each layer and way of counting."""
    rank = sums.sort_values(["live_bytes", "alloc_bytes"], ascending=False, kind="stable").index.get_indexer(sums.index)
    key = pd.DataFrame(sums[_KEY[:3]]).assign(own=np.where(rank < MAX_GROUPS, np.arange(len(sums)), -1))
    cells = key.groupby([*_KEY[:3], "own"], sort=True)
    merged_of: npt.NDArray[np.int64] = np.asarray(cells.ngroup(), dtype=np.int64)
    how = dict.fromkeys([*_SUMS, "sites"], "sum") | {"stack_sampled": "any", "bytes_sampled": "any"}
    merged = sums.groupby(merged_of).agg(dict.fromkeys(_KEY[:3], "first") | how)
    own = key.groupby(merged_of)["own"].first()
    return merged, [labels[at] if at >= 0 else Label(REST) for at in own], merged_of[number]

"""The part of the graph that a recording tells: allocations by site, their age, the launches that still get them.

Nobody counts the references to an allocation. What is known: it is not freed, so its process holds it; how long ago it
was allocated; and of device memory which launch last got a pointer into it. Where that is known exactly the memory is
in use or stale; where it is not, its class is unknown-ref, whatever its age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.aggregate import aggregate
from leakscope.correlate.cohorts import STEPS_S, live_cohorts
from leakscope.correlate.lives import FOLDED_PID, process_lives, source_bounds
from leakscope.correlate.mixed_stacks import merge, unify_stacks
from leakscope.correlate.sites import SITE_KEY, Holdings, holdings, merge_sites
from leakscope.correlate.stacks import Stacks
from leakscope.correlate.touches import Touched, touched_allocations
from leakscope.correlate.visibility import frees_visible
from leakscope.correlate.wrappers import culprit
from leakscope.liveness.classes import UNKNOWN_REF
from leakscope.liveness.device import GROUP, add_kernels, cohort_lists, touched_groups, windows_of
from leakscope.liveness.graph import GraphBuilder
from leakscope.model.liveness import CLASSES, Stale, Window
from leakscope.model.manifest import Source
from leakscope.model.words import KINDS_NOT_ADDED

if TYPE_CHECKING:
    import duckdb

MAX_NODES = 20_000
"""Groups that get a node of their own, those with most bytes first; the others of a source and class are one node."""
OTHER_SITES = -1
KEY = ["source_id", "life", "site"]
BY_AGE = "time of allocation"


@dataclass
class Recorded:
    """What was added. ``groups``: one row a node: :data:`GROUP`, node, objects, bytes, since_ns, last_use_ns,
    stale_bytes, stale_objects, stale_byte_seconds, cohorts, evidence, approximate."""

    groups: pd.DataFrame
    stale: list[Stale] = field(default_factory=list)
    windows: dict[int, tuple[Window, ...]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    notes: dict[int, list[str]] = field(default_factory=dict)


def add_recordings(
    builder: GraphBuilder,
    con: duckdb.DuckDBPyConnection,
    sources: Sequence[Source],
    numbers: dict[int, int],
    stale_after_s: float,
    windows: int,
    top: int,
) -> Recorded | None:
    """Add what the sources with memory events keep at their end; None where there are none.

    ``numbers``: source_id → number of the source in the graph, of those to look at. ``top``: stale groups to describe.
    """
    row = con.execute("SELECT (SELECT count(*) FROM mem_events) + (SELECT count(*) FROM census_sites)").fetchall()
    if not row[0][0]:
        return None
    unify_stacks(con)
    bounds = source_bounds(con, sources)
    lives = process_lives(con, bounds)
    held = holdings(con, aggregate(con, lives), lives)
    sites = merge_sites(held.table)
    if not len(sites):
        return None
    nothing = np.full(len(sites), np.nan)
    sites["visible"] = frees_visible(sites, nothing, nothing, nothing)
    notes = _not_seen(sites, numbers)
    counted = sites[sites["visible"] & (sites["live_bytes"] > 0) & ~sites["kind"].isin(KINDS_NOT_ADDED)]
    ends = dict(zip(bounds["source_id"].astype(int), bounds["end_ns"].astype(int), strict=True))
    kept = _kept(held, lives, counted)
    kept = kept[kept["source_id"].isin(numbers)]
    if not len(kept):
        return None
    touched = _with_lives(touched_allocations(con, _pointed_at(counted), _processes(lives, ends)), lives)
    steps = tuple(sorted({*STEPS_S, stale_after_s}))
    groups = _untouched(kept, _ages(con, lives, bounds, counted, steps), steps, stale_after_s, touched)
    if touched is not None:
        groups = pd.concat([touched_groups(touched, stale_after_s, steps), groups])
    groups = groups[groups["source_id"].isin(numbers)].reset_index(drop=True)
    groups = _largest(groups)
    names = _Names(con, counted, groups)
    groups["node"] = _add_nodes(builder, groups, names, numbers)
    _add_holders(builder, groups, lives, numbers)
    if touched is not None:
        add_kernels(builder, groups, touched, numbers, stale_after_s)
    found = Recorded(groups, ends=ends, notes=notes)
    found.windows = {
        source: windows_of(held, lives, counted, touched, bounds, source, windows, stale_after_s) for source in numbers
    }
    found.stale = _stale(groups, names, numbers, top)
    return found


def _not_seen(sites: pd.DataFrame, numbers: dict[int, int]) -> dict[int, list[str]]:
    hidden = sites[~sites["visible"]]
    if not len(hidden):
        return {}
    text = (
        f"{len(hidden):,} kernel sites are left out: their frees cannot be seen "
        f"({int(hidden['live_bytes'].sum()):,} bytes would seem to be kept)"
    )
    return {source: [text] for source in numbers}


def _pointed_at(sites: pd.DataFrame) -> pd.DataFrame:
    return sites.loc[
        sites["layer"] != "kernel", ["site", "layer", "kind", "api", "kernel_stack", "user_stack", "python_stack"]
    ]


def _processes(lives: pd.DataFrame, ends: dict[int, int]) -> pd.DataFrame:
    """source_id, pid, end_ns of the processes that are judged."""
    judged = lives[lives["judged"] & (lives["pid"] >= 0)]
    exits = judged["exit_ns"].to_numpy(np.int64)
    end = judged["source_id"].map(ends).to_numpy(np.int64)
    return judged[["source_id", "pid"]].assign(end_ns=np.where(exits > 0, exits, end))


def _with_lives(touched: Touched | None, lives: pd.DataFrame) -> Touched | None:
    """With the life of the process of each allocation."""
    if touched is None:
        return None
    of = lives.loc[lives["pid"] != FOLDED_PID, ["source_id", "pid", "life"]]
    return touched._replace(kept=touched.kept.merge(of, on=["source_id", "pid"], how="left"))


def _largest(groups: pd.DataFrame) -> pd.DataFrame:
    """The MAX_NODES groups with most bytes; the others of a source and class are one, without a site or a process."""
    if len(groups) <= MAX_NODES:
        return groups
    order = groups.sort_values("bytes", ascending=False, kind="stable")
    few, rest = order.iloc[:MAX_NODES], order.iloc[MAX_NODES:].assign(life=-1, site=OTHER_SITES)
    sums = dict.fromkeys(("objects", "bytes", "stale_bytes", "stale_objects", "stale_byte_seconds"), "sum")
    how = sums | {"since_ns": "min", "last_use_ns": "max", "approximate": "max", "evidence": "last"}
    rest = rest.groupby(GROUP, sort=True).agg(how).reset_index()
    rest["cohorts"] = pd.Series([()] * len(rest), rest.index)
    return pd.concat([few, rest], ignore_index=True)


def _kept(held: Holdings, lives: pd.DataFrame, sites: pd.DataFrame) -> pd.DataFrame:
    """source_id, site, life, live_bytes, live_objects, first_ns of the holdings of some sites that keep something."""
    rows = held.table[held.table["site"].isin(sites["site"]) & (held.table["live_bytes"] > 0)]
    of_life = lives.drop_duplicates("life").set_index("life")["source_id"]
    rows = rows.assign(source_id=rows["life"].map(of_life).astype("int64"))
    return rows[["source_id", "site", "life", "live_bytes", "live_objects", "first_ns"]]


def _ages(
    con: duckdb.DuckDBPyConnection,
    lives: pd.DataFrame,
    bounds: pd.DataFrame,
    sites: pd.DataFrame,
    steps: tuple[float, ...],
) -> pd.DataFrame:
    """source_id, life, site, cohort, objects, bytes, byte_seconds."""
    cohorts = live_cohorts(con, lives, bounds, steps)
    for column in ("layer", "kind", "api", "slab_cache"):
        sites = sites.assign(**{column: sites[column].astype(str)})
    return cohorts.merge(sites[["site", *SITE_KEY]], on=SITE_KEY)[[*KEY, "cohort", "objects", "bytes", "byte_seconds"]]


def _untouched(
    kept: pd.DataFrame,
    ages: pd.DataFrame,
    steps: tuple[float, ...],
    stale_after_s: float,
    touched: Touched | None,
) -> pd.DataFrame:
    """Groups of what has no touch evidence: class unknown-ref."""
    groups = kept.rename(columns={"live_bytes": "bytes", "live_objects": "objects", "first_ns": "since_ns"})
    if touched is not None:
        known = touched.kept.groupby(KEY)["size_bytes"].agg(known_bytes="sum", known_objects="count").reset_index()
        groups = groups.merge(known, on=KEY, how="left").fillna({"known_bytes": 0, "known_objects": 0})
        groups["bytes"] -= groups["known_bytes"].astype("int64")
        groups["objects"] -= groups["known_objects"].astype("int64")
        ages = ages.merge(known[KEY], on=KEY, how="left", indicator=True)
        ages = ages[ages.pop("_merge") == "left_only"]
        groups = groups[groups["bytes"] > 0]
    scaled = ages.merge(groups[[*KEY, "bytes"]], on=KEY, suffixes=("", "_group"))
    # Stacks of a sample speak for more than their own allocations: the ages of these stand for all.
    factor = scaled["bytes_group"] / scaled.groupby(KEY)["bytes"].transform("sum").clip(lower=1)
    for column in ("bytes", "objects"):
        scaled[column] = np.rint(scaled[column] * factor).astype("int64")
    scaled["byte_seconds"] *= factor
    old = scaled[np.asarray(steps)[scaled["cohort"].to_numpy(np.int64)] >= stale_after_s]
    of_old = old.groupby(KEY).agg(
        stale_bytes=("bytes", "sum"), stale_objects=("objects", "sum"), stale_byte_seconds=("byte_seconds", "sum")
    )
    nothing = {"stale_bytes": 0, "stale_objects": 0, "stale_byte_seconds": 0.0}
    groups = groups.merge(of_old, on=KEY, how="left").fillna(nothing)
    groups["cohorts"] = pd.Series(cohort_lists(groups, scaled, KEY, steps), groups.index)
    groups["cls"], groups["last_use_ns"], groups["approximate"], groups["evidence"] = UNKNOWN_REF, 0, True, BY_AGE
    return groups[[*GROUP, *(name for name in groups if name not in GROUP and not str(name).startswith("known_"))]]


class _Names:
    """What sites are called: their culprit's frame and what they allocate."""

    def __init__(self, con: duckdb.DuckDBPyConnection, sites: pd.DataFrame, groups: pd.DataFrame) -> None:
        named = sites[sites["site"].isin(groups["site"])]
        self._rows = {int(row["site"]): row for row in named.to_dict("records")}
        ids = [row[stack] for row in self._rows.values() for stack in ("kernel_stack", "user_stack", "python_stack")]
        self._stacks = Stacks(con, ids)

    def layer(self, site: int) -> str:
        return str(self._rows[site]["layer"]) if site != OTHER_SITES else ""

    def stack(self, site: int) -> tuple[str, ...]:
        """Outermost first."""
        if site == OTHER_SITES:
            return ()
        row, stacks = self._rows[site], self._stacks
        frames = [*merge(stacks[row["user_stack"]], stacks[row["python_stack"]]), *stacks[row["kernel_stack"]]]
        return tuple(frame.text for frame in frames)

    def name(self, site: int) -> str:
        if site == OTHER_SITES:
            return "smaller sites"
        row, stacks = self._rows[site], self._stacks
        user, python, kernel = stacks[row["user_stack"]], stacks[row["python_stack"]], stacks[row["kernel_stack"]]
        frame = culprit(user, python, kernel, 0, kernel_only=not user and not python and not row["call_site"])
        return f"{row['kind']} {row['slab_cache'] or row['api']} of {frame.text if frame else 'unknown code'}"


def _add_nodes(
    builder: GraphBuilder, groups: pd.DataFrame, names: _Names, numbers: dict[int, int]
) -> npt.NDArray[np.int32]:
    last = groups["last_use_ns"].to_numpy(np.int64)
    return builder.add_nodes(
        "site",
        [names.name(site) for site in groups["site"].tolist()],
        source=groups["source_id"].map(numbers).to_numpy(np.int64),
        cls=groups["cls"].to_numpy(np.int8),
        objects=groups["objects"].to_numpy(np.int64),
        bytes=groups["bytes"].to_numpy(np.int64),
        since_ns=groups["since_ns"].to_numpy(np.int64),
        last_use_ns=last,
        rank=np.where(last > 0, groups["last_use_ns"].rank(method="min", ascending=False).to_numpy(), 0),
        approximate=groups["approximate"].to_numpy(bool),
    )


def _add_holders(builder: GraphBuilder, groups: pd.DataFrame, lives: pd.DataFrame, numbers: dict[int, int]) -> None:
    """A node for each process that has not freed something, with an edge to it."""
    known = {int(life["life"]): life for life in lives.to_dict("records")}  # of shared ones the folded life comes last
    for _, edges in groups.groupby(["source_id", "life"], sort=True):
        life = known.get(int(edges["life"].iloc[0]))
        if life is None:
            name = "other processes"
        elif life["pid"] == FOLDED_PID:
            name = "short-lived processes"
        else:
            name = f"process {life['pid']} {life['name']}".rstrip() + (" (exited)" if life["exit_ns"] else "")
        holder = builder.add_nodes("holder", [name], source=numbers[int(edges["source_id"].iloc[0])])
        builder.add_edges(
            "holds",
            np.repeat(holder, len(edges)),
            edges["node"].to_numpy(np.int32),
            count=edges["objects"].to_numpy(np.int64),
            since_ns=edges["since_ns"].to_numpy(np.int64),
        )


def _stale(groups: pd.DataFrame, names: _Names, numbers: dict[int, int], top: int) -> list[Stale]:
    """The sites with most bytes × age among what was not used for long enough, their processes together."""
    old = groups[groups["stale_bytes"] > 0].sort_values("stale_byte_seconds", ascending=False, kind="stable")
    sums = dict.fromkeys(("stale_bytes", "stale_objects", "stale_byte_seconds", "cohorts"), "sum")
    firsts = dict.fromkeys(("node", "approximate", "evidence"), "first")
    sites = old.groupby(["source_id", "site", "cls"], sort=False).agg(sums | firsts).reset_index()
    return [
        Stale(
            node=int(row["node"]),
            kind="site",
            name=names.name(int(row["site"])),
            source=str(numbers[int(row["source_id"])]),
            cls=CLASSES[int(row["cls"])],
            layer=names.layer(int(row["site"])),
            objects=int(row["stale_objects"]),
            bytes=int(row["stale_bytes"]),
            age_s=float(row["stale_byte_seconds"]) / max(1, int(row["stale_bytes"])),
            byte_seconds=float(row["stale_byte_seconds"]),
            evidence=row["evidence"],
            approximate=bool(row["approximate"]),
            stack=names.stack(int(row["site"])),
            cohorts=_merged(row["cohorts"]),
        )
        for row in sites.nlargest(top, "stale_byte_seconds").to_dict("records")
    ]


def _merged(cohorts: tuple[tuple[float, int, int], ...]) -> tuple[tuple[float, int, int], ...]:
    """Cohorts of several processes, those of an age together."""
    ages: dict[float, tuple[int, int]] = {}
    for age_s, objects, size in cohorts:
        more = ages.get(age_s, (0, 0))
        ages[age_s] = more[0] + objects, more[1] + size
    return tuple((age_s, *ages[age_s]) for age_s in sorted(ages))

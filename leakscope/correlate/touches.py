"""Which launch last got a pointer into an allocation: joins launch arguments with the lives of device memory.

A pointer touches the allocation that held its address when the kernel was launched: addresses are handed out again, so
only what was alive then counts. The rule sees arguments alone. It does not see what a kernel reaches through pointers
in memory, what graphs launch, and what copies (cudaMemcpy) touch: an allocation without touches need not be idle.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.model.results import Touches, TouchingKernel

if TYPE_CHECKING:
    import duckdb

POINTED_KINDS = ("device", "managed", "async", "ipc", "pinned", "registered", "vmm")
"""Kinds that a kernel gets by address: their own, or (vmm, memory of cuMemCreate) that of a mapping. Arrays are reached
through objects."""
IDLE_STEPS_S = (1, 10, 60, 600, 3600, 6 * 3600, 24 * 3600)
MAX_KERNELS = 3
ALWAYS = np.iinfo(np.int64).max
"""``until_ns`` of what is never freed."""


class Lives(NamedTuple):
    """Equally long arrays: owner (int64, any number of a process), start and end addresses (uint64, end excluded), and
    from_ns and until_ns (int64, until excluded). Lives of one owner at one time do not overlap in addresses."""

    owner: npt.NDArray[np.int64]
    start: npt.NDArray[np.uint64]
    end: npt.NDArray[np.uint64]
    from_ns: npt.NDArray[np.int64]
    until_ns: npt.NDArray[np.int64]

    def take(self, rows: npt.NDArray[np.int64]) -> Lives:
        """The lives of some rows."""
        owner, start, end, from_ns, until_ns = self
        return Lives(owner[rows], start[rows], end[rows], from_ns[rows], until_ns[rows])


def find_lives(
    lives: Lives, owner: npt.NDArray[np.int64], address: npt.NDArray[np.uint64], ts_ns: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """int64[n]: for each (owner, address, time) the row of the life that held it, -1 where none did."""
    found = np.full(len(address), -1, np.int64)
    for number in np.intersect1d(lives.owner, owner):
        rows, asked = np.flatnonzero(lives.owner == number), np.flatnonzero(owner == number)
        hits = _find(lives.take(rows), address[asked], ts_ns[asked])
        found[asked] = np.where(hits >= 0, rows[hits], -1)
    return found


def _find(lives: Lives, address: npt.NDArray[np.uint64], ts_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    order = np.argsort(lives.start, kind="stable")
    start, end = lives.start[order], lives.end[order]
    if not (start[1:] < end[:-1]).any():  # no address was ever handed out twice: one search finds all
        at = np.searchsorted(start, address, "right") - 1
        life = order[np.maximum(at, 0)]
        inside = (at >= 0) & (address < lives.end[life])
        return np.where(inside & (lives.from_ns[life] <= ts_ns) & (ts_ns < lives.until_ns[life]), life, -1)
    return _find_in_tree(lives, address, ts_ns)


def _find_in_tree(lives: Lives, address: npt.NDArray[np.uint64], ts_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A segment tree over time: each life stands in the O(log n) nodes that it covers wholly, so that the lives of a
    node are alive together and disjoint. A question looks into the nodes above its time, by address."""
    times = np.unique(np.concatenate([lives.from_ns, lives.until_ns]))
    leaves = 1 << max(1, len(times).bit_length())
    node, life = _covering_nodes(
        np.searchsorted(times, lives.from_ns) + leaves, np.searchsorted(times, lives.until_ns) + leaves
    )
    starts = np.unique(lives.start)
    stride = len(starts) + 1
    key = node * stride + np.searchsorted(starts, lives.start[life]) + 1
    order = np.argsort(key, kind="stable")
    key, life = key[order], life[order]
    levels = {int(level) for level in np.unique(np.log2(node).astype(np.int64))}

    found = np.full(len(address), -1, np.int64)
    rank = np.searchsorted(starts, address, "right")  # 0: below every start
    leaf = np.searchsorted(times, ts_ns, "right") - 1 + leaves
    open_ = np.argsort(leaf, kind="stable")  # neighbours in time look at the same nodes: kind to the caches
    open_ = open_[(rank[open_] > 0) & (leaf[open_] >= leaves)]
    for shift in range(int(leaves).bit_length()):
        if int(leaves).bit_length() - 1 - shift not in levels:
            continue
        above = leaf[open_] >> shift
        at = np.searchsorted(key, above * stride + rank[open_], "right") - 1
        candidate = life[np.maximum(at, 0)]
        hit = (at >= 0) & (key[np.maximum(at, 0)] // stride == above) & (address[open_] < lives.end[candidate])
        found[open_[hit]] = candidate[hit]
        open_ = open_[~hit]
    return found


def _covering_nodes(
    left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(node, life): the fewest nodes of the tree that cover [left, right) of each life, which are leaves."""
    nodes, whose = [], []
    rows = np.arange(len(left))
    while len(rows):
        odd = left & 1 == 1
        nodes.append(left[odd])
        whose.append(rows[odd])
        left = left + odd
        odd = (right & 1 == 1) & (left < right)
        right = right - odd
        nodes.append(right[odd])
        whose.append(rows[odd])
        left, right = left >> 1, right >> 1
        more = left < right
        left, right, rows = left[more], right[more], rows[more]
    return np.concatenate(nodes), np.concatenate(whose)


class Touched(NamedTuple):
    """Allocations that are kept at the end, and the launches that touched them.

    ``kept``: site, source_id, pid, addr, size_bytes, ts_ns, end_ns, kind, last_ns (last touch, 0 = none), approximate
    (the last touch is a guess, or a later launch hides its arguments); the index is ``row``. ``touches``: row, site,
    launch_id, ts_ns, approximate, kernel, one a (kept allocation, launch).
    """

    kept: pd.DataFrame
    touches: pd.DataFrame


def touched_allocations(con: duckdb.DuckDBPyConnection, sites: pd.DataFrame, processes: pd.DataFrame) -> Touched | None:
    """What sites keep at the end of the evidence, with its touches; None where no launch arguments were recorded.

    ``sites``: site, layer, kind, api, kernel_stack, user_stack, python_stack. ``processes``: source_id, pid, end_ns
    (where its evidence ends), of those that are judged.
    """
    if not con.execute("SELECT 1 FROM launch_arguments LIMIT 1").fetchall() or not len(sites):
        return None
    con.register("touch_sites", sites)
    con.register("touch_processes", processes)
    kept = con.execute(
        f"""
        WITH freed AS (
            SELECT source_id, pid, addr, alloc_ts_ns FROM mem_events
            WHERE layer IN ('gpu', 'host') AND op = 'free' AND alloc_ts_ns > 0 AND cause NOT IN ('exit', 'exec')
        )
        SELECT site, source_id, e.pid, e.addr, size_bytes, e.ts_ns, end_ns, kind
        FROM mem_events e JOIN touch_sites USING (layer, kind, api, kernel_stack, user_stack, python_stack)
             JOIN touch_processes USING (source_id, pid)
             ANTI JOIN freed f ON f.source_id = e.source_id AND f.pid = e.pid AND f.addr = e.addr
                                  AND f.alloc_ts_ns = e.ts_ns
        WHERE op = 'alloc' AND result = 0 AND kind IN {POINTED_KINDS} AND e.ts_ns < end_ns
        ORDER BY site, source_id, e.pid, e.addr, e.ts_ns
        """
    ).df()
    if not len(kept):
        return None
    arguments = con.execute(
        """
        SELECT source_id, a.pid, a.ts_ns, launch_id, value, approximate
        FROM launch_arguments a JOIN touch_processes p USING (source_id, pid)
             LEFT JOIN launches l ON l.source_id = a.source_id AND l.id = a.launch_id
        WHERE a.position >= 0 AND coalesce(l.result, 0) = 0 AND a.ts_ns < end_ns
        """
    ).fetchnumpy()
    con.unregister("touch_sites")
    touched = _touched(_places(kept, _mappings(con)), kept, arguments)
    kernel_of = _kernels(con, touched["launch_id"])
    touched["kernel"] = touched["launch_id"].map(kernel_of).fillna("")
    hidden = _hidden(con)
    con.unregister("touch_processes")
    return Touched(_with_last(kept, touched, hidden), touched)


def touches_by_site(con: duckdb.DuckDBPyConnection, sites: pd.DataFrame, processes: pd.DataFrame) -> dict[int, Touches]:
    """Touches of what each site keeps at the end of the evidence; arguments and {} as :func:`touched_allocations`."""
    found = touched_allocations(con, sites, processes)
    if found is None:
        return {}
    kept, touched = found
    return {
        int(site): _summary(kept[kept["site"] == site], touched[touched["site"] == site])
        for site in kept["site"].unique().tolist()
    }


def _with_last(kept: pd.DataFrame, touched: pd.DataFrame, hidden: dict[tuple[int, int], int]) -> pd.DataFrame:
    """``kept`` with its last touches."""
    rows = np.arange(len(kept))
    newest = touched.sort_values("ts_ns", kind="stable").drop_duplicates("row", keep="last").set_index("row")
    last = newest["ts_ns"].reindex(rows, fill_value=0).to_numpy(np.int64)
    guessed = newest["approximate"].reindex(rows, fill_value=False).to_numpy(bool)
    unseen = np.array(
        [hidden.get((int(s), int(p)), 0) for s, p in zip(kept["source_id"], kept["pid"], strict=True)], np.int64
    )
    approximate = guessed | (unseen > np.maximum(last, kept["ts_ns"].to_numpy(np.int64)))
    return kept.assign(row=rows, last_ns=last, approximate=approximate)


def _mappings(con: duckdb.DuckDBPyConnection) -> pd.DataFrame:
    """source_id, pid, handle, addr, size_bytes, ts_ns, until_ns of mappings of cuMemCreate's memory."""
    rows = con.execute(
        "SELECT source_id, pid, op, addr, size_bytes, handle, ts_ns FROM device_maps ORDER BY ts_ns, op DESC"
    ).fetchall()
    mapped: dict[tuple[int, int], tuple[list[int], list[int]]] = {}  # by process: addresses, rows of `found`
    found: list[list[int]] = []
    for source, pid, op, addr, size, handle, ts_ns in rows:
        starts, numbers = mapped.setdefault((source, pid), ([], []))
        first = bisect_left(starts, addr)
        if op == "map":
            starts.insert(first, addr)
            numbers.insert(first, len(found))
            found.append([source, pid, handle, addr, size, ts_ns, ALWAYS])
        else:
            last = bisect_left(starts, addr + size)
            for number in numbers[first:last]:
                found[number][-1] = ts_ns
            del starts[first:last], numbers[first:last]
    columns = ["source_id", "pid", "handle", "addr", "size_bytes", "ts_ns", "until_ns"]
    return pd.DataFrame(found, columns=columns).astype({"handle": "uint64", "addr": "uint64", "until_ns": "int64"})


def _places(kept: pd.DataFrame, mappings: pd.DataFrame) -> pd.DataFrame:
    """Where what is kept can be pointed at: row (of ``kept``), source_id, pid, addr, size_bytes, ts_ns, until_ns."""
    kept = kept.assign(row=np.arange(len(kept)), until_ns=ALWAYS)
    handles = kept.loc[kept["kind"] == "vmm", ["row", "source_id", "pid", "addr", "ts_ns"]]
    handles = handles.rename(columns={"addr": "handle", "ts_ns": "made_ns"}).astype({"handle": "uint64"})
    through = mappings.merge(handles, on=["source_id", "pid", "handle"])
    through = through[through["ts_ns"] >= through["made_ns"]]  # before, the handle was another's
    columns = ["row", "source_id", "pid", "addr", "size_bytes", "ts_ns", "until_ns"]
    return pd.concat([kept.loc[kept["kind"] != "vmm", columns], through[columns]], ignore_index=True)


def _touched(places: pd.DataFrame, kept: pd.DataFrame, arguments: dict[str, Any]) -> pd.DataFrame:
    """One row a (kept allocation, launch): row (of ``kept``), site, launch_id, ts_ns, approximate."""
    asked = pd.DataFrame({name: arguments[name] for name in ("source_id", "pid")})
    where = pd.concat([places[["source_id", "pid"]], asked])
    owner = where.groupby(["source_id", "pid"]).ngroup().to_numpy(np.int64).astype(np.int64)
    start = places["addr"].to_numpy(np.uint64)
    lives = Lives(
        owner[: len(places)],
        start,
        start + np.maximum(places["size_bytes"].to_numpy(np.int64), 1).astype(np.uint64),
        places["ts_ns"].to_numpy(np.int64),
        places["until_ns"].to_numpy(np.int64),
    )
    ts_ns = np.asarray(arguments["ts_ns"], np.int64)
    place = find_lives(lives, owner[len(places) :], np.asarray(arguments["value"], np.uint64), ts_ns)
    hit = place >= 0
    table = pd.DataFrame(
        {
            "row": places["row"].to_numpy(np.int64)[place[hit]],
            "launch_id": np.asarray(arguments["launch_id"], np.int64)[hit],
            "ts_ns": ts_ns[hit],
            "approximate": np.asarray(arguments["approximate"], np.int8)[hit] != 0,
        }
    )
    # A launch with two pointers into one allocation touches it once; exactly, when one of them is an argument.
    table = table.sort_values("approximate", kind="stable").drop_duplicates(["row", "launch_id"])
    return table.assign(site=kept["site"].to_numpy()[table["row"]])


def _kernels(con: duckdb.DuckDBPyConnection, launches: pd.Series) -> dict[int, str]:
    con.register("touching", pd.DataFrame({"id": launches.drop_duplicates()}))
    rows = con.execute("SELECT id, kernel FROM launches JOIN touching USING (id)").fetchall()
    con.unregister("touching")
    return dict(rows)


def graph_launches(con: duckdb.DuckDBPyConnection) -> int:
    """Launches of graphs, whose kernels and arguments are not seen; one inside another counts once."""
    row = con.execute(
        """
        SELECT count(*) FROM calls c LEFT JOIN calls p ON p.source_id = c.source_id AND p.id = c.parent_id
        WHERE c.api LIKE 'cu%GraphLaunch%' AND c.result = 0 AND coalesce(p.api, '') NOT LIKE 'cu%GraphLaunch%'
        """
    ).fetchone()
    return int(row[0]) if row else 0


def _hidden(con: duckdb.DuckDBPyConnection) -> dict[tuple[int, int], int]:
    """(source, process) → time of the last launch whose arguments were not all seen: of graphs, and not all read."""
    rows = con.execute(
        """
        SELECT source_id, pid, max(ts_ns) FROM (
            SELECT source_id, pid, ts_ns FROM launch_arguments WHERE position < 0
            UNION ALL
            SELECT source_id, pid, enter_ns FROM calls WHERE api LIKE 'cu%GraphLaunch%' AND result = 0
        ) GROUP BY ALL
        """
    ).fetchall()
    return {(int(source), int(pid)): int(ts_ns) for source, pid, ts_ns in rows}


def _summary(kept: pd.DataFrame, touched: pd.DataFrame) -> Touches:
    """Of the kept allocations of a site and the launches that touched them."""
    size, last = kept["size_bytes"].to_numpy(np.int64), kept["last_ns"].to_numpy(np.int64)
    made, end = kept["ts_ns"].to_numpy(np.int64), kept["end_ns"].to_numpy(np.int64)
    idle_s = (end - np.maximum(last, made)) / 1e9
    kernels = []
    for kernel, rows in touched.groupby("kernel", sort=True):
        of_kernel = size[np.isin(kept["row"].to_numpy(), rows["row"].to_numpy())]
        exact = bool((~rows["approximate"]).any())
        kernels.append(
            TouchingKernel(
                str(kernel), rows["launch_id"].nunique(), int(rows["ts_ns"].max()), int(of_kernel.sum()), exact
            )
        )
    kernels.sort(key=lambda k: (-k.last_ns, k.kernel))
    longest = float(idle_s.max(initial=0.0))
    return Touches(
        launches=int(touched["launch_id"].nunique()),
        last_touch_ns=int(last.max(initial=0)),
        last_kernel=kernels[0].kernel if kernels else "",
        touched_bytes=int(size[last > 0].sum()),
        live_bytes=int(size.sum()),
        approximate=bool(kept["approximate"].any()),
        idle=tuple((step, int(size[idle_s >= step].sum())) for step in IDLE_STEPS_S if step <= longest),
        kernels=tuple(kernels[:MAX_KERNELS]),
    )

"""A capture as tracks over time: live bytes by layer and process, counters, calls, NVTX ranges, launches.

What a trace viewer shows. Times stay those of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.lives import source_bounds
from leakscope.model.manifest import Source
from leakscope.model.words import KINDS_NOT_ADDED, LAYERS

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

POINTS = 2_000
"""Points in time at which live bytes are told, over the length of a source."""
MAX_SLICES = 500_000
"""Calls, ranges and launches of a capture, of each the first so many: what a viewer still opens."""

Ints = npt.NDArray[np.int64]


@dataclass
class Tracks:
    """Arrow tables, each sorted by time, every row with its source_id; times in ns, end_ns ≥ ts_ns.

    ``bounds``: source_id → (start, end). ``live``: pid, layer, ts_ns, bytes. ``counters``: scope, scope_id, counter,
    ts_ns, value. ``slices``: track (call, range), pid, tid, id, ts_ns, end_ns, name, category, size_bytes, result,
    nested (every slice of its track on this thread lies inside or outside of every other). ``launches``: pid, tid,
    ts_ns, name, grid, block, stream. ``processes``: pid, name. ``left_out``: what was cut off, by name.
    """

    bounds: dict[int, tuple[int, int]]
    live: pa.Table
    counters: pa.Table
    slices: pa.Table
    launches: pa.Table
    processes: pa.Table
    left_out: dict[str, int]


def tracks_of(
    con: duckdb.DuckDBPyConnection,
    sources: Sequence[Source],
    layer: str | None = None,
    pid: int | None = None,
    most: int = MAX_SLICES,
) -> Tracks:
    """The tracks of a capture; ``con`` has a view for each of its tables. ``layer``, ``pid``: only of these.

    Memory counts as live until it is really given back, by the end of its process too: here the course of time is
    told, not what was kept. PID -1 stands for short-lived processes together. Raises duckdb.Error for data that cannot
    be computed with.
    """
    frame = source_bounds(con, sources)
    bounds = {int(s): (int(a), int(b)) for s, a, b in frame.itertuples(index=False)}
    of_pid = "" if pid is None else f"AND pid = {int(pid)}"
    left_out: dict[str, int] = {}
    slices = [
        _slices(con, "call", f"calls WHERE true {of_pid}", "enter_ns, exit_ns, api, 'call', size_bytes, result", most),
        _slices(con, "range", f"marks WHERE true {of_pid}", "start_ns, end_ns, name, domain, 0, 0", most),
    ]
    for name, (found, count) in zip(("calls", "ranges"), slices, strict=True):
        if count > len(found):
            left_out[name] = count - len(found)
    launches: pa.Table = con.sql(
        f"""
        WITH inner_names AS (
            SELECT source_id, parent_id AS id, min(kernel) AS name FROM launches
            WHERE parent_id > 0 AND kernel <> '' GROUP BY ALL
        )
        SELECT source_id, pid, tid, ts_ns, coalesce(nullif(kernel, ''), name, api) AS name, grid, block, stream
        FROM launches LEFT JOIN inner_names USING (source_id, id)
        WHERE parent_id = 0 {of_pid} ORDER BY ts_ns, pid, tid, id LIMIT {int(most)}
        """
    ).to_arrow_table()
    if (more := _count(con, f"launches WHERE parent_id = 0 {of_pid}") - len(launches)) > 0:
        left_out["launches"] = more
    scopes = "" if pid is None else f"AND (scope <> 'process' OR scope_id = '{int(pid)}')"
    counters = con.sql(
        f"""
        SELECT source_id, scope, scope_id, counter, ts_ns, value FROM samples
        WHERE isfinite(value) {scopes} ORDER BY ts_ns, scope, scope_id, counter
        """
    ).to_arrow_table()
    processes = con.sql(
        "SELECT source_id, pid, arg_max(name, start_ns) AS name FROM processes GROUP BY ALL ORDER BY ALL"
    ).to_arrow_table()
    return Tracks(
        bounds, _live(con, frame, layer, of_pid), counters, _joined([s for s, _ in slices], bounds), launches,
        processes, left_out,
    )  # fmt: skip


def _count(con: duckdb.DuckDBPyConnection, what: str) -> int:
    ((count,),) = con.execute(f"SELECT count(*) FROM {what}").fetchall()
    return int(count)


def _live(con: duckdb.DuckDBPyConnection, bounds: pd.DataFrame, layer: str | None, of_pid: str) -> pa.Table:
    """Live bytes at the end of each of POINTS equal times that changed them."""
    con.register("bounds_now", bounds)
    apart = ", ".join(f"'{kind}'" for kind in sorted(KINDS_NOT_ADDED))
    layers = ", ".join(f"'{name}'" for name in LAYERS if layer in (None, name))
    table = con.sql(
        f"""
        WITH steps AS (
            SELECT c.source_id, pid, layer, start_ns, end_ns, (end_ns - start_ns) // {POINTS} + 1 AS step_ns,
                   least(ts_ns, end_ns) - start_ns AS at_ns,
                   CASE WHEN op = 'alloc' THEN bytes ELSE -bytes END AS bytes
            FROM changes c JOIN bounds_now b USING (source_id)
            WHERE kind NOT IN ({apart}) AND layer IN ({layers}) AND (op = 'alloc' OR alloc_ts_ns > 0) {of_pid}
        ), points AS (
            SELECT source_id, pid, layer, least(start_ns + (at_ns // step_ns + 1) * step_ns, end_ns) AS ts_ns,
                   sum(bytes)::BIGINT AS bytes
            FROM steps GROUP BY ALL
        )
        SELECT source_id, pid, layer, ts_ns,
               sum(bytes) OVER (PARTITION BY source_id, pid, layer ORDER BY ts_ns)::BIGINT AS bytes
        FROM points ORDER BY ts_ns, source_id, pid, layer
        """
    ).to_arrow_table()
    con.unregister("bounds_now")
    return table


def _slices(con: duckdb.DuckDBPyConnection, track: str, of: str, columns: str, most: int) -> tuple[pd.DataFrame, int]:
    """(the first ``most`` slices, how many there are)."""
    start = columns.split(",")[0]
    found = con.execute(
        f"SELECT source_id, pid, tid, id, {columns} FROM {of} ORDER BY {start}, id LIMIT {int(most)}"
    ).df()
    names = ["source_id", "pid", "tid", "id", "ts_ns", "end_ns", "name", "category", "size_bytes", "result"]
    found.columns = pd.Index(names)
    return found.assign(track=track), _count(con, of)


def _joined(parts: Sequence[pd.DataFrame], bounds: dict[int, tuple[int, int]]) -> pa.Table:
    import pyarrow as pa

    checked = []
    for part in parts:
        end = part["end_ns"].to_numpy(np.int64)
        last = part["source_id"].map({source: end for source, (_, end) in bounds.items()}).fillna(0).to_numpy(np.int64)
        start = part["ts_ns"].to_numpy(np.int64)
        end = np.maximum(np.where(end == 0, last, end), start)  # still open: until the evidence ends
        thread: Ints = np.asarray(part.groupby(["source_id", "pid", "tid"], sort=False).ngroup(), np.int64)
        checked.append(part.assign(end_ns=end, nested=nested_threads(thread, start, end)))
    whole = pd.concat(checked, ignore_index=True)
    order = np.lexsort((-whole["end_ns"].to_numpy(np.int64), whole["ts_ns"].to_numpy(np.int64)))  # outer ones first
    return pa.Table.from_pandas(whole.iloc[order], preserve_index=False)


def nested_threads(thread: Ints, start_ns: Ints, end_ns: Ints) -> npt.NDArray[np.bool_]:
    """For each slice, whether those of its thread form a tree: any two are disjoint or one contains the other.

    Read as brackets, slices nest when the n-th that opens at a depth is the n-th that closes from it. bool[n].
    """
    count = len(thread)
    end_ns = np.maximum(end_ns, start_ns + 1)
    which = np.concatenate([np.arange(count), np.arange(count)])
    opens = np.repeat([True, False], count)
    at = np.concatenate([start_ns, end_ns])
    tie = np.concatenate([-end_ns, -start_ns])  # outer ones open first, inner ones close first
    order = np.lexsort((np.where(opens, which, -which), tie, opens, at, thread[which]))
    which, opens = which[order], opens[order]
    depth = np.cumsum(np.where(opens, 1, -1))  # a thread's brackets close, so that the next begins at 0
    level = np.where(opens, depth, depth + 1)
    opened = np.flatnonzero(opens)
    closed = np.flatnonzero(~opens)
    opened = opened[np.lexsort((opened, level[opened], thread[which[opened]]))]
    closed = closed[np.lexsort((closed, level[closed], thread[which[closed]]))]
    crossing = np.unique(thread[which[opened]][which[opened] != which[closed]])
    return ~np.isin(thread, crossing)

"""The passes over all changes: sums by (process life, site identity), then curves of what is kept.

Everything after this works on small tables, so that an attribution of 100 million events fits in memory.
Two passes, because sums by time bin of every site of every process are many times larger than those by site
alone, and only the few sites that keep something need their curve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.changes import IDENTITY, objects_unit
from leakscope.correlate.lives import BINS

if TYPE_CHECKING:
    import duckdb

TEXT_IDENTITY = ("layer", "kind", "api", "slab_cache")

# What an event means for what is kept. The codes order the aggregate, nothing more.
ALLOC, CALL, REUSE, CONTEXT, EXIT, UNKNOWN, LATE = range(7)
EVENT_CODE = f"""
    CASE WHEN l.exit_ns > 0 AND (CASE WHEN op = 'alloc' THEN ts_ns ELSE alloc_ts_ns END) >= l.exit_ns
              THEN {LATE}  -- allocated by the exit itself
         WHEN op = 'alloc' THEN {ALLOC}
         WHEN alloc_ts_ns = 0 THEN {UNKNOWN}  -- its allocation was never seen: never subtracted
         WHEN cause IN ('exit', 'exec') OR (l.exit_ns > 0 AND ts_ns >= l.exit_ns) THEN {EXIT}
         WHEN cause = 'reuse' THEN {REUSE}
         WHEN cause = 'context' THEN {CONTEXT}
         ELSE {CALL} END::UTINYINT
"""


def aggregate(
    con: duckdb.DuckDBPyConnection,
    lives: pd.DataFrame,
    layer: str | None = None,
    pid: int | None = None,
) -> pd.DataFrame:
    """Sum ``changes`` by series, a series being one (life, site identity): the first pass.

    Leaves the temporary tables ``events`` (a view: life, bin, event, identity, sizes, source and range of each event
    looked at), ``summed`` and ``series`` behind, and returns ``series``: id, life, the columns of
    :data:`IDENTITY`, alloc/call/reuse/context/exit ``_objects`` and ``_bytes`` (int64), first_ns and
    last_ns of its allocations, smallest_bytes and largest_bytes of one of them, live_variance and exit_variance
    (of bytes estimated from a sample) and stands_for (objects that a recorded one speaks for, 1 without sampling). Rows
    are ordered by identity, so ids are the same in every run.
    """
    con.register("lives_now", lives[["source_id", "pid", "life", "exit_ns", "from_ns", "bin_ns"]])
    con.execute("CREATE OR REPLACE TEMP TABLE lives AS SELECT * FROM lives_now")
    con.unregister("lives_now")
    unit = objects_unit(con)
    conditions = ["true"]
    if layer is not None:
        conditions.append("e.layer = '" + layer.replace("'", "''") + "'")
    if pid is not None:
        conditions.append(f"e.pid = {int(pid)}")
    con.execute(
        f"""
        CREATE OR REPLACE TEMP VIEW events AS
        SELECT l.life, least({BINS - 1}, greatest(0, (ts_ns - l.from_ns) // l.bin_ns))::SMALLINT AS bin,
               {EVENT_CODE} AS event, {", ".join(IDENTITY)}, objects, bytes, first_ns, last_ns, smallest_bytes,
               largest_bytes, source_id, mark_id,
               {"recorded, variance" if unit > 1 else "0 AS recorded, 0 AS variance"}
        FROM changes e JOIN lives l USING (source_id, pid)
        WHERE {" AND ".join(conditions)}
        """
    )
    # Grouping by a 64-bit hash takes half the time of grouping by nine columns, four of them text. Two of a
    # million identities share one with a chance of 3 in 10^8.
    identity = ", ".join(f"any_value({column}) AS {column}" for column in IDENTITY)
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE summed(life, event, {", ".join(IDENTITY)}, objects, bytes, first_ns, last_ns,
                                            smallest, largest, recorded, variance) AS
        SELECT life, event, {identity}, sum(objects)::BIGINT AS objects, sum(bytes)::BIGINT AS bytes,
               min(first_ns) AS first_ns, max(last_ns) AS last_ns,
               min(smallest_bytes) AS smallest, max(largest_bytes) AS largest,
               {"sum(recorded), sum(variance)" if unit > 1 else "0, 0.0"}
        FROM events GROUP BY life, event, hash({", ".join(IDENTITY)})
        """
    )
    names = {"alloc": ALLOC, "call": CALL, "reuse": REUSE, "context": CONTEXT, "exit": EXIT}
    sums = ", ".join(
        f"coalesce(sum({column}) FILTER (event = {code}), 0)::BIGINT AS {name}_{column}"
        for name, code in names.items()
        for column in ("objects", "bytes")
    )
    sums += f"""
        , coalesce(sum(recorded) FILTER (event = {ALLOC}), 0)::BIGINT AS recorded_objects,
        coalesce(sum(CASE WHEN event = {ALLOC} THEN variance WHEN event < {EXIT} THEN -variance ELSE 0 END), 0.0)
            ::DOUBLE AS live_variance, coalesce(sum(variance) FILTER (event = {EXIT}), 0.0)::DOUBLE AS exit_variance"""
    spans = ", ".join(
        f"coalesce({how}({column}) FILTER (event = {ALLOC}), 0) AS {name}"
        for name, how, column in (
            ("first_ns", "min", "first_ns"),
            ("last_ns", "max", "last_ns"),
            ("smallest_bytes", "min", "smallest"),
            ("largest_bytes", "max", "largest"),
        )
    )
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE series AS
        SELECT (row_number() OVER (ORDER BY {", ".join(IDENTITY)}, life) - 1)::INTEGER AS id, *
        FROM (SELECT life, {", ".join(IDENTITY)}, {sums}, {spans}
              FROM summed WHERE event <= {EXIT} GROUP BY ALL)
        """
    )
    series = con.sql("SELECT * FROM series ORDER BY id").df()
    return _in_whole_objects(series.assign(stands_for=1.0), unit) if unit > 1 else series.assign(stands_for=1.0)


def _in_whole_objects(series: pd.DataFrame, unit: int) -> pd.DataFrame:
    """Objects out of ``unit`` parts of one. What is kept is rounded once, so that what cancels leaves nothing."""
    parts = {name: series[f"{name}_objects"].to_numpy(np.float64) for name in ("alloc", "call", "reuse", "context")}
    kept = np.rint((parts["alloc"] - parts["call"] - parts["reuse"] - parts["context"]) / unit)
    for name in ("call", "reuse", "context"):
        series[f"{name}_objects"] = np.rint(parts[name] / unit).astype(np.int64)
        kept += series[f"{name}_objects"]
    series["alloc_objects"] = kept.astype(np.int64)
    series["exit_objects"] = np.rint(series["exit_objects"] / unit).astype(np.int64)
    series["stands_for"] = np.maximum(1.0, parts["alloc"] / unit / np.maximum(series["recorded_objects"], 1))
    return series


def curves(
    con: duckdb.DuckDBPyConnection, ids: npt.NDArray[np.int64], folded: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Kept bytes and objects of the series ``ids`` at the end of each bin: two int64[len(ids), BINS].

    The second pass. ``folded`` says for each id whether its life is the folded one, where the end of a
    process gives back.
    """
    shape = (len(ids), BINS)
    kept_bytes, kept_objects = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    if not len(ids):
        return kept_bytes, kept_objects
    con.register("wanted", pd.DataFrame({"id": ids, "row": np.arange(len(ids), dtype=np.int64), "folded": folded}))
    rows = con.execute(
        f"""
        WITH chosen AS (
            SELECT w.row, w.folded, life, {", ".join(IDENTITY)} FROM series s JOIN wanted w USING (id)
        )
        SELECT c.row, bin, sum(CASE WHEN event = {ALLOC} THEN objects ELSE -objects END)::BIGINT AS objects,
               sum(CASE WHEN event = {ALLOC} THEN bytes ELSE -bytes END)::BIGINT AS bytes
        FROM events JOIN chosen c USING (life, {", ".join(IDENTITY)})
        WHERE event < {EXIT} OR (event = {EXIT} AND c.folded)
        GROUP BY c.row, bin
        """
    ).fetchnumpy()
    con.unregister("wanted")
    kept_bytes[rows["row"], rows["bin"]] = rows["bytes"]
    kept_objects[rows["row"], rows["bin"]] = rows["objects"]
    unit = objects_unit(con)
    return np.cumsum(kept_bytes, axis=1), np.rint(np.cumsum(kept_objects, axis=1) / unit).astype(np.int64)


def unknown_frees(con: duckdb.DuckDBPyConnection) -> list[tuple[str, int]]:
    """(layer, frees whose allocation was never seen) from the last :func:`aggregate`, by layer."""
    rows = con.execute(
        f"SELECT layer, sum(objects)::BIGINT FROM summed WHERE event = {UNKNOWN} GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    return [(str(layer), int(count)) for layer, count in rows]

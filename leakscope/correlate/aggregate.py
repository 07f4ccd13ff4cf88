"""The passes over mem_events: sums by (process life, site identity), then curves of what is kept.

Everything after this works on small tables, so that an attribution of 100 million events fits in memory.
Two passes, because sums by time bin of every site of every process are many times larger than those by site
alone, and only the few sites that keep something need their curve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.lives import BINS

if TYPE_CHECKING:
    import duckdb

IDENTITY = (
    "layer", "kind", "api", "slab_cache", "call_site", "kernel_stack", "user_stack", "python_stack", "weight",
)  # fmt: skip
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
    """Sum mem_events by series, a series being one (life, site identity): the first pass.

    Leaves the temporary tables ``events`` (a view: life, bin, event, identity, sizes, source and range of each event
    looked at), ``summed`` and ``series`` behind, and returns ``series``: id, life, the columns of
    :data:`IDENTITY`, alloc/call/reuse/context/exit ``_objects`` and ``_bytes`` (int64), first_ns and
    last_ns of its allocations, smallest_bytes and largest_bytes of one of them. Rows are ordered by
    identity, so ids are the same in every run. Failed calls (result != 0) and madvise are left out;
    a free of a part of a mapping (result 1) takes bytes and no object.
    """
    con.register("lives_now", lives[["source_id", "pid", "life", "exit_ns", "from_ns", "bin_ns"]])
    con.execute("CREATE OR REPLACE TEMP TABLE lives AS SELECT * FROM lives_now")
    con.unregister("lives_now")
    conditions = ["(e.result = 0 OR e.op = 'free')", "e.op <> 'advise'"]
    if layer is not None:
        conditions.append("e.layer = '" + layer.replace("'", "''") + "'")
    if pid is not None:
        conditions.append(f"e.pid = {int(pid)}")
    con.execute(
        f"""
        CREATE OR REPLACE TEMP VIEW events AS
        SELECT l.life, least({BINS - 1}, greatest(0, (ts_ns - l.from_ns) // l.bin_ns))::SMALLINT AS bin,
               {EVENT_CODE} AS event, {", ".join(IDENTITY)}, ts_ns, size_bytes, source_id, mark_id,
               (result = 0)::INTEGER AS whole
        FROM mem_events e JOIN lives l USING (source_id, pid)
        WHERE {" AND ".join(conditions)}
        """
    )
    # Grouping by a 64-bit hash takes half the time of grouping by nine columns, four of them text. Two of a
    # million identities share one with a chance of 3 in 10^8.
    identity = ", ".join(f"any_value({column}) AS {column}" for column in IDENTITY)
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE summed AS
        SELECT life, event, {identity}, sum(whole)::BIGINT AS objects, sum(size_bytes)::BIGINT AS bytes,
               min(ts_ns) AS first_ns, max(ts_ns) AS last_ns,
               min(size_bytes) AS smallest, max(size_bytes) AS largest
        FROM events GROUP BY life, event, hash({", ".join(IDENTITY)})
        """
    )
    names = {"alloc": ALLOC, "call": CALL, "reuse": REUSE, "context": CONTEXT, "exit": EXIT}
    sums = ", ".join(
        f"coalesce(sum({unit}) FILTER (event = {code}), 0)::BIGINT AS {name}_{unit}"
        for name, code in names.items()
        for unit in ("objects", "bytes")
    )
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
    return con.sql("SELECT * FROM series ORDER BY id").df()


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
        SELECT c.row, bin, sum(CASE WHEN event = {ALLOC} THEN 1 ELSE -whole END)::BIGINT AS objects,
               sum(CASE WHEN event = {ALLOC} THEN size_bytes ELSE -size_bytes END)::BIGINT AS bytes
        FROM events JOIN chosen c USING (life, {", ".join(IDENTITY)})
        WHERE event < {EXIT} OR (event = {EXIT} AND c.folded)
        GROUP BY c.row, bin
        """
    ).fetchnumpy()
    con.unregister("wanted")
    kept_bytes[rows["row"], rows["bin"]] = rows["bytes"]
    kept_objects[rows["row"], rows["bin"]] = rows["objects"]
    return np.cumsum(kept_bytes, axis=1), np.cumsum(kept_objects, axis=1)


def unknown_frees(con: duckdb.DuckDBPyConnection) -> list[tuple[str, int]]:
    """(layer, frees whose allocation was never seen) from the last :func:`aggregate`, by layer."""
    rows = con.execute(
        f"SELECT layer, sum(objects)::BIGINT FROM summed WHERE event = {UNKNOWN} GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    return [(str(layer), int(count)) for layer, count in rows]

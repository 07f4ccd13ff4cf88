"""Process lives: from when to when the evidence about a process reaches, and which processes are judged.

Evidence about a process ends where its exit begins. A process is *judged* on its own when it is a root of
the recording, was alive at the end, or lived at least :data:`MIN_LIFE_SHARE` of the recording. All other
processes of a source are folded into one life, in which what ends with a process counts as given back: fork
storms are no leak, and what outlives such processes still shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from leakscope.correlate.changes import begin
from leakscope.model.manifest import Source

if TYPE_CHECKING:
    import duckdb

BINS = 120
"""Time bins of the life of a process: 96 of them are left after the default warm-up of a fifth."""
MIN_LIFE_SHARE = 0.1
IDLE_SHARE = 0.2
"""A process that does nothing in the first or last fifth (or more) of its life is judged over the rest:
while it sleeps its memory says nothing about growth."""
ACTIVITY_BINS = 1024
FOLDED_PID = -1


def source_bounds(con: duckdb.DuckDBPyConnection, sources: Sequence[Source]) -> pd.DataFrame:
    """One row a source with changes or processes: source_id, start_ns, end_ns. Begins a correlation.

    The manifest's bounds are widened by those of the events, as a recording that was killed has no end.
    """
    begin(con, sources)
    rows = con.execute(
        "SELECT source_id, min(ts_ns), max(ts_ns) FROM changes GROUP BY source_id ORDER BY source_id"
    ).fetchall()
    seen = {source: (first, last) for source, first, last in rows}
    declared = {s.id: (s.start_ns, s.end_ns) for s in sources}
    bounds = []
    for source in sorted(seen.keys() | declared.keys()):
        starts = [b[source][0] for b in (declared, seen) if source in b and b[source][0]]
        ends = [b[source][1] for b in (declared, seen) if source in b and b[source][1]]
        if ends:
            start = min(starts, default=0)
            bounds.append((source, start, max(*ends, start + 1)))
    return pd.DataFrame(bounds, columns=["source_id", "start_ns", "end_ns"]).astype(
        {"source_id": "int16", "start_ns": "int64", "end_ns": "int64"}
    )


def process_lives(con: duckdb.DuckDBPyConnection, bounds: pd.DataFrame) -> pd.DataFrame:
    """One row a process that made changes, and one folded row a source.

    Columns: source_id, pid (FOLDED_PID for the folded one), name, role, exit_ns (0 = alive at the end),
    life (the row that its events count in), judged, from_ns, until_ns (the window of the judgement), idle
    (the window was cut because the process slept), bin_ns. A PID that was used twice counts as one process.
    """
    con.register("source_bounds", bounds)
    table = con.execute(
        f"""
        WITH known AS (
            SELECT source_id, pid, min(start_ns) AS start_ns, arg_max(name, start_ns) AS name,
                   CASE WHEN bool_or(exit_ns = 0) THEN 0 ELSE max(exit_ns) END AS exit_ns,
                   CASE WHEN bool_or(role = 'root') THEN 'root' ELSE min(role) END AS role
            FROM processes GROUP BY source_id, pid
        ), activity AS (
            SELECT e.source_id, e.pid,
                   ((e.ts_ns - b.start_ns) // greatest(1, (b.end_ns - b.start_ns) // {ACTIVITY_BINS})) AS bin,
                   sum(greatest(e.objects, 1)) AS events, min(least(e.ts_ns, e.first_ns)) AS first_ns,
                   max(e.ts_ns) AS last_ns
            FROM changes e JOIN source_bounds b USING (source_id) LEFT JOIN known k USING (source_id, pid)
            WHERE coalesce(k.exit_ns, 0) = 0 OR e.ts_ns < k.exit_ns
            GROUP BY ALL
        ), remaining AS (
            SELECT *, sum(events) OVER later AS left_over,
                   sum(events) OVER (PARTITION BY source_id, pid) AS total
            FROM activity WINDOW later AS (PARTITION BY source_id, pid ORDER BY bin DESC)
        ), windows AS (
            SELECT source_id, pid, min(first_ns) AS first_ns,
                   max(last_ns) FILTER (left_over > least(20, total // 1000)) AS last_ns
            FROM remaining GROUP BY source_id, pid
        ), pids AS (
            SELECT DISTINCT source_id, pid FROM changes WHERE pid <> {FOLDED_PID}
        )
        SELECT source_id, pid, coalesce(name, '') AS name, coalesce(role, '') AS role,
               coalesce(k.start_ns, 0) AS start_ns, coalesce(exit_ns, 0) AS exit_ns,
               w.first_ns, w.last_ns, b.start_ns AS source_start_ns, b.end_ns AS source_end_ns
        FROM pids JOIN source_bounds b USING (source_id) LEFT JOIN known k USING (source_id, pid)
             LEFT JOIN windows w USING (source_id, pid)
        ORDER BY source_id, pid
        """
    ).df()
    con.unregister("source_bounds")
    return _with_windows(table, bounds)


def _with_windows(table: pd.DataFrame, bounds: pd.DataFrame) -> pd.DataFrame:
    start = np.maximum(table["start_ns"].to_numpy(np.int64), table["source_start_ns"].to_numpy(np.int64))
    exited = table["exit_ns"].to_numpy(np.int64)
    end = np.where(exited > 0, exited, table["source_end_ns"]).astype(np.int64)
    end = np.maximum(end, start + 1)
    first = table["first_ns"].fillna(0).to_numpy(np.int64)
    first = np.where(first > 0, first, start)
    last = table["last_ns"].fillna(0).to_numpy(np.int64)
    last = np.where(last > 0, last, end)
    slept = IDLE_SHARE * (end - start)
    lifetime = (table["source_end_ns"] - table["source_start_ns"]).to_numpy(np.int64)
    judged = (table["role"] == "root").to_numpy() | (exited == 0) | (end - start >= MIN_LIFE_SHARE * lifetime)
    lives = pd.DataFrame(
        {
            "source_id": table["source_id"].astype("int16"),
            "pid": table["pid"].astype("int32"),
            "name": table["name"],
            "role": table["role"],
            "exit_ns": exited,
            "judged": judged,
            "from_ns": np.where(first - start > slept, first, start),
            "until_ns": np.where(end - last > slept, np.maximum(last, first + 1), end),
            "idle": (end - last > slept) | (first - start > slept),
        }
    )
    lives["life"] = np.arange(len(lives), dtype=np.int32)
    folded = pd.DataFrame(
        {
            "source_id": bounds["source_id"],
            "pid": np.int32(FOLDED_PID),
            "name": "",
            "role": "",
            "exit_ns": np.int64(0),
            "judged": True,
            "from_ns": bounds["start_ns"],
            "until_ns": bounds["end_ns"],
            "idle": False,
            "life": (len(lives) + np.arange(len(bounds))).astype(np.int32),
        }
    )
    folded_of = dict(zip(folded["source_id"], folded["life"], strict=True))
    short = ~lives["judged"].to_numpy()
    lives.loc[short, "life"] = lives.loc[short, "source_id"].map(folded_of).astype("int32")
    for column in ("from_ns", "until_ns"):
        by_source = dict(zip(folded["source_id"], folded[column], strict=True))
        lives.loc[short, column] = lives.loc[short, "source_id"].map(by_source).astype("int64")
    lives = pd.concat([lives, folded], ignore_index=True) if len(lives) else folded
    lives["bin_ns"] = np.maximum(1, -(-(lives["until_ns"] - lives["from_ns"]) // BINS)).astype("int64")
    return lives

"""One axis of time for all recordings of a capture, and the processes on it.

A capture has several recordings when its recorder was stopped and started again: the processes may be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from leakscope.detect.recorded import Life, Readings, readings_of
from leakscope.model.manifest import Source

if TYPE_CHECKING:
    import duckdb

SAME_START_S = 1.0
"""Starts of one process as two recordings tell them: /proc counts in hundredths of a second."""


def zeros_ns(sources: Sequence[Source]) -> dict[int, int]:
    """By source: the time of its clock at which the first recording began.

    Recordings of one boot share CLOCK_MONOTONIC; those of another boot are placed by their anchors to UTC.
    """
    if not sources:
        return {}
    first = sources[0]
    zeros = {}
    for source in sources:
        zeros[source.id] = first.start_ns
        if source.boot_id != first.boot_id and source.anchors and first.anchors:
            ours, theirs = source.anchors[0], first.anchors[0]
            zero_utc = first.start_ns + theirs.realtime_ns - theirs.monotonic_ns
            zeros[source.id] = zero_utc - ours.realtime_ns + ours.monotonic_ns
    return zeros


def recorded_readings(con: duckdb.DuckDBPyConnection, sources: Sequence[Source]) -> Readings:
    """All samples of the recordings ``sources``, their columns as they are in the table."""
    zeros = zeros_ns(sources)
    table = con.execute(
        "SELECT source_id, ts_ns, scope, scope_id, counter, value FROM samples WHERE list_contains(?, source_id)",
        [list(zeros)],
    ).fetchnumpy()
    rows: dict[str, npt.NDArray[np.generic]] = {}
    texts: dict[str, list[str]] = {}
    for name in ("scope", "scope_id", "counter"):
        found, codes = np.unique(np.asarray(table[name], dtype=object).astype(str), return_inverse=True)
        rows[name], texts[name] = codes, found.tolist()
    rows |= {name: np.asarray(table[name]) for name in ("source_id", "ts_ns", "value")}
    return readings_of(rows, zeros, texts)


def recorded_lives(con: duckdb.DuckDBPyConnection, sources: Sequence[Source]) -> list[Life]:
    """The processes of all recordings: one that two of them saw stands once."""
    zeros = zeros_ns(sources)
    table = con.execute(
        "SELECT source_id, pid, start_ns, exit_ns, name, role FROM processes WHERE list_contains(?, source_id)"
        " ORDER BY source_id, pid, start_ns",
        [list(zeros)],
    ).fetchall()
    ends = {s.id: (s.end_ns - zeros[s.id]) / 1e9 if s.end_ns else float("inf") for s in sources}
    lives: dict[tuple[int, int], Life] = {}
    alive_until: dict[tuple[int, int], float] = {}
    for source, pid, start_ns, exit_ns, name, role in table:
        start = (start_ns - zeros[source]) / 1e9 if start_ns else float("-inf")
        key = next(
            (k for k, life in lives.items() if k[0] == pid and abs(life.start_s - start) < SAME_START_S),
            (pid, len(lives)),
        )
        end = (exit_ns - zeros[source]) / 1e9 if exit_ns else float("inf")
        lives[key] = Life(pid, name, start, end, role == "root")
        alive_until[key] = end if exit_ns else ends[source]
    latest = max(ends.values(), default=float("inf"))
    # Whoever a later recording did not see any more ended in between, at the latest when that began.
    made = [
        life if alive_until[key] >= latest else Life(life.pid, life.name, life.start_s, alive_until[key], life.root)
        for key, life in lives.items()
    ]
    known = {life.pid for life in made}
    for source in sources:  # one that was killed wrote no processes; it knows whom it was to record
        pids = [*source.scope.get("pids", ()), source.scope.get("command_pid", 0)]
        made += [Life(pid) for pid in dict.fromkeys(pids) if isinstance(pid, int) and pid and pid not in known]
        known.update(p for p in pids if isinstance(p, int))
    return made

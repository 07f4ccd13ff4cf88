"""One axis of time for all recordings of a capture, and the processes on it.

A capture has several recordings when its recorder was stopped and started again: the processes may be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from leakscope.detect.recorded import (
    BRIEF_PID,
    MIN_READINGS,
    SAME_START_S,
    Life,
    Readings,
    Subject,
    readings_of,
    subjects,
)
from leakscope.detect.series.judge import MIN_SPAN_S
from leakscope.model.manifest import Source

if TYPE_CHECKING:
    import duckdb

MANY_BRIEF = 200
"""Up to so many processes of few readings are kept apart all the same."""


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


@dataclass(frozen=True)
class Recorded:
    """What the samplers of a capture's recordings read: from the first reading to the last, and whose it is; no
    subjects where the time is shorter than MIN_SPAN_S."""

    span_s: float
    subjects: list[Subject]


def read_recorded(con: duckdb.DuckDBPyConnection, sources: Sequence[Source]) -> Recorded | None:
    """The counters of the recordings among ``sources``; None where there are none."""
    recordings = [source for source in sources if source.kind == "recording"]
    zeros = zeros_ns(recordings)
    spans = con.execute(
        "SELECT source_id, min(ts_ns), max(ts_ns) FROM samples WHERE list_contains(?, source_id) GROUP BY ALL",
        [list(zeros)],
    ).fetchall()
    if not spans:
        return None
    first, last = min(low - zeros[one] for one, low, _ in spans), max(high - zeros[one] for one, _, high in spans)
    span_s = (last - first) / 1e9
    if span_s < MIN_SPAN_S:
        return Recorded(span_s, [])
    return Recorded(span_s, recorded_subjects(con, recordings))


def recorded_subjects(con: duckdb.DuckDBPyConnection, recordings: Sequence[Source]) -> list[Subject]:
    """Whose counters the samplers of these recordings read, however long."""
    scope = recordings[-1].scope
    return subjects(
        recorded_readings(con, recordings),
        recorded_lives(con, recordings),
        everyone=bool(scope.get("host_wide")),
        cgroup=str(scope.get("cgroup", "")),
    )


def recorded_readings(con: duckdb.DuckDBPyConnection, sources: Sequence[Source]) -> Readings:
    """All samples of the recordings ``sources``.

    Where there are many processes that were read fewer than MIN_READINGS times, they are summed at each time as
    BRIEF_PID: a service may have begun a million of them.
    """
    zeros = zeros_ns(sources)
    table = con.execute(
        f"""
        WITH recorded AS (SELECT * FROM samples WHERE list_contains($sources, source_id)),
        brief AS (
            SELECT scope_id FROM recorded WHERE scope = 'process'
            GROUP BY scope_id HAVING count(DISTINCT ts_ns) < {MIN_READINGS}
        ), many AS (SELECT count(*) > {MANY_BRIEF} AS so FROM brief)
        SELECT source_id, ts_ns, scope, scope_id, counter, value FROM recorded
        WHERE scope <> 'process' OR NOT (SELECT so FROM many) OR scope_id NOT IN (SELECT scope_id FROM brief)
        UNION ALL
        SELECT source_id, ts_ns, 'process', '{BRIEF_PID}', counter, sum(value) FROM recorded
        WHERE scope = 'process' AND (SELECT so FROM many) AND scope_id IN (SELECT scope_id FROM brief)
        GROUP BY ALL
        """,
        {"sources": list(zeros)},
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

"""A trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

The format: "Trace Event Format" (Chrome's project), as Perfetto's JSON importer reads it: ``X`` complete slices, which
must nest on a thread, ``b``/``e`` asynchronous ones for those that do not, ``C`` counters, ``i`` instants, ``M``
names. Times are in µs; nanoseconds stand behind the point. NVTX ranges have tracks of their own next to their
thread's, as they may begin and end inside of calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leakscope.correlate.tracks import Tracks
from leakscope.report.text import printable

if TYPE_CHECKING:
    import duckdb

BATCH = 10_000
SOURCE_STRIDE = 10_000_000
"""PIDs of the n-th source are shown n times this higher: each has processes of its own. PID_MAX_LIMIT is 2^22."""
RANGES = 5_000_000
"""Added to a TID for the track of its NVTX ranges."""
NO_PID = 9_999_999
FOLDED = 9_999_998
SCOPES = 9_000_000
"""First of the PIDs that stand for control groups, devices and the host."""


@dataclass
class Placed:
    """Tracks of one capture; ``offset_ns`` by source_id, added to its times. Sources without one are not drawn."""

    tracks: Tracks
    offset_ns: dict[int, int]
    name: str


def perfetto(placed: Sequence[Placed], notes: Sequence[str] = ()) -> Iterator[bytes]:
    """The file in pieces. Time zero is the earliest start of a source that is drawn."""
    starts = [
        one.tracks.bounds[source][0] + offset
        for one in placed
        for source, offset in one.offset_ns.items()
        if source in one.tracks.bounds
    ]
    zero_ns = min(starts, default=0)
    other = {"zero_ns": zero_ns, "notes": [printable(note) for note in notes]}
    yield f'{{"displayTimeUnit":"ns","otherData":{json.dumps(other)},"traceEvents":[\n'.encode()
    lead = ""
    number = 0
    for one in placed:
        for source, offset in one.offset_ns.items():
            for lines in _events(one, source, offset - zero_ns, number):
                yield (lead + ",\n".join(lines)).encode()
                lead = ",\n"
            number += 1
    yield b"\n]}\n"


def _events(one: Placed, source: int, offset_ns: int, number: int) -> Iterator[list[str]]:
    """Lines of events, a list a batch; they are made by SQL, as there may be millions."""
    import duckdb

    con = duckdb.connect(":memory:")
    try:
        con.execute("SET threads = 1")
        for name in ("live", "counters", "slices", "launches", "processes"):
            con.register(f"all_{name}", getattr(one.tracks, name))
            con.execute(f"CREATE VIEW {name} AS SELECT * FROM all_{name} WHERE source_id = {int(source)}")
        _macros(con, offset_ns, number)
        for query in (*_NAMES, *_EVENTS):
            cursor = con.execute(query, {"evidence": printable(one.name)} if "$evidence" in query else None)
            while rows := cursor.fetchmany(BATCH):
                yield [row[0] for row in rows]
    finally:
        con.close()


def _macros(con: duckdb.DuckDBPyConnection, offset_ns: int, number: int) -> None:
    """us: JSON number of a time. quoted: JSON of a text. shown, thread: PIDs and TIDs of the trace. place: (scope,
    scope_id) → PID.

    Perfetto refuses a whole file for one raw control character in a text, DEL included (ReadOneJsonString in its
    json_trace_tokenizer.cc), which JSON allows and DuckDB leaves as it is.
    """
    base = number * SOURCE_STRIDE
    con.execute(
        f"""
        CREATE MACRO signed_us(ns) AS
            format('{{}}{{}}.{{:03d}}', CASE WHEN ns < 0 THEN '-' ELSE '' END, abs(ns) // 1000, abs(ns) % 1000);
        CREATE MACRO quoted(value) AS replace(to_json(value::VARCHAR)::VARCHAR, chr(127), '\\u007f');
        CREATE MACRO us(ns) AS signed_us((ns + {int(offset_ns)})::BIGINT);
        CREATE MACRO shown(pid) AS
            ({base} + CASE WHEN pid = 0 THEN {NO_PID} WHEN pid < 0 THEN {FOLDED} ELSE pid END)::BIGINT;
        CREATE MACRO thread(tid, track) AS (shown(tid) + CASE WHEN track = 'range' THEN {RANGES} ELSE 0 END)::BIGINT;
        CREATE TABLE places AS
        SELECT scope, scope_id, coalesce(CASE WHEN scope = 'process' THEN try_cast(scope_id AS BIGINT) END,
                                         {SCOPES} + dense_rank() OVER (ORDER BY scope, scope_id)) AS pid
        FROM (SELECT DISTINCT scope::VARCHAR AS scope, scope_id::VARCHAR AS scope_id FROM counters);
        CREATE TABLE found AS
        SELECT DISTINCT pid::BIGINT AS pid FROM (SELECT pid FROM live UNION ALL SELECT pid FROM slices
            UNION ALL SELECT pid FROM launches UNION ALL SELECT pid FROM places WHERE scope = 'process')
        """
    )


_NAMES = (
    """
    SELECT format('{{"ph":"M","name":"process_name","pid":{},"args":{{"name":{}}}}}', shown(pid),
                  quoted(CASE WHEN pid = 0 THEN 'process not known' WHEN pid < 0 THEN 'short-lived processes'
                               ELSE coalesce(nullif(name, ''), 'process ' || pid) END || $evidence))
    FROM found LEFT JOIN processes USING (pid) ORDER BY pid
    """,
    f"""
    SELECT format('{{{{"ph":"M","name":"process_name","pid":{{}},"args":{{{{"name":{{}}}}}}}}}}', shown(pid),
                  quoted(trim(scope || ' ' || scope_id) || $evidence))
    FROM places WHERE scope <> 'process' OR pid >= {SCOPES} ORDER BY pid
    """,
    """
    SELECT format('{{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":{}}}}}', shown(pid),
                  thread(tid, track),
                  quoted(CASE WHEN track = 'range' THEN 'NVTX of thread ' ELSE 'thread ' END || tid))
    FROM (SELECT pid, tid, track FROM slices WHERE nested UNION SELECT pid, tid, 'call' FROM launches) ORDER BY ALL
    """,
)
_EVENTS = (
    """
    SELECT format('{{"ph":"C","name":"live bytes","pid":{},"ts":{},"args":{{{}:{}}}}}', shown(pid), us(ts_ns),
                  quoted(layer), bytes)
    FROM live
    """,
    """
    SELECT format('{{"ph":"C","name":{},"pid":{},"ts":{},"args":{{"value":{}}}}}', quoted(counter), shown(p.pid),
                  us(ts_ns), to_json(value))
    FROM counters c JOIN places p ON c.scope = p.scope AND c.scope_id = p.scope_id ORDER BY ts_ns, p.pid, counter
    """,
    """
    SELECT format('{{"ph":"X","name":{},"cat":{},"pid":{},"tid":{},"ts":{},"dur":{}{}}}', quoted(name),
                  quoted(coalesce(nullif(category, ''), track)), shown(pid), thread(tid, track), us(ts_ns),
                  signed_us(end_ns - ts_ns),
                  CASE WHEN track = 'call' THEN format(',"args":{{"size_bytes":{},"result":{}}}', size_bytes, result)
                       ELSE '' END)
    FROM slices WHERE nested
    """,
    """
    SELECT format('{{"ph":"{}","name":{},"cat":{},"id":"{}-{}","pid":{},"tid":{},"ts":{}}}', ph, quoted(name),
                  quoted(coalesce(nullif(category, ''), track)), track, id, shown(pid), thread(tid, track), us(at_ns))
    FROM (SELECT *, 'b' AS ph, ts_ns AS at_ns FROM slices WHERE NOT nested
          UNION ALL SELECT *, 'e', end_ns FROM slices WHERE NOT nested) ORDER BY at_ns, ph DESC, id
    """,
    """
    SELECT format('{{"ph":"i","s":"t","name":{},"cat":"launch","pid":{},"tid":{},"ts":{},"args":{}}}', quoted(name),
                  shown(pid), thread(tid, 'call'), us(ts_ns),
                  to_json({'grid': grid, 'block': block, 'stream': format('{:#x}', stream)}))
    FROM launches
    """,
)

"""The narrow waist of the correlation: every allocation and end of an allocation, whichever way it was recorded.

The view ``changes`` has a row a change: source_id, pid, ts_ns, op (alloc, free), cause, alloc_ts_ns, the site's
identity, objects, bytes, first_ns and last_ns (of the allocations of the row), smallest_bytes and largest_bytes. Of a
stream that is an event, its objects 1, or 0 for a part of a mapping; of a census all that changed at a site between two
readouts, at the time of the latter.

Where a source was sampled by bytes, objects and bytes are estimates: a sampled allocation of s bytes stands for
1 / (1 - exp(-s / mean)) of them (Horvitz and Thompson 1952). Objects are in thousandths then (:func:`objects_unit`),
so that sums of what was allocated and what was freed cancel exactly; ``variance`` is that of the bytes and ``recorded``
the number of objects that the row is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from leakscope.model.manifest import Source

if TYPE_CHECKING:
    import duckdb

IDENTITY = (
    "layer", "kind", "api", "slab_cache", "call_site", "kernel_stack", "user_stack", "python_stack", "weight",
)  # fmt: skip
SAMPLED_UNIT = 1000
OF_SAMPLED_LAYER = "(layer = 'kernel' OR kind = 'heap')"
"""What --sample-bytes applies to; everything else is recorded whole."""

_IDENTITY = ", ".join(IDENTITY)
_EVENTS = f"""
    SELECT source_id, pid, ts_ns, op, cause, alloc_ts_ns, {_IDENTITY}, (result = 0)::BIGINT AS objects,
           size_bytes AS bytes, ts_ns AS first_ns, ts_ns AS last_ns, size_bytes AS smallest_bytes,
           size_bytes AS largest_bytes, mark_id
    FROM mem_events WHERE (result = 0 OR op = 'free') AND op <> 'advise'
"""
CENSUS_KEPT = """
    SELECT s.*, allocated_objects, allocated_objects - freed_objects - reused_objects - context_objects AS live_objects
    FROM census_sites s
         JOIN (SELECT source_id, site, max(allocated_objects) AS allocated_objects, max(freed_objects) AS freed_objects,
                      max(reused_objects) AS reused_objects, max(context_objects) AS context_objects
               FROM census_totals GROUP BY source_id, site) t ON t.source_id = s.source_id AND t.site = s.id
"""
"""Sites of a census with what they allocated and kept in all (until the exit of their process)."""
_OF_CENSUS = {  # column of census_totals → op, cause
    "allocated": ("alloc", "call"),
    "freed": ("free", "call"),
    "reused": ("free", "reuse"),
    "context": ("free", "context"),
    "exit": ("free", "exit"),
}


def begin(con: duckdb.DuckDBPyConnection, sources: Sequence[Source]) -> None:
    """Make the view ``changes`` from the tables of a capture, and the temporary table ``sampling`` beside it."""
    means = {source.id: _sample_bytes(source) for source in sources}
    sampled = pd.DataFrame(
        [(source, mean) for source, mean in means.items() if mean], columns=["source_id", "mean_bytes"]
    ).astype({"source_id": "int16", "mean_bytes": "float64"})
    con.register("sampled_sources", sampled)
    con.execute("CREATE OR REPLACE TEMP TABLE sampling AS SELECT * FROM sampled_sources")
    con.unregister("sampled_sources")
    changes = _EVENTS
    if con.execute("SELECT 1 FROM census_totals LIMIT 1").fetchall():
        con.execute(f"CREATE OR REPLACE TEMP TABLE census_changes AS {_census_changes()}")
        changes = f"{_EVENTS} UNION ALL BY NAME SELECT * FROM census_changes"
    if len(sampled):
        changes = _estimated(changes)
    con.execute(f"CREATE OR REPLACE TEMP VIEW changes AS {changes}")


def _sample_bytes(source: Source) -> float:
    value = source.options.get("sample_bytes", 0)
    return float(value) if isinstance(value, (int, float)) and value > 0 else 0.0


def objects_unit(con: duckdb.DuckDBPyConnection) -> int:
    """What one object counts in ``changes``: 1, or :data:`SAMPLED_UNIT` where a source was sampled by bytes."""
    rows = con.execute("SELECT 1 FROM sampling LIMIT 1").fetchall()
    return SAMPLED_UNIT if rows else 1


def _census_changes() -> str:
    """Differences between readouts. What was before the exit of a process is put before it, whenever it was read."""
    columns = [f"{event}_{unit}" for event in _OF_CENSUS for unit in ("objects", "bytes")]
    steps = ", ".join(f"{name} - coalesce(lag({name}) OVER readouts, 0) AS {name}" for name in columns)
    parts = " UNION ALL ".join(
        f"""
        SELECT source_id, site, '{op}' AS op, '{cause}' AS cause, {event}_objects AS objects, {event}_bytes AS bytes,
               ts_ns, smallest_bytes, largest_bytes, {"first_ns, last_ns" if op == "alloc" else "ts_ns, ts_ns"}
        FROM steps WHERE {event}_objects <> 0 OR {event}_bytes <> 0
        """
        for event, (op, cause) in _OF_CENSUS.items()
    )
    return f"""
        WITH steps AS (
            SELECT source_id, site, ts_ns, first_ns, last_ns, smallest_bytes, largest_bytes, {steps}
            FROM census_totals WINDOW readouts AS (PARTITION BY source_id, site ORDER BY ts_ns)
        ), parts AS ({parts}), ends AS (
            SELECT source_id, pid, CASE WHEN bool_or(exit_ns = 0) THEN 0 ELSE max(exit_ns) END AS exit_ns
            FROM processes GROUP BY source_id, pid
        )
        SELECT p.source_id, s.pid, op, cause, (op = 'free')::BIGINT AS alloc_ts_ns, {_IDENTITY}, objects, bytes,
               CASE WHEN coalesce(exit_ns, 0) > 0 AND cause <> 'exit' THEN least(ts_ns, exit_ns - 1) ELSE ts_ns
                    END AS ts_ns, p.first_ns, p.last_ns, smallest_bytes, largest_bytes,
               0::BIGINT AS mark_id  -- a readout counts allocations of many ranges together
        FROM parts p JOIN census_sites s ON s.source_id = p.source_id AND s.id = p.site
             LEFT JOIN ends e ON e.source_id = s.source_id AND e.pid = s.pid
    """


def _estimated(changes: str) -> str:
    """``changes`` with estimates in place of what was recorded."""
    return f"""
        WITH scaled AS (
            SELECT c.*, CASE WHEN mean_bytes > 0 AND objects > 0 AND bytes > 0 AND {OF_SAMPLED_LAYER}
                             THEN 1 / (1 - exp(-(bytes / objects) / mean_bytes)) ELSE 1 END AS each
            FROM ({changes}) c LEFT JOIN sampling USING (source_id)
        )
        SELECT * EXCLUDE (objects, bytes, each), objects AS recorded,
               objects * round({SAMPLED_UNIT} * each)::BIGINT AS objects,
               CASE WHEN each > 1 THEN objects * round(bytes / objects * each)::BIGINT ELSE bytes END AS bytes,
               CASE WHEN each > 1 THEN bytes * (bytes / objects) * each * (each - 1) ELSE 0 END AS variance
        FROM scaled
    """

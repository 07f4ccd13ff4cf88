"""Verdicts on evidence without a course: what the memory of a snapshot is, what a pool holds at the end.

A snapshot has no time, so it can prove no leak. It can say that memory is held in free pieces, in a cache, or waits
to be freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from leakscope.model.manifest import Source
from leakscope.model.results import Culprit, Verdict

if TYPE_CHECKING:
    import duckdb

MATERIAL_SHARE = 0.1
"""What lies free or waiting must be this share of what is reserved."""
MAIN_SHARE = 0.5
EMPTY_SHARE = 0.1
PEAK_SHARE = 0.9
UNLIMITED = 2.0**62


def judge_states(con: duckdb.DuckDBPyConnection, sources: Iterable[Source]) -> list[Verdict]:
    """What snapshots and pools say, one verdict a source at most."""
    found = []
    for source in sources:
        verdict = _snapshot(con, source) if source.kind == "torch_snapshot" else None
        verdict = verdict or (_pool(con, source) if source.kind == "nsys" else None)
        if verdict:
            found.append(verdict)
    return found


def _snapshot(con: duckdb.DuckDBPyConnection, source: Source) -> Verdict | None:
    """Free blocks of segments that are partly in use, of wholly free segments, of private pools; blocks that wait."""
    row = con.execute(
        """
        WITH blocks AS (
            SELECT *, sum(CASE WHEN state = 'inactive' THEN 0 ELSE size_bytes END)
                      OVER (PARTITION BY device, segment_addr) AS in_use
            FROM segments WHERE source_id = ?
        )
        SELECT sum(size_bytes)::BIGINT,
               sum(size_bytes) FILTER (state = 'active_allocated')::BIGINT,
               sum(size_bytes) FILTER (state = 'inactive' AND in_use > 0)::BIGINT,
               sum(size_bytes) FILTER (state = 'inactive' AND in_use = 0)::BIGINT,
               sum(size_bytes) FILTER (state NOT IN ('inactive', 'active_allocated'))::BIGINT,
               max(size_bytes) FILTER (state = 'inactive')::BIGINT
        FROM blocks
        """,
        [source.id],
    ).fetchone()
    reserved, active, pieces, cached, waiting, largest = (int(value or 0) for value in row or (0,) * 6)
    if not reserved:
        return None
    free = pieces + cached
    facts = (
        f"{active:,} of {reserved:,} reserved bytes are in use, {pieces:,} are free pieces of segments in use, "
        f"{cached:,} whole free segments",
        f"the largest free block is {largest:,} bytes",
    )
    if waiting >= max(MATERIAL_SHARE * reserved, free):
        return _not_leak("pending_free", "blocks that wait for work on another stream", facts)
    if free < MATERIAL_SHARE * reserved:
        return None
    if pieces >= MAIN_SHARE * free:
        return _not_leak("fragmentation", "inactive blocks inside partly used segments", facts)
    return _not_leak("pool_retention", "free segments that the allocator keeps", facts)


def _pool(con: duckdb.DuckDBPyConnection, source: Source) -> Verdict | None:
    """A stream-ordered pool whose use returned to nothing while its size stayed at the high-water mark."""
    rows = con.execute(
        """
        SELECT counter::VARCHAR, max(value), last(value ORDER BY ts_ns) FROM samples
        WHERE source_id = ? AND counter IN ('gpu_pool_reserved', 'gpu_pool_used', 'gpu_pool_release_threshold')
        GROUP BY counter
        """,
        [source.id],
    ).fetchall()
    figures = {name: (float(peak), float(end)) for name, peak, end in rows}
    reserved, used = figures.get("gpu_pool_reserved"), figures.get("gpu_pool_used")
    if not reserved or not used or reserved[0] <= 0:
        return None
    if used[1] > EMPTY_SHARE * used[0] or reserved[1] < PEAK_SHARE * reserved[0]:
        return None
    threshold = figures.get("gpu_pool_release_threshold", (0.0, 0.0))[1]
    facts = [
        f"the pool holds {reserved[1]:,.0f} bytes at the end, its high-water mark; {used[1]:,.0f} of them are in use",
        f"its use peaked at {used[0]:,.0f} bytes",
    ]
    if threshold >= UNLIMITED:
        facts.append("the release threshold is unlimited: retention is configured")
    what = "memory pool, unlimited release threshold" if threshold >= UNLIMITED else "memory pool"
    return _not_leak("pool_retention", what, facts, "gpu_pool_reserved_bytes")


def _not_leak(kind: str, what: str, reasons: Iterable[str], counter: str = "") -> Verdict:
    return Verdict("not_leak", kind, "gpu", 0.85, Culprit(object=what, counter=counter), reasons=tuple(reasons))

"""Rule 1 of the joins: a call inside a call, and kernel allocations inside a call, of the same thread.

A GPU allocation names its outermost call; inner calls name their parent. A kernel event belongs to the
outermost call of its thread that was open at the time: outermost calls of a thread never overlap, so one ASOF
join finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

if TYPE_CHECKING:
    import duckdb

MAX_DEPTH = 4


class Nesting(NamedTuple):
    """Counts of what lies inside what.

    ``calls``: site, depth (0 = outermost), api, calls. ``below``: site (of the caller), kernel_stack,
    slab_cache, kind, allocations, live_objects, live_bytes of kernel memory allocated inside the site's
    calls. ``above``: the identity of kernel allocations (kind, slab_cache as recorded, kernel_stack,
    user_stack, python_stack), api of the call around them, allocations.
    """

    calls: pd.DataFrame
    below: pd.DataFrame
    above: pd.DataFrame


_IDENTITY = "layer, kind, api, kernel_stack, user_stack, python_stack"


def nesting(con: duckdb.DuckDBPyConnection, callers: pd.DataFrame, kernel: pd.DataFrame) -> Nesting:
    """Look inside the calls of ``callers`` (site, layer, kind, api, kernel_stack, user_stack, python_stack).

    ``kernel``: a column call_site, the kernel call sites whose allocations are looked up; those with
    unsampled stacks (weight 0) count in ``below`` too.
    """
    empty = Nesting(
        pd.DataFrame(columns=["site", "depth", "api", "calls"]),
        pd.DataFrame(
            columns=[
                "site",
                "kernel_stack",
                "slab_cache",
                "kind",
                "allocations",
                "live_objects",
                "live_bytes",
            ]
        ),
        pd.DataFrame(
            columns=["kind", "slab_cache", "kernel_stack", "user_stack", "python_stack", "api", "allocations"]
        ),
    )
    if not con.execute("SELECT 1 FROM calls LIMIT 1").fetchall():
        return empty
    con.register("callers", callers)
    con.register("kernel_sites", kernel[["call_site"]].drop_duplicates())
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE owned AS
        SELECT site, source_id, call_id FROM mem_events JOIN callers USING ({_IDENTITY})
        WHERE op = 'alloc' AND call_id > 0 AND result = 0
        """
    )
    calls = con.execute(
        f"""
        WITH RECURSIVE inside AS (
            SELECT site, source_id, c.id, 0 AS depth, c.api
            FROM owned JOIN calls c USING (source_id) WHERE c.id = call_id
            UNION ALL
            SELECT site, i.source_id, c.id, depth + 1, c.api
            FROM inside i JOIN calls c ON c.source_id = i.source_id AND c.parent_id = i.id
            WHERE depth < {MAX_DEPTH}
        )
        SELECT site, depth, api, count(*) AS calls
        FROM inside GROUP BY ALL ORDER BY site, depth, calls DESC, api
        """
    ).df()
    con.execute(
        """
        CREATE OR REPLACE TEMP TABLE nested AS
        WITH outermost AS (
            SELECT source_id, tid, enter_ns, exit_ns, id, api FROM calls WHERE parent_id = 0
        ), allocations AS (
            SELECT source_id, tid, ts_ns, kind, slab_cache, kernel_stack, user_stack, python_stack, addr,
            size_bytes FROM mem_events WHERE layer = 'kernel' AND op = 'alloc' AND call_site IN (SELECT
            call_site FROM kernel_sites)
                  AND tid IN (SELECT tid FROM outermost)
        )
        SELECT a.*, c.id AS call_id, c.api
        FROM allocations a ASOF JOIN outermost c
             ON a.source_id = c.source_id AND a.tid = c.tid AND a.ts_ns >= c.enter_ns
        WHERE a.ts_ns <= c.exit_ns
        """
    )
    below = con.execute(
        """
        WITH freed AS (
            SELECT source_id, addr, alloc_ts_ns FROM mem_events
            WHERE layer = 'kernel' AND op = 'free' AND alloc_ts_ns > 0 AND cause NOT IN ('exit', 'exec')
                  AND call_site IN (SELECT call_site FROM kernel_sites)
        ), placed AS (
            SELECT DISTINCT site, source_id, call_id FROM owned
        )
        SELECT site, kernel_stack, slab_cache, kind, count(*) AS allocations,
               count(*) FILTER (f.addr IS NULL) AS live_objects,
               coalesce(sum(size_bytes) FILTER (f.addr IS NULL), 0)::BIGINT AS live_bytes
        FROM nested n JOIN placed USING (source_id, call_id)
             LEFT JOIN freed f ON f.source_id = n.source_id AND f.addr = n.addr AND f.alloc_ts_ns = n.ts_ns
        GROUP BY site, kernel_stack, slab_cache, kind
        ORDER BY site, live_bytes DESC, allocations DESC, slab_cache, kernel_stack
        """
    ).df()
    above = con.execute(
        """
        SELECT kind, slab_cache, kernel_stack, user_stack, python_stack, api, count(*) AS allocations
        FROM nested GROUP BY ALL ORDER BY ALL
        """
    ).df()
    con.unregister("callers")
    con.unregister("kernel_sites")
    return Nesting(calls, below, above)

"""Rule 1 of the joins: a call inside a call, and kernel allocations inside a call, of the same thread.

A GPU allocation names its outermost call; inner calls name their parent. A kernel event belongs to the
outermost call of its thread that was open at the time: outermost calls of a thread never overlap, so one ASOF
join finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from leakscope.correlate.changes import CENSUS_KEPT

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
    con.execute(f"CREATE OR REPLACE TEMP TABLE census_kept AS {CENSUS_KEPT}")
    con.register("callers", callers)
    con.register("kernel_sites", kernel[["call_site"]].drop_duplicates())
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE owned AS
        SELECT site, source_id, call_id, 1 AS n FROM mem_events JOIN callers USING ({_IDENTITY})
        WHERE op = 'alloc' AND call_id > 0 AND result = 0
        UNION ALL  -- one call of each site stands for all of them
        SELECT c.site, s.source_id, call_id, allocated_objects FROM callers c JOIN census_kept s USING ({_IDENTITY})
        WHERE call_id > 0
        """
    )
    calls = con.execute(
        f"""
        WITH RECURSIVE inside AS (
            SELECT site, source_id, c.id, 0 AS depth, c.api, n
            FROM owned JOIN calls c USING (source_id) WHERE c.id = call_id
            UNION ALL
            SELECT site, i.source_id, c.id, depth + 1, c.api, n
            FROM inside i JOIN calls c ON c.source_id = i.source_id AND c.parent_id = i.id
            WHERE depth < {MAX_DEPTH}
        )
        SELECT site, depth, api, sum(n)::BIGINT AS calls
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
        ), parts AS (
            SELECT site, kernel_stack, slab_cache, kind, 1 AS allocated, (f.addr IS NULL)::INTEGER AS live, size_bytes
            FROM nested n JOIN placed USING (source_id, call_id)
                 LEFT JOIN freed f ON f.source_id = n.source_id AND f.addr = n.addr AND f.alloc_ts_ns = n.ts_ns
            UNION ALL
            SELECT c.site, s.kernel_stack, s.slab_cache, s.kind, allocated_objects, live_objects, size_bytes
            FROM census_kept s JOIN (SELECT DISTINCT site, api, user_stack, python_stack FROM callers) c
                 ON c.api = s.call_api AND c.user_stack = s.call_stack AND c.python_stack = s.python_stack
        )
        SELECT site, kernel_stack, slab_cache, kind, sum(allocated)::BIGINT AS allocations,
               sum(live)::BIGINT AS live_objects, sum(live * size_bytes)::BIGINT AS live_bytes
        FROM parts GROUP BY site, kernel_stack, slab_cache, kind
        ORDER BY site, live_bytes DESC, allocations DESC, slab_cache, kernel_stack
        """
    ).df()
    above = con.execute(
        """
        SELECT kind, slab_cache, kernel_stack, user_stack, python_stack, api, sum(n)::BIGINT AS allocations
        FROM (SELECT kind, slab_cache, kernel_stack, user_stack, python_stack, api, 1 AS n FROM nested
              UNION ALL
              SELECT kind, slab_cache, kernel_stack, user_stack, python_stack, call_api, allocated_objects
              FROM census_kept WHERE call_api <> ''
                   AND call_site IN (SELECT call_site FROM kernel_sites))
        GROUP BY ALL ORDER BY ALL
        """
    ).df()
    con.unregister("callers")
    con.unregister("kernel_sites")
    return Nesting(calls, below, above)

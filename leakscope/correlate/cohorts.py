"""How old what is kept is: bytes and objects by site and cohort, those that were allocated at about the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from leakscope.correlate.aggregate import EVENT_CODE, EXIT
from leakscope.correlate.lives import FOLDED_PID
from leakscope.correlate.sites import SITE_KEY

if TYPE_CHECKING:
    import duckdb

STEPS_S = (0, 1, 10, 60, 600, 3600, 6 * 3600, 24 * 3600)
"""Youngest age of each cohort, in seconds."""

_STACKS = "kernel_stack, user_stack, python_stack"
_FOLDED_CACHE = r"regexp_replace(slab_cache::VARCHAR, '^kmalloc-rnd-\d+-', 'kmalloc-')"  # as sites.folded_cache


def live_cohorts(
    con: duckdb.DuckDBPyConnection, lives: pd.DataFrame, bounds: pd.DataFrame, steps_s: Sequence[float] = STEPS_S
) -> pd.DataFrame:
    """One row a (process life, site key, cohort) that is live at the end of its source's evidence.

    Needs what :func:`leakscope.correlate.aggregate.aggregate` leaves behind. Columns: source_id, life, SITE_KEY,
    cohort (index into ``steps_s``), objects, bytes, byte_seconds (the sum of bytes times age). Events are exact to the
    allocation; objects of a census count as old as their cohort may be. Allocations without a stack of their own stand
    under what identity they have.
    """
    folded = lives.loc[lives["pid"] == FOLDED_PID, "life"].tolist()
    con.register("cohort_ends", bounds[["source_id", "end_ns"]])
    con.register("folded_lives", pd.DataFrame({"life": folded}, dtype="int64"))
    cohort = " + ".join(f"(age_s >= {step})::INTEGER" for step in steps_s[1:]) or "0"
    rows = con.execute(
        f"""
        WITH made AS (
            SELECT e.source_id, l.life, e.layer, e.kind, e.api, e.slab_cache, {_STACKS}, {EVENT_CODE} AS event,
                   f.life IS NOT NULL AS folded, CASE WHEN op = 'alloc' THEN objects ELSE -objects END AS objects,
                   CASE WHEN op = 'alloc' THEN bytes ELSE -bytes END AS bytes,
                   (b.end_ns - CASE WHEN op = 'alloc' THEN ts_ns ELSE alloc_ts_ns END) AS age_ns
            FROM changes e JOIN lives l USING (source_id, pid) JOIN cohort_ends b USING (source_id)
                 LEFT JOIN folded_lives f ON f.life = l.life
            WHERE e.source_id NOT IN (SELECT DISTINCT source_id FROM census_totals)
        ), counted AS (
            SELECT c.source_id, l.life, s.layer, s.kind, s.api, s.slab_cache, {_STACKS}, {EXIT} - 1 AS event,
                   false AS folded,
                   c.objects, c.bytes, b.end_ns - c.cohort_ns AS age_ns
            FROM census c JOIN census_sites s ON s.source_id = c.source_id AND s.id = c.site
                 JOIN cohort_ends b ON b.source_id = c.source_id
                 JOIN lives l ON l.source_id = s.source_id AND l.pid = s.pid
            WHERE l.exit_ns = 0 OR c.ts_ns < l.exit_ns
            QUALIFY row_number() OVER (PARTITION BY c.source_id, c.site, c.cohort_ns ORDER BY c.ts_ns DESC) = 1
        ), aged AS (
            SELECT *, age_ns / 1e9 AS age_s FROM (SELECT * FROM made UNION ALL BY NAME SELECT * FROM counted)
            WHERE event < {EXIT} OR (event = {EXIT} AND folded)
        )
        SELECT source_id, life, layer, kind, api, {_FOLDED_CACHE} AS slab_cache, {_STACKS}, ({cohort}) AS cohort,
               sum(objects)::BIGINT AS objects, sum(bytes)::BIGINT AS bytes,
               sum(bytes * greatest(age_s, 0.0)) AS byte_seconds
        FROM aged GROUP BY ALL HAVING sum(bytes) > 0 OR sum(objects) > 0
        ORDER BY {", ".join(SITE_KEY)}, life, cohort
        """
    ).df()
    con.unregister("cohort_ends")
    con.unregister("folded_lives")
    for column in ("layer", "kind", "api", "slab_cache"):
        rows[column] = rows[column].astype(str)
    return rows

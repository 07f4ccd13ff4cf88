"""One report of several captures: joined first, so that what two sources saw is counted once, then each attributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leakscope.correlate.joins.driver import Joined, join
from leakscope.correlate.joins.evidence import evidence_of
from leakscope.detect.attribution import Options
from leakscope.detect.evidence import attribute_evidence
from leakscope.model.manifest import Manifest
from leakscope.model.results import Report

if TYPE_CHECKING:
    import duckdb


def attribute_together(
    captures: Sequence[tuple[duckdb.DuckDBPyConnection, Manifest]], options: Options
) -> list[Report]:
    """A report a capture, in their order; what joins found stands in the first one.

    Raises duckdb.Error for data that cannot be computed with.
    """
    evidence = [e for number, (con, manifest) in enumerate(captures) for e in evidence_of(con, manifest, number)]
    joined = join(evidence, options.joins)
    reports = []
    for number, (con, manifest) in enumerate(captures):
        _count_once(con, joined, number)
        reports.append(attribute_evidence(con, manifest, options, joined.links.get(number)))
    if reports:
        reports[0].joins, reports[0].clocks = joined.outcomes, joined.clocks
        reports[0].reconciliation += joined.reconciliation
    return reports


def _count_once(con: duckdb.DuckDBPyConnection, joined: Joined, number: int) -> None:
    """Hide allocations that another source has, and their frees: a temporary view in front of ``mem_events``."""
    twice = joined.twice.get(number)
    if twice is None or not len(twice):
        return
    con.register("twice_now", twice)
    con.execute("CREATE OR REPLACE TEMP TABLE twice AS SELECT * FROM twice_now")
    con.unregister("twice_now")
    con.execute(
        """
        CREATE OR REPLACE TEMP VIEW mem_events AS
        SELECT e.* FROM memory.main.mem_events e ANTI JOIN twice t
        ON e.source_id = t.source_id AND e.pid = t.pid AND e.addr = t.addr
           AND (CASE WHEN e.op = 'alloc' THEN e.ts_ns ELSE e.alloc_ts_ns END) = t.ts_ns
        """
    )

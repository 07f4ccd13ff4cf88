"""Verdicts of a capture's counters, beside those of its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from leakscope.detect.series.counters import Counter, counts_bytes
from leakscope.detect.series.judge import Judged, judge
from leakscope.model.manifest import Source
from leakscope.model.results import VERDICTS, Report, Verdict

if TYPE_CHECKING:
    import duckdb

FROM_ZERO = "relative"
"""Clock of files whose own zero is time zero; elsewhere that is the start of the source."""
COUNTER_KINDS = frozenset({"samples", "slabinfo"})
"""Kinds of sources that have nothing but counters."""


def counters_of(con: duckdb.DuckDBPyConnection, source: Source) -> list[Counter]:
    """The counters of one source, summed over the processes (or groups, devices) that were read at the same time."""
    rows = con.execute(
        """
        SELECT counter, ts_ns, sum(value) AS value FROM samples WHERE source_id = ?
        GROUP BY counter, ts_ns ORDER BY counter, ts_ns
        """,
        [source.id],
    ).fetchnumpy()
    names = np.asarray(rows["counter"], dtype=object)
    if not len(names):
        return []
    zero = 0 if source.clock == FROM_ZERO else source.start_ns
    times = (np.asarray(rows["ts_ns"], dtype=np.int64) - zero) / 1e9
    values = np.asarray(rows["value"], dtype=np.float64)
    declared = source.facts.get("byte_counters")
    edges = np.flatnonzero(np.r_[True, names[1:] != names[:-1]])
    return [
        Counter(str(names[a]), times[a:b], values[a:b], counts_bytes(str(names[a]), declared))
        for a, b in zip(edges, np.r_[edges[1:], len(names)], strict=True)
    ]


def judge_counters(con: duckdb.DuckDBPyConnection, sources: Iterable[Source]) -> list[Judged]:
    """One judgement a source that has counters and nothing else."""
    judged = []
    for source in sources:
        if source.kind in COUNTER_KINDS and source.clock != "none" and (counters := counters_of(con, source)):
            judged.append(judge(counters))
    return judged


def with_counters(report: Report, judged: Sequence[Judged], layer: str | None, has_events: bool) -> Report:
    """``report`` of events with what counters say. Counters never outweigh events where both speak of the same."""
    if not judged:
        return report
    own: list[Verdict] = [report.verdict, *report.findings] if has_events else []
    quiet = has_events and report.verdict.verdict == "not_leak"
    found: list[tuple[Verdict, bool]] = []
    for one in judged:
        for number, verdict in enumerate((one.verdict, *one.findings)):
            if layer is not None and verdict.layer not in ("", layer):
                continue
            if quiet and verdict.verdict == "leak" and verdict.layer == "host" and verdict.kind == "retained_growth":
                verdict = held_by_allocator(verdict)
            found.append((verdict, number == 0 and one.decided))
    if not found:
        return report
    leading = [v for v, _ in found]
    if has_events and report.verdict.verdict == "leak":
        ranked = [*own, *leading]
    elif quiet and leading[0].kind == "window_too_short":
        ranked = [*own, *leading]  # what events saw needs no minimum time
    else:
        first = leading[0]
        if quiet and first.verdict == "not_leak":
            first = replace(first, reasons=(*first.reasons, *report.verdict.reasons))
        ranked = [*sorted([first, *own], key=lambda v: VERDICTS.index(v.verdict)), *leading[1:]]
    missing = report.verdict.missing if has_events else ()
    report.verdict = replace(ranked[0], missing=tuple(dict.fromkeys((*ranked[0].missing, *missing))))
    report.findings = ranked[1:]
    return report


def held_by_allocator(verdict: Verdict) -> Verdict:
    """Growth of resident memory while all that was allocated in it is freed."""
    return replace(
        verdict,
        verdict="not_leak",
        kind="fragmentation",
        leak_start_s=None,
        reasons=(
            "resident memory rises although what the events allocate is freed: the allocator holds it",
            *verdict.reasons,
        ),
    )

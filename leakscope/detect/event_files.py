"""What event files of other tracers add to a verdict: their artefacts and their losses.

Other tracers miss frees and log failed allocations; naive sums call both leaks. Their losses are stated beside the
events, not seen by probes of our own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from leakscope.model.manifest import Manifest
from leakscope.model.results import Culprit, Report, Verdict

if TYPE_CHECKING:
    import duckdb

MIN_MISSED = 5
MIN_MISSED_SHARE = 0.01
"""Frees of a stack that were missed, from which on they are said: objects, and share of its allocations."""
MIN_LOST_SHARE = 0.2
"""From this share of events lost on, finding nothing means nothing."""
MIN_ALLOCATIONS = 50
"""Fewer allocations without a single free may all be alive rightly."""


def with_event_files(con: duckdb.DuckDBPyConnection, manifest: Manifest, report: Report) -> Report:
    """``report`` of the events, its verdict restated where artefacts or losses of event files decide it."""
    ids = [source.id for source in manifest.sources if source.kind == "events"]
    if not ids:
        return report
    counts = con.execute(
        """
        SELECT count(*) FILTER (op = 'alloc'), count(*) FILTER (op = 'free' AND cause = 'call'),
               count(*) FILTER (op = 'free' AND cause = 'reuse'), mode(layer)::VARCHAR,
               count(DISTINCT user_stack + kernel_stack), count(DISTINCT ts_ns), sum(size_bytes)::BIGINT
        FROM mem_events WHERE list_contains(?, source_id)
        """,
        [ids],
    ).fetchone()
    assert counts is not None
    allocated, freed, reused, layer, stacks, times, size = counts
    failed = sum(loss.value or 0 for loss in report.losses if loss.what == "failed_allocation")
    lost = sum(loss.value or 0 for loss in report.losses if loss.what == "events_lost")
    verdict = report.verdict
    if allocated >= MIN_ALLOCATIONS and (times <= 1 or not size or (not freed and not reused and stacks > 1)):
        what = (
            "all events have one time" if times <= 1 else "no event has a size" if not size else "no free was recorded"
        )
        verdict = _cannot_tell(
            verdict, "unusable_capture", f"{what}: what is kept cannot be told", "frees, sizes and times"
        )
        report.findings = []
    elif verdict.verdict == "not_leak" and lost >= MIN_LOST_SHARE * (allocated + freed + lost):
        verdict = _cannot_tell(
            verdict, "partial_data", f"{lost:,} events were lost, {allocated + freed:,} recorded", "the lost events"
        )
    elif verdict.verdict == "not_leak" and verdict.culprit is None:
        verdict = _artefact(report, verdict, str(layer or ""), int(failed), int(reused), int(allocated))
    if verdict.verdict == "leak":
        said = []
        if failed:
            said.append(f"{failed:,} failed allocations are left out")
        if reused:
            said.append(f"{reused:,} missed frees are told by reuse of their addresses")
        verdict = replace(verdict, reasons=(*verdict.reasons, *said))
    report.verdict = verdict
    return report


def _cannot_tell(verdict: Verdict, kind: str, reason: str, missing: str) -> Verdict:
    return Verdict(
        "inconclusive",
        kind,
        confidence=0.5,
        reasons=(reason,),
        missing=(missing, *verdict.missing),
        smallest_provable_bytes_per_s=verdict.smallest_provable_bytes_per_s,
    )


def _artefact(report: Report, verdict: Verdict, layer: str, failed: int, reused: int, allocated: int) -> Verdict:
    """What would have looked like a leak; else the verdict with its layer."""
    if failed:
        return replace(
            verdict,
            kind="tracing_artifact",
            layer=layer,
            culprit=Culprit(object="failed allocations (address 0 or all ones)"),
            reasons=(f"{failed:,} failed allocations are counted and left out", *verdict.reasons),
        )
    if reused >= max(MIN_MISSED, MIN_MISSED_SHARE * allocated):
        missed = [s for s in report.sites if s.free_seen_share is not None and s.free_seen_share < 1 - MIN_MISSED_SHARE]
        worst = max(missed, key=lambda s: (1 - (s.free_seen_share or 0.0)) * s.allocated_objects, default=None)
        return replace(
            verdict,
            kind="tracing_artifact",
            layer=worst.layer if worst else layer,
            culprit=Culprit(worst.culprit_frame, tuple(worst.stack)) if worst else None,
            reasons=(
                f"{reused:,} addresses were handed out again with no free in between: those frees were missed",
                "once reuse counts as a free nothing accumulates",
                *verdict.reasons,
            ),
        )
    return replace(verdict, layer=layer)

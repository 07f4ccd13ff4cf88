"""All that one capture holds, judged together: events, counters, caches, snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from leakscope.correlate.joins.links import SiteLinks
from leakscope.correlate.wrapper_rules import using
from leakscope.detect.attribution import Options, attribute
from leakscope.detect.cache import judge_cache
from leakscope.detect.calibrations import calibrations
from leakscope.detect.counters import judge_counters, with_counters
from leakscope.detect.event_files import with_event_files
from leakscope.detect.forecast import with_forecasts
from leakscope.detect.key_store import STORES, audit_of, judge_store
from leakscope.detect.kv_verdicts import judge_kv
from leakscope.detect.recorded_lives import read_recorded
from leakscope.detect.recorded_verdicts import judge_recorded, with_recorded
from leakscope.detect.snapshots import judge_states
from leakscope.detect.timeline import timelines
from leakscope.model.manifest import Manifest
from leakscope.model.results import VERDICTS, Report, Verdict

if TYPE_CHECKING:
    import duckdb

OWN_RULES = frozenset({"kv_events", *STORES})
"""Kinds of sources whose cache objects tell no holds."""


def attribute_evidence(
    con: duckdb.DuckDBPyConnection, manifest: Manifest, options: Options, joined: SiteLinks | None = None
) -> Report:
    """The report of one capture; ``con`` has a view for each of its tables (``Capture.connect``).

    Events lead where they found a leak. Beside them counters, cache objects and snapshots give verdicts of their own.
    Raises duckdb.Error for data that cannot be computed with.
    """
    with using(options.wrappers):
        report = attribute(con, manifest, options, joined)
    report = with_event_files(con, manifest, report)
    events = con.execute("SELECT (SELECT count(*) FROM mem_events) + (SELECT count(*) FROM census_sites)").fetchone()
    has_events = bool(events and events[0])
    report = with_counters(report, judge_counters(con, manifest.sources), options.layer, has_events)
    recorded = read_recorded(con, manifest.sources)
    malloc = any(source.options.get("malloc") for source in manifest.sources if source.kind == "recording")
    report = with_recorded(report, judge_recorded(recorded), options.layer, has_events, malloc)
    report.calibration = calibrations(con, manifest.sources, recorded)
    others = [v for s in manifest.sources if s.kind not in OWN_RULES for v in judge_cache(con, s.id)]
    others += judge_kv(con, manifest.sources)
    for source in manifest.sources:
        if source.kind in STORES:
            audit = audit_of(con, source)
            report.stores += [audit] if audit else []
            others += judge_store(audit, source)
    others += judge_states(con, manifest.sources)
    report = _with_others(report, others, options.layer)
    report = with_forecasts(con, manifest.sources, report, options.limit_bytes)
    if options.timelines:
        report.timelines = timelines(con, manifest, report, options, recorded)
    return report


def _rank(verdict: Verdict) -> tuple[int, bool]:
    """Leaks first; of what stays open that which names something first."""
    return VERDICTS.index(verdict.verdict), verdict.verdict == "inconclusive" and verdict.culprit is None


def _with_others(report: Report, others: list[Verdict], layer: str | None) -> Report:
    """Verdicts of evidence of another kind. What says more goes before what is general (nothing keeps growing)."""
    others = [v for v in others if layer is None or v.layer in ("", layer)]
    if not others:
        return report
    own = report.verdict
    weak = (own.verdict == "not_leak" and own.culprit is None) or (
        own.verdict == "inconclusive" and own.kind == "missing_data"
    )
    own_all = [own, *report.findings]
    ranked = [*others, *own_all] if weak else sorted([*own_all, *others], key=_rank)
    if weak and own.kind == "missing_data":
        ranked.remove(own)  # there is other evidence, which misses nothing of that kind
        own = replace(own, missing=())
    report.verdict = replace(ranked[0], missing=tuple(dict.fromkeys((*ranked[0].missing, *own.missing))))
    report.findings = ranked[1:]
    return report

"""The page of an attribution: the verdict, memory over time, chains, stacks, cohorts, tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leakscope.detect.sentence import culprit_of
from leakscope.model.results import Report, Verdict
from leakscope.quantities import counted
from leakscope.report.cells import bare_frame
from leakscope.report.html import tables
from leakscope.report.html.chains import chain_figure
from leakscope.report.html.icicle import SCRIPT
from leakscope.report.html.page import page
from leakscope.report.html.parts import Finding, Headline, Part, Section, Text
from leakscope.report.html.stacks import stack_sections
from leakscope.report.html.timelines import moments_table, timeline_sections
from leakscope.report.html.words import (
    as_code,
    facts_of,
    headline_sentences,
    next_steps,
    verdict_sentence,
)

MAX_FURTHER = 5
MAX_CHAINS = 6
SCRIPTS = ("ladder.js", SCRIPT)


def attribution_page(report: Report) -> str:
    """The whole file."""
    names = [Path(str(one.get("path", ""))).name for one in report.inputs]
    title = f"leakscope: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    return page(title, headline(report), sections(report), SCRIPTS)


def headline(report: Report) -> Headline:
    """The first screen."""
    further = headline_sentences(report.findings, MAX_FURTHER)
    more = [Finding(one.verdict, _further(one)) for one in further]
    return Headline(
        report.verdict.verdict, verdict_sentence(report.verdict), facts_of(report.verdict), next_steps(report), more
    )


def _further(verdict: Verdict) -> str:
    start = "" if verdict.leak_start_s is None else f", since {verdict.leak_start_s:.1f} s"
    return f"{verdict_sentence(verdict)}{start}, confidence {verdict.confidence:.2f}"


def sections(report: Report) -> list[Section]:
    """The sections that this report has something for."""
    over_time = timeline_sections(report.timelines)
    made = [
        *over_time[:1],
        _findings(report),
        *stack_sections(report, source_names(report)),
        *over_time[1:],
        _sites(report),
        _section("reconciliation", "Reconciliation", tables.reconciliation_parts(report)),
        _losses(report),
        _section("joins", "Joins and clocks", _joins(report)),
        _section("stores", "Key-value stores", tables.stores_parts(report)),
        _section("calibration", "Calibration", [tables.calibration_table(report)] if report.calibration else []),
        _section("inputs", "Inputs", tables.inputs_parts(report)),
    ]
    return [section for section in made if section is not None]


def source_names(report: Report) -> list[str]:
    """Names of the evidence by ``Site.source``: captures first, then everything that was imported."""
    captures = [Path(str(one.get("path", ""))).name for one in report.inputs if "limits" not in one]
    return [*captures, *(["imported files"] if len(captures) < len(report.inputs) else [])]


def _section(id_: str, title: str, parts: Sequence[Part], unfolded: bool = True) -> Section | None:
    return Section(id_, title, parts, unfolded) if parts else None


def _findings(report: Report) -> Section | None:
    verdicts = [report.verdict, *report.findings]
    parts: list[Part] = [tables.findings_table(verdicts)]
    if moments := moments_table(report.timelines):
        parts.append(moments)
    chains = {chain.site: chain for chain in report.chains}
    with_chain = [v for v in verdicts if v.sites and v.sites[0] in chains]
    for number, verdict in enumerate(with_chain[:MAX_CHAINS], 1):
        culprit = culprit_of(verdict)
        title = f"{number}. {verdict.layer or 'memory'}: {bare_frame(culprit)}"  # the number is that of the table
        parts.append(chain_figure(f"chain-{number}", title, _about(verdict), chains[verdict.sites[0]], culprit))
    for verdict in [v for v in verdicts if v not in with_chain][:MAX_CHAINS]:
        said = "; ".join((*verdict.reasons, *(f"missing: {one}" for one in verdict.missing)))
        if said:
            who = f"{as_code(bare_frame(culprit_of(verdict)))}, " if verdict.culprit else ""
            parts.append(Text([f"{who}{verdict.verdict.replace('_', ' ')}, {verdict.kind}: {said}."]))
    return Section("findings", "Findings and their chains", parts)


def _about(verdict: Verdict) -> str:
    """What stands over a chain: the sentence, its reasons, what is missing."""
    said = [verdict_sentence(verdict), *verdict.reasons, *(f"missing: {one}" for one in verdict.missing)]
    if len(verdict.sites) > 1:
        said.append(f"drawn is the site that keeps most, of {len(verdict.sites):,}")
    return "; ".join(dict.fromkeys(said)) + "."


def _sites(report: Report) -> Section | None:
    if not report.sites and not report.layers:
        return None
    names = dict(enumerate(source_names(report)))
    sources = {one.source for one in report.layers}
    parts: list[Part] = []
    if report.layers:
        parts.append(tables.layers_table(report, {k: v for k, v in names.items() if k in sources}))
    if any(site.frees_visible for site in report.sites):
        parts.append(tables.sites_table(report))
    return _section("sites", "Layers and sites", parts)


def _losses(report: Report) -> Section:
    if report.losses:
        parts: list[Part] = [tables.rows_table("What is known to be missing", report.losses)]
    else:
        parts = [Text(["None: no evidence is known to be missing."])]
    hidden = [site for site in report.sites if not site.frees_visible]
    if hidden:
        parts.append(tables.hidden_table(hidden))
    total = len(report.losses)
    return Section("losses", f"Losses ({counted(total, 'row')})" if total else "Losses", parts)


def _joins(report: Report) -> list[Part]:
    parts: list[Part] = []
    if report.joins:
        parts.append(tables.joins_table(report))
    if report.clocks:
        parts.append(tables.rows_table("Clocks: what is left over after aligning, in ns", report.clocks))
    return parts

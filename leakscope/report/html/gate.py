"""The page of ``leakscope check``: pass or fail, what was measured against what, and why; to attach to a run of CI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from leakscope.model.gate import Check, Gate, Measured
from leakscope.model.results import Report
from leakscope.quantities import counted, exact, size
from leakscope.report.cells import bare_frame
from leakscope.report.gate import gate_sentence
from leakscope.report.html.attribution import SCRIPTS
from leakscope.report.html.attribution import sections as report_sections
from leakscope.report.html.cells import command, without_empty
from leakscope.report.html.chains import chain_figure
from leakscope.report.html.gate_figures import budget_figure, course_figure, work_figure
from leakscope.report.html.page import Cell, Code, Finding, Headline, Lines, Part, Section, Table, Text, Value, page
from leakscope.report.html.units import bytes_cell
from leakscope.report.html.words import as_code

_WORDS = {"pass": "passed", "fail": "failed", "inconclusive": "inconclusive"}
_OUTCOMES = {
    "fail": "failed",
    "inconclusive": "cannot tell",
    "known": "known",
    "suppressed": "suppressed",
    "pass": "passed",
}
_FURTHER = 4
_MAX_CHECKS = 200
_MAX_CHAINS = 20
DEFAULT_BASELINE = "leakscope-baseline.json"


def gate_page(report: Report, gate: Gate, evidence: Sequence[str], baseline_file: str = "") -> str:
    """The whole page. ``evidence``: as it was named; ``baseline_file``: the baseline file that was compared with, ''
    for none. The same inputs give the same page."""
    found = [
        Section("checks", "Checks", [_checks(gate), *_measures(gate), *budget_figure(gate)]),
        Section("growth", "What fails, over time", course_figure(report, gate)),
        Section("chains", "Chains of what fails", _chains(report, gate)),
        Section("baseline", "Against the baseline", _difference(gate)),
        Section("suppressions", "Suppressions", _suppressions(gate)),
        Section("accept", "Accept this run", [_accept(gate, evidence, baseline_file)]),
        Section("notes", "Notes", [Text(gate.notes)] if gate.notes else []),
        *(_folded(section) for section in report_sections(report) if section.id != "findings"),
    ]
    sections = [section for section in found if section.parts]
    return page(f"leakscope check: {', '.join(evidence)}", _headline(gate, evidence), sections, SCRIPTS)


def _folded(section: Section) -> Section:
    """What supports the result is unfolded where somebody asks for it."""
    return replace(section, open=section.id in ("over-time", "losses"))


def _headline(gate: Gate, evidence: Sequence[str]) -> Headline:
    result = {"pass": "Passed", "fail": "Failed", "inconclusive": "The evidence cannot tell"}[gate.result]
    facts = [("Exit code", str(gate.exit_code)), ("Checks", f"{len(gate.checks):,}")]
    facts += [(_OUTCOMES[outcome], str(len(gate.of(outcome)))) for outcome in _OUTCOMES if gate.of(outcome)]
    if gate.difference is not None:
        work = f"{gate.difference.ratio:.2f} times its work ({gate.difference.unit})"
        facts.append(("Against", f"{gate.difference.baseline}: head did {work}"))
    used = [one for one in gate.suppressions if one.used]
    if used:
        facts.append(("Suppressed", f"{exact(sum(one.bytes for one in used))} by {counted(len(used), 'pattern')}"))
    worst = gate.of("fail") or (gate.of("inconclusive") if gate.result != "pass" else [])
    further = [
        Finding("failed" if check.outcome == "fail" else "inconclusive", f"{check.name}: {_brief(check)}")
        for check in worst[1 : 1 + _FURTHER]
    ]
    said = gate_sentence(gate)
    if worst:
        others = f", and {counted(len(worst) - 1, 'other check')}" if len(worst) > 1 else ""
        said = f"{as_code(worst[0].name)} {_brief(worst[0])}{others}"
    steps = []
    if gate.result != "pass":
        steps.append(f"See chains, sites and losses: {command('leakscope', 'attribute', *evidence)}")
    if gate.of("fail"):
        steps.append("Mend it, or accept it below: a suppression with its reason, a budget, or a new baseline")
    if gate.of("inconclusive"):
        steps.append("Give it what is missing (see the messages): a longer run, more work, the counter that is named")
    return Headline(_WORDS[gate.result], f"{result}: {said}.", facts, steps, further)


def _brief(check: Check) -> str:
    """The first part of its message, without the frame that its name has already."""
    first = check.message.split("; ")[0].replace("`", "'")
    return first.removeprefix(check.frame.replace("`", "'")).strip() if check.frame else first


def _checks(gate: Gate) -> Table:
    rows: list[list[Cell]] = [
        [
            _OUTCOMES[check.outcome], check.name, check.message, check.reason, _stack(check), check.rule, check.kind,
            check.layer,
        ]
        for check in gate.checks[:_MAX_CHECKS]
    ]  # fmt: skip
    left = len(gate.checks) - _MAX_CHECKS
    note = f"{left:,} more stand in the output of --json." if left > 0 else ""
    columns = ["outcome", "check", "message", "reason", "stack", "rule", "class", "layer"]
    return without_empty(Table("Every check", columns, rows, note))


def _stack(check: Check) -> Cell:
    return Lines(bare_frame(check.frame or check.stack[-1]), check.stack) if check.stack else None


def _measures(gate: Gate) -> list[Part]:
    rows: list[list[Cell]] = [
        [
            check.name, one.name, _amount(one.value, one.unit), _interval(one),
            None if one.allowed is None else _amount(one.allowed, one.unit), _OUTCOMES[one.outcome],
        ]
        for check in gate.checks[:_MAX_CHECKS]
        for one in check.measures
    ]  # fmt: skip
    if not rows:
        return []
    note = "A figure fails when its whole 95 % interval is beyond what is allowed; exact figures have none."
    columns = ["check", "figure", "measured", "95 % interval", "allowed", "outcome"]
    return [Table("Measured and allowed", columns, rows, note)]


def _amount(value: float, unit: str) -> Value:
    """With the unit; rounded as --json has it."""
    kept = round(value, 3)
    kept = int(kept) if kept == int(kept) else kept
    if unit == "objects":
        return Value(f"{value:,.0f} objects", kept)
    _, _, after = unit.partition("bytes")
    return Value(f"{size(value)}{after}" if unit.startswith("bytes") else f"{value:,.4g} {unit}", kept)


def _interval(one: Measured) -> str:
    if one.exact:
        return "exact"
    return f"{_amount(one.low, one.unit).text} … {_amount(one.high, one.unit).text}"


def _chains(report: Report, gate: Gate) -> list[Part]:
    by_site = {chain.site: chain for chain in report.chains}
    parts: list[Part] = []
    for number, check in enumerate(gate.of("fail")[:_MAX_CHAINS], 1):
        chain = next((by_site[site] for site in check.sites if site in by_site), None)
        if chain is not None:
            more = len(check.sites) - 1
            about = check.message + (f"; and {counted(more, 'more site')} of this check" if more > 0 else "") + "."
            parts.append(chain_figure(f"fail-{number}", check.name, about, chain, check.frame))
        elif check.stack:
            parts.append(Table(check.name, ["stack, outermost first"], [[Code(frame)] for frame in check.stack]))
    return parts


def _difference(gate: Gate) -> list[Part]:
    difference = gate.difference
    if difference is None:
        return []
    about = (
        f"Head did {difference.ratio:.2f} times the work of {difference.baseline}: {difference.head_work:,.6g} against "
        f"{difference.base_work:,.6g} ({difference.unit}). Expected: what the baseline keeps, for the work of head. "
        "Allowed: from so many objects on it is more than chance."
    )
    rows: list[list[Cell]] = [
        [
            change.what, change.layer, change.kind, Lines(" → ".join(change.frames[-3:]) or change.kind, change.frames),
            change.kept_objects, _count(change.expected_objects), _count(change.allowed_objects),
            bytes_cell(change.kept_bytes), bytes_cell(round(change.expected_bytes)),
        ]
        for change in difference.changes[:_MAX_CHECKS]
    ]  # fmt: skip
    columns = ["change", "layer", "kind", "site", "kept objects", "expected", "allowed", "kept", "expected bytes"]
    left = len(difference.changes) - _MAX_CHECKS
    note = f"{difference.unchanged:,} sites are unchanged." + (f" {left:,} more stand in --json." if left > 0 else "")
    table = Table("Sites that changed", columns, rows, note) if rows else Text([note])
    return [Text([about]), *work_figure(difference), table]


def _count(value: float) -> Value:
    kept = round(value, 3)
    return Value(f"{value:,.1f}".removesuffix(".0"), int(kept) if kept == int(kept) else kept)


def _suppressions(gate: Gate) -> list[Part]:
    rows: list[list[Cell]] = [
        [
            "used" if one.used else "hides nothing: remove it", f"leak:{one.pattern}", one.reason, one.where, one.sites,
            one.findings, one.objects, bytes_cell(one.bytes),
        ]
        for one in gate.suppressions
    ]  # fmt: skip
    columns = ["", "pattern", "reason", "where", "sites", "findings", "objects", "bytes"]
    return [Table("Suppressions", columns, rows)] if rows else []


def _accept(gate: Gate, evidence: Sequence[str], baseline_file: str) -> Text:
    update = command("leakscope", "baseline", "update", *evidence, "-o", baseline_file or DEFAULT_BASELINE)
    said = [f"To take what this run keeps as the new baseline, and commit the file: {update}"]
    if not baseline_file:
        said.append(f"and compare with it: {command('leakscope', 'check', *evidence, '--baseline', DEFAULT_BASELINE)}")
    if gate.result != "pass":
        said.append("A new baseline makes what it keeps the rule: read what fails first.")
    return Text(said)

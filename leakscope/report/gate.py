"""The gate on a terminal and as JSON: the result first, then what failed and why, then what is only told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap
from typing import Any

from leakscope.model.gate import Check, Gate, SiteChange
from leakscope.model.results import Report
from leakscope.quantities import counted, exact, size
from leakscope.report.json import report_json
from leakscope.report.text import printable

_WORDS = {"pass": "PASS", "fail": "FAIL", "inconclusive": "INCONCLUSIVE"}
_STYLES = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow", "suppressed": "dim", "known": "dim"}
_HEADS = {
    "fail": "failed",
    "inconclusive": "cannot tell",
    "known": "known",
    "suppressed": "suppressed",
    "pass": "passed",
}
MAX_SHOWN = 20
MAX_CHANGES = 10

Line = tuple[str, str]
"""(text without control characters, style)."""


def gate_json(report: Report, gate: Gate) -> dict[str, Any]:
    """The object of ``attribute`` plus ``gate``."""
    return report_json(report) | {"gate": gate.to_json()}


def gate_lines(report: Report, gate: Gate, evidence: Sequence[str], width: int = 80) -> Iterator[Line]:
    """What ``check`` prints."""
    yield f"{_WORDS[gate.result]}  {gate_sentence(gate)}", _STYLES[gate.result]
    if gate.difference is not None:
        d = gate.difference
        yield from _wrapped(f"against {d.baseline}: head did {d.ratio:.2f} times its work ({d.unit})", width, "")
    for outcome in ("fail", "inconclusive", "known", "suppressed", "pass"):
        checks = gate.of(outcome)
        if not checks:
            continue
        yield "", ""
        yield f"{_HEADS.get(outcome, 'passed')}:", ""
        for check in checks[:MAX_SHOWN]:
            yield from _check(check, width)
        if len(checks) > MAX_SHOWN:
            yield f"   … and {len(checks) - MAX_SHOWN:,} more: --json has all", "dim"
    yield from _changes(gate, width)
    yield from _suppressions(gate, width)
    if gate.notes:
        yield "", ""
        for note in gate.notes:
            yield from _wrapped(f"note: {note}", width, "yellow", "")
    if gate.result != "pass":
        yield "", ""
        yield printable(f"next: leakscope attribute {' '.join(evidence)}     chains, sites, losses"), "dim"


def gate_sentence(gate: Gate) -> str:
    """The result in one sentence."""
    failed, unclear = gate.of("fail"), gate.of("inconclusive")
    if gate.result == "fail":
        return printable(failed[0].name) + (f" and {counted(len(failed) - 1, 'other')}" if len(failed) > 1 else "")
    if unclear:
        allowed = ", which is allowed" if gate.result == "pass" else ""
        return f"{counted(len(unclear), 'check')} cannot be told{allowed}"
    kept = gate.of("known", "suppressed")
    return f"{counted(len(gate.checks), 'check')}" + (f", {len(kept):,} of them known or suppressed" if kept else "")


def _check(check: Check, width: int) -> Iterator[Line]:
    yield (
        f" • {printable(check.name)}" + (f"  ({printable(check.kind)})" if check.kind else ""),
        _STYLES.get(check.outcome, ""),
    )
    yield from _wrapped(check.message, width, "")
    if check.reason:
        yield from _wrapped(f"reason: {check.reason}", width, "")
    if check.chain and check.outcome == "fail":
        yield from _wrapped(check.chain, width, "cyan")


def _changes(gate: Gate, width: int) -> Iterator[Line]:
    if gate.difference is None:
        return
    changes = gate.difference.changes
    if not changes and not gate.difference.unchanged:
        return
    yield "", ""
    yield f"sites against the baseline: {_counted(changes)}{gate.difference.unchanged:,} unchanged", ""
    for change in changes[:MAX_CHANGES]:
        frames = " → ".join(change.frames[-3:]) or change.kind
        moved = f"{size(change.kept_bytes)}, expected {size(change.expected_bytes)}"
        yield from _wrapped(f"{change.what}: {change.layer}: {frames}: {moved}", width, "")
    if len(changes) > MAX_CHANGES:
        yield f"   … and {len(changes) - MAX_CHANGES:,} more: --json has them", "dim"


def _counted(changes: Sequence[SiteChange]) -> str:
    names = ("new", "grown", "improved", "vanished")
    counts = [(name, sum(change.what == name for change in changes)) for name in names]
    return "".join(f"{count:,} {name}, " for name, count in counts if count)


def _suppressions(gate: Gate, width: int) -> Iterator[Line]:
    used = [one for one in gate.suppressions if one.used]
    if not used:
        return
    yield "", ""
    total = sum(one.bytes for one in used)
    yield f"suppressed: {exact(total)} by {counted(len(used), 'pattern')}", ""
    for one in used[:MAX_SHOWN]:
        kept = f"{exact(one.bytes)} in {counted(one.objects, 'object')}"
        yield from _wrapped(f"leak:{one.pattern} ({one.reason}): {kept}", width, "dim")


def _wrapped(text: str, width: int, style: str, indent: str = "   ") -> Iterator[Line]:
    for line in wrap(printable(text), max(20, width - len(indent)), break_on_hyphens=False, break_long_words=False):
        yield f"{indent}{line}", style


def plain_text(lines: Iterator[Line], each: Callable[[str], str] = lambda text: text) -> str:
    """The lines without styles."""
    return "".join(each(text) + "\n" for text, _ in lines)

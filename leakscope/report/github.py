"""The gate for GitHub Actions: annotations (workflow commands) and the summary of a job (Markdown).

https://docs.github.com/actions/reference/workflow-commands-for-github-actions. A log line is a command when it begins
with ``::`` (spaces before it do not count) or holds ``##[``: what comes from evidence must never look so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from leakscope.model.frames import parsed_frame
from leakscope.model.gate import Check, Gate, SiteChange
from leakscope.quantities import counted, exact, size
from leakscope.report.sarif import relative
from leakscope.report.text import printable

MAX_ANNOTATIONS = 10
"""Of errors, of warnings and of notices: GitHub shows so many of a step."""
MAX_ROWS = 50
MAX_CELL = 300
_COMMANDS = {"fail": "error", "inconclusive": "warning", "suppressed": "notice", "known": "notice"}
_TITLES = {"pass": "✅ No leak", "fail": "❌ Memory leaks", "inconclusive": "⚠️ Inconclusive"}
_MARKS = {"fail": "❌", "inconclusive": "⚠️", "suppressed": "🔕", "known": "📌", "pass": "✅"}


def annotation_lines(gate: Gate, root: str = "") -> Iterator[str]:
    """A workflow command for each check that did not pass, at the culprit's line where it lies below ``root``."""
    shown = dict.fromkeys(("error", "warning", "notice"), 0)
    left = 0
    for check in gate.checks:
        command = _COMMANDS.get(check.outcome, "")
        if not command:
            continue
        if shown[command] >= MAX_ANNOTATIONS:
            left += 1
            continue
        shown[command] += 1
        yield workflow_command(command, check.message, title=f"leakscope: {check.name}", **_place(check, root))
    if left:
        yield workflow_command("notice", f"{counted(left, 'more check')} did not pass: see the log", title="leakscope")


def _place(check: Check, root: str) -> dict[str, str]:
    _, file, line = parsed_frame(check.frame)
    inside = relative(file, root) if file else None
    if not inside:
        return {}
    return {"file": inside} | ({"line": str(line)} if line else {})


def workflow_command(name: str, message: str, **properties: str) -> str:
    """``::name key=value,…::message`` with everything escaped that would end one of its parts."""
    inside = ",".join(f"{key}={escaped_property(value)}" for key, value in properties.items() if value)
    return f"::{name} {inside}::{escaped_data(message)}" if inside else f"::{name}::{escaped_data(message)}"


def escaped_data(text: str) -> str:
    """The message of a command: ``%``, CR and LF escaped, other control characters shown."""
    kept = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return printable(kept)


def escaped_property(text: str) -> str:
    """A property of a command: ``:`` and ``,`` escaped as well."""
    return escaped_data(text).replace(":", "%3A").replace(",", "%2C")


def inert(line: str) -> str:
    """A line of other output that no runner takes for a command."""
    lead = len(line) - len(line.lstrip())
    if line[lead:].startswith("::"):
        line = f"{line[:lead]}: :{line[lead + 2 :]}"
    return line.replace("##[", "## [")


def summary(gate: Gate, evidence: Sequence[str] = ()) -> str:
    """The job's summary as Markdown (GitHub takes 1 MiB of a step; this stays far below)."""
    lines = [f"## {_TITLES[gate.result]}", ""]
    if evidence:
        lines += [f"`leakscope check` of {', '.join(_code(path) for path in evidence[:5])}", ""]
    difference = gate.difference
    if difference is not None:
        work = f"{difference.ratio:.2f} times its work ({_code(difference.unit)})"
        lines += [f"Against {_code(difference.baseline)}: head did {work}.", ""]
    lines += ["| | check | what |", "|---|---|---|"]
    lines += [
        f"| {_MARKS[c.outcome]} | {_cell(c.name)} | {_cell(c.message + (f' — {c.reason}' if c.reason else ''))} |"
        for c in gate.checks[:MAX_ROWS]
    ]
    if len(gate.checks) > MAX_ROWS:
        lines.append(f"\n… and {counted(len(gate.checks) - MAX_ROWS, 'more check')}")
    chains = [check for check in gate.of("fail") if check.chain or check.stack][:MAX_ROWS]
    for check in chains:
        lines += ["", f"<details><summary>{_cell(check.name)}</summary>", ""]
        lines += [f"1. {_code(frame)}" for frame in check.stack] or [f"{_code(check.chain)}"]
        lines += ["", "</details>"]
    if difference is not None and difference.changes:
        lines += ["", "### Sites that changed", "", "| | site | kept | same work before |", "|---|---|--:|--:|"]
        lines += [_change(change) for change in difference.changes[:MAX_ROWS]]
        if len(difference.changes) > MAX_ROWS:
            lines.append(f"\n… and {len(difference.changes) - MAX_ROWS:,} more")
    used = [one for one in gate.suppressions if one.used]
    if used:
        lines += ["", "### Suppressed", "", "| pattern | reason | kept |", "|---|---|--:|"]
        lines += [f"| {_cell('leak:' + s.pattern)} | {_cell(s.reason)} | {exact(s.bytes)} |" for s in used[:MAX_ROWS]]
    if gate.notes:
        lines += ["", *(f"- {_cell(note)}" for note in gate.notes[:MAX_ROWS])]
    return "\n".join(lines) + "\n"


def _change(change: SiteChange) -> str:
    frames = " → ".join(change.frames[-3:]) or change.kind
    before = size(change.expected_bytes) if change.expected_bytes else "—"
    return f"| {change.what} | {_cell(f'{change.layer}: {frames}')} | {size(change.kept_bytes)} | {before} |"


def _cell(text: str) -> str:
    """Text in a cell of a table: nothing in it is markup."""
    kept = printable(text)
    kept = kept if len(kept) <= MAX_CELL else f"{kept[: MAX_CELL - 1]}…"
    kept = kept.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*_[]|~#@!":
        kept = kept.replace(mark, f"&#{ord(mark)};") if mark != "#" else kept
    return kept


def _code(text: str) -> str:
    """Text as code, with a fence longer than any in it."""
    kept = printable(text)[:MAX_CELL].replace("|", "\\|") or " "
    longest, run = 0, 0
    for character in kept:
        run = run + 1 if character == "`" else 0
        longest = max(longest, run)
    fence = "`" * (longest + 1)
    pad = " " if kept.startswith("`") or kept.endswith("`") else ""
    return f"{fence}{pad}{kept}{pad}{fence}"

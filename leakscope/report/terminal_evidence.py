"""What stands behind a verdict on a terminal: inputs, joins, stores, losses, reconciliation; and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from leakscope.model.results import Report, Row, Verdict
from leakscope.quantities import counted, rate, size
from leakscope.report.cells import Column, cut, in_columns, packed, wrapped
from leakscope.report.imports import import_lines
from leakscope.report.joins import join_lines
from leakscope.report.stores import groups_table, store_lines
from leakscope.report.text import printable

LOSSES_SHOWN = 6
MISSING_SHOWN = 3
NAMED_PATHS = 3
"""Of evidence in a command to copy."""
INDENT = 3


def problem_lines(report: Report, width: int) -> Iterator[Text]:
    """What is wrong with the evidence itself."""
    for input_ in report.inputs:
        for problem in input_.get("problems", ()):
            yield from (Text(f"  {line}", "yellow") for line in wrapped(str(problem), width - 2))


def open_lines(verdict: Verdict, width: int) -> Iterator[Text]:
    """What a verdict leaves open that has no finding to say it: what was missing, the least that would have shown."""
    if verdict.culprit is not None and verdict.verdict != "not_leak":
        return
    if verdict.missing:
        more = len(verdict.missing) - MISSING_SHOWN
        said = [*verdict.missing[:MISSING_SHOWN], *([f"{more:,} more with --json"] if more > 0 else [])]
        yield from _indented(f"missing: {'; '.join(said)}", width)
    least = verdict.smallest_provable_bytes_per_s
    if least and math.isfinite(least):
        yield from _indented(f"the least growth that this evidence could prove: {rate(least)}", width)


def import_section(report: Report, width: int, whole: bool) -> Iterator[Text]:
    """What each file of another tool gave; not ``whole``: a line each, without what its kind can never say."""
    files = [input_ for input_ in report.inputs if "limits" in input_]
    for said in import_lines(files if whole else [file | {"limits": []} for file in files]):
        nested = said.startswith("  ")
        if not whole:
            yield Text((" " * INDENT if nested else "") + cut(said.strip(), width - INDENT), "dim" if nested else "")
            continue
        lead = " " * INDENT if nested else ""
        for line in wrapped(said.strip(), width - len(lead)):
            yield Text(lead + line, "dim" if nested else "")


def store_section(report: Report, width: int) -> Iterator[RenderableType]:
    """Audits of key-value stores."""
    for number, audit in enumerate(report.stores):
        first, *rest = store_lines(audit)
        if number:
            yield Text("")
        yield from (Text(line) for line in wrapped(first, width))
        yield groups_table(audit)
        for line in rest:
            yield from _indented(line, width)


def join_section(report: Report, width: int) -> Iterator[Text]:
    """What was joined with what, and how sure that is."""
    lines = list(join_lines(report))
    if lines:
        yield Text("joins:")
    for line in lines:
        yield from _indented(line.strip(), width, "dim" if line.startswith("  ") else "")


def loss_lines(losses: Sequence[Row], width: int, whole: bool) -> Iterator[Text]:
    """What is missing in the evidence; not ``whole``: by what is missing, most first, in few lines."""
    if not losses:
        yield Text("losses: none", "dim")
        return
    if whole:
        yield Text("losses:")
        for row in losses:
            value = "?" if row.value is None else f"{row.value:,}"
            yield from _indented(f"{row.source}: {row.what} {value}", width)
        return
    kinds: dict[str, list[Row]] = {}
    for row in losses:
        kinds.setdefault(row.what, []).append(row)
    ranked = sorted(kinds.items(), key=lambda item: -sum(row.value or 0 for row in item[1]))
    pieces = []
    for what, rows in ranked[:LOSSES_SHOWN]:
        value = "?" if all(row.value is None for row in rows) else f"{sum(row.value or 0 for row in rows):,}"
        sources = list(dict.fromkeys(row.source for row in rows))
        pieces.append(f"{value} {what} ({sources[0] if len(sources) == 1 else counted(len(sources), 'source')})")
    if len(ranked) > LOSSES_SHOWN:
        pieces.append(f"{len(ranked) - LOSSES_SHOWN:,} more kinds")
    lead = "losses: "
    for number, line in enumerate(packed(pieces, width - len(lead), "; ")):
        yield Text(f"{' ' * len(lead) if number else lead}{line}")


def reconciliation_lines(rows: Sequence[Row], width: int) -> Iterator[Text]:
    """Counters beside events, and what nobody explains."""
    if not rows:
        return
    columns = [Column("reconciliation", least=24)]
    columns += [Column(name, True) for name in ("counter", "events", "unexplained")]
    cells = []
    for index, row in enumerate(rows):
        if row.value is not None and index + 2 < len(rows) and rows[index + 2].what == "unexplained":
            kept, unexplained = rows[index + 1], rows[index + 2]
            values = (row.value, kept.value or 0, unexplained.value or 0)
            cells.append([f"{row.source}: {row.what}", *(size(value) for value in values)])
    if cells:
        yield from in_columns(columns, cells, width)
    for row in rows:
        if row.value is None:
            yield from (Text(line, "yellow") for line in wrapped(row.what, width))


def next_lines(report: Report, width: int) -> Iterator[Text]:
    """What to do next: commands that can be copied, so they are never cut or wrapped."""
    steps = next_steps(report)
    longest = max(len(command) for command, _ in steps)
    for command, why in steps:
        said = f"next: {command.ljust(longest) if longest + len(why) + 9 <= width else command}   {why}"
        yield Text(printable(said.rstrip()), "dim", no_wrap=True)


def next_steps(report: Report) -> list[tuple[str, str]]:
    """(command or advice, what for)."""
    paths = [str(input_.get("path", "")) for input_ in report.inputs]
    path = " ".join(_quoted(p) for p in paths) or "CAPTURE"
    if len(paths) > NAMED_PATHS:
        path = "EVIDENCE…"
    capture = next((str(i.get("path", "")) for i in report.inputs if "limits" not in i), "" if paths else "CAPTURE")
    steps: list[tuple[str, str]] = []
    if report.verdict.verdict == "inconclusive":
        steps.append(("record longer, or with a larger buffer where events were lost", ""))
    elif report.verdict.verdict == "leak" and report.sites and report.breakdown is None:
        by = "range" if any(site.ranges for site in report.sites) else "pid"
        steps.append((f"leakscope attribute {path} --by {by}", f"the same by {_BY[by]}"))
    steps.append((f"leakscope attribute {path} --json", "every site, chain and number"))
    if capture:
        steps.append((f'leakscope query {_quoted(capture)} "SELECT * FROM mem_events LIMIT 10"', ""))
    else:
        steps.append((f"leakscope import {path} -o CAPTURE", "to keep what was read, and query it"))
    return steps


_BY = {"range": "NVTX range", "pid": "process"}


def _quoted(path: str) -> str:
    return shlex.quote(path) if path.isprintable() else path


def _indented(text: str, width: int, style: str = "") -> Iterator[Text]:
    for line in wrapped(text, max(20, width - INDENT)):
        yield Text(f"{' ' * INDENT}{line}", style)


def left_out(names: Sequence[str], width: int) -> Iterator[Text]:
    """What a screen had no room for."""
    if names:
        yield Text(cut(f"more with --top 20: {', '.join(names)}", width), "dim")

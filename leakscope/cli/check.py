"""``leakscope check``: the gate of a pull request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakscope.cli.live import DurationOption
from leakscope.cli.options import (
    DEFAULT_MEMORY,
    LayerOption,
    MemoryOption,
    PidOption,
    ReportOption,
    WarmupOption,
    WrappersOption,
    wrapper_rules,
)
from leakscope.errors import BadInputError

if TYPE_CHECKING:
    from leakscope.detect.attribution import Options
    from leakscope.detect.profile import Profile
    from leakscope.gate.decide import Rules
    from leakscope.model.gate import Gate
    from leakscope.model.results import Report

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
WORKSPACE_VARIABLE = "GITHUB_WORKSPACE"


def check(
    evidence: Annotated[
        list[str],
        typer.Argument(
            metavar="EVIDENCE…",
            help="What 'leakscope attribute' takes: captures, packed ones, reports of others, live sources.",
            show_default=False,
        ),
    ],
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EVIDENCE",
            help="What to compare with: evidence of the same workload, or a file of 'leakscope baseline update'.",
        ),
    ] = None,
    budget: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Budgets by layer, site and counter, e.g. leakscope.toml.")
    ] = None,
    suppressions: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Lines of leak:PATTERN, each with a reason.")
    ] = None,
    allow_inconclusive: Annotated[
        bool, typer.Option("--allow-inconclusive", help="Pass where the evidence cannot tell.")
    ] = False,
    per: Annotated[
        str | None,
        typer.Option(
            metavar="UNIT",
            help="Work to compare by: a counter *_total, an NVTX range, allocations, seconds [default: the first of "
            "these that both runs have].",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print attribute's object plus 'gate'.")] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML too.")] = None,
    sarif: Annotated[Path | None, typer.Option(metavar="FILE", help="Write SARIF 2.1.0 too.")] = None,
    github: Annotated[
        bool,
        typer.Option("--github", help=f"Print annotations for GitHub Actions, and add to ${SUMMARY_VARIABLE}."),
    ] = False,
    summary: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a summary in Markdown too.")] = None,
    html: ReportOption = None,
    layer: LayerOption = None,
    pid: PidOption = None,
    warmup: WarmupOption = None,
    wrappers: WrappersOption = None,
    duration: DurationOption = None,
    memory: MemoryOption = DEFAULT_MEMORY,
) -> int:
    """Pass or fail on memory: exit 0 when nothing leaks, 1 when something does (or regressed, or is over its budget),
    3 when the evidence cannot tell.

    Alone, evidence is judged as 'leakscope attribute' does. With --baseline, what fails is what keeps more than there
    for the same work; leaks that the baseline has as well are told. Budgets are checked besides. The same inputs give
    the same output, byte for byte.
    """
    from leakscope.cli.outputs import require_place
    from leakscope.detect.attribution import Options
    from leakscope.gate.decide import decide

    for file in filter(None, (junit, sarif, summary, html)):
        require_place(file)
    rules = _rules(budget, suppressions or [], allow_inconclusive, per)
    if per is not None and not baseline:
        raise BadInputError(f"--per {per}: is the unit of a comparison; give a --baseline")
    options = Options(
        layer=layer, pid=pid, warm_up_s=warmup, wrappers=wrapper_rules(wrappers, budget), timelines=html is not None
    )
    base = profile(baseline, options, memory) if baseline else None
    report = judged(evidence, options, memory, duration)
    report, gate = decide(report, rules, base, " ".join(sorted(baseline or [])))
    _write(gate, sorted(evidence), junit, sarif, summary, github)
    if html is not None:
        from leakscope.cli.outputs import write_page
        from leakscope.report.html.gate import gate_page

        committed = next((name for name in baseline or [] if is_baseline_file(Path(name))), "")
        write_page(html, gate_page(report, gate, sorted(evidence), committed))
    _print(report, gate, sorted(evidence), as_json, github)
    return gate.exit_code


def _rules(budget: Path | None, suppressions: list[Path], allow_inconclusive: bool, per: str | None) -> Rules:
    from leakscope.cli.outputs import read_text
    from leakscope.gate import budgets
    from leakscope.gate import suppressions as of
    from leakscope.gate.decide import Rules

    rules = (
        budgets.parse_budgets(read_text(budget, budgets.MAX_BYTES, "file of budgets"), str(budget)) if budget else []
    )
    lines = [
        line
        for path in suppressions
        for line in of.parse_suppressions(read_text(path, of.MAX_BYTES, "file of suppressions"), str(path))
    ]
    return Rules(rules, lines, allow_inconclusive, per)


def judged(evidence: Sequence[str | Path], options: Options, memory: str, duration_s: float | None = None) -> Report:
    """The report of the evidence, its runs included. In whatever order it was named, it is read in one."""
    from leakscope.cli.attribute import report_of

    names = sorted(map(str, evidence))
    twice = next((name for name, other in pairwise(names) if name == other), None)
    if twice is not None:
        raise BadInputError(f"{twice}: given twice; its memory would count twice")
    return report_of(names, options, memory, duration_s, runs=True)


def profile(evidence: Sequence[str], options: Options, memory: str) -> Profile:
    """What the baseline keeps: of a baseline file, or of evidence."""
    from leakscope.detect.profile import profile_of

    for path in map(Path, evidence):
        if (file := baseline_file(path)) is not None:
            if len(evidence) > 1:
                raise BadInputError(f"{path}: is a baseline file, which stands for a whole run; give it alone")
            return file
    return profile_of(judged(evidence, options, memory))


def baseline_file(path: Path) -> Profile | None:
    """What a file of 'leakscope baseline' holds; None for all else. Raises BadInputError for a damaged one."""
    from leakscope.cli.outputs import read_text
    from leakscope.gate import baseline

    if not is_baseline_file(path):
        return None
    return baseline.parse_baseline(read_text(path, baseline.MAX_BYTES, "baseline file"), str(path))


def is_baseline_file(path: Path) -> bool:
    """Whether this is a file of 'leakscope baseline update'."""
    from leakscope.gate.baseline import looks_like_baseline

    return path.is_file() and looks_like_baseline(_begin(path))


def _begin(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror or error}") from None


def _write(
    gate: Gate, evidence: list[str], junit: Path | None, sarif: Path | None, summary: Path | None, github: bool
) -> None:
    """The files that were asked for. That of the job's summary is added to, as other steps write there as well."""
    from leakscope.cli.outputs import write_whole

    if junit is not None:
        from leakscope.report.junit import junit_xml

        write_whole(junit, junit_xml(gate))
    if sarif is not None:
        from leakscope.report.sarif import sarif_text

        write_whole(sarif, sarif_text(gate, evidence, _root()))
    job = os.environ.get(SUMMARY_VARIABLE, "") if github else ""
    if summary is not None or job:
        from leakscope.report.github import summary as markdown

        text = markdown(gate, evidence)
        if summary is not None:
            write_whole(summary, text)
        if job:
            with Path(job).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)


def _print(report: Report, gate: Gate, evidence: list[str], as_json: bool, github: bool) -> None:
    from leakscope.report.gate import gate_json, gate_lines
    from leakscope.report.github import annotation_lines, inert

    if as_json:
        json.dump(gate_json(report, gate), sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        from rich.text import Text

        from leakscope.report.console import ReportConsole

        console = ReportConsole()
        for line, style in gate_lines(report, gate, evidence, console.width):
            console.print(Text(inert(line) if github else line, style), soft_wrap=True)
    if github:
        for command in annotation_lines(gate, _root()):
            print(command, file=sys.stderr if as_json else sys.stdout)


def _root() -> str:
    return os.environ.get(WORKSPACE_VARIABLE) or str(Path.cwd())

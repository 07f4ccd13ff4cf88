"""``leakscope diff``: growth between two captures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from leakscope.cli import warn
from leakscope.cli.options import DEFAULT_MEMORY, LayerOption, MemoryOption, PidOption, WarmupOption


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="The evidence to compare with.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The evidence that is compared.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one object of schema leakscope-diff/1.")] = False,
    top: Annotated[int, typer.Option(min=0, help="Sites and counters to show.")] = 10,
    per: Annotated[
        str | None,
        typer.Option(
            metavar="UNIT",
            help="Work to compare by: a counter *_total, an NVTX range, allocations, seconds [default: the first of "
            "these that both runs have].",
        ),
    ] = None,
    layer: LayerOption = None,
    pid: PidOption = None,
    warmup: WarmupOption = None,
    memory: MemoryOption = DEFAULT_MEMORY,
) -> None:
    """Compare two runs: what B keeps and how fast it grows against A, by layer, site and counter.

    A and B are captures, packed ones too, or reports that import knows. Sites are the same where their code is, in
    whatever build. The exit code is 0 whatever is found: 'leakscope check B --baseline A' is the gate.
    """
    from leakscope.cli.attribute import report_of
    from leakscope.detect.attribution import Options
    from leakscope.detect.difference import difference

    options = Options(layer=layer, pid=pid, warm_up_s=warmup)
    reports = [report_of([path], options, memory, runs=True) for path in (a, b)]
    warn(
        f"{row.get('path', 'input')}: {problem}"
        for report in reports
        for row in report.inputs
        for problem in row.get("problems", ())
    )
    found = difference(reports[0], reports[1], per)
    if as_json:
        inputs = {"a": reports[0].inputs, "b": reports[1].inputs}
        json.dump(found.to_json() | {"inputs": inputs}, sys.stdout, indent=1, allow_nan=False)
        print()
        return
    from rich.text import Text

    from leakscope.report.console import ReportConsole
    from leakscope.report.diff import diff_lines

    console = ReportConsole()
    for line, style in diff_lines(found, (str(a), str(b)), top):
        console.print(Text(line, style), soft_wrap=True)

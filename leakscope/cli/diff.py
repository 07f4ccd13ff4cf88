"""``leakscope diff``: growth between two captures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from leakscope.cli import warn
from leakscope.cli.options import DEFAULT_MEMORY, LayerOption, MemoryOption, PidOption, WarmupOption
from leakscope.cli.outputs import require_place, write_page
from leakscope.errors import BadInputError


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
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write a page too: one HTML file, works without network."),
    ] = None,
    layer: LayerOption = None,
    pid: PidOption = None,
    warmup: WarmupOption = None,
    memory: MemoryOption = DEFAULT_MEMORY,
) -> None:
    """Compare two runs: what B keeps and how fast it grows against A, by layer, site and counter.

    A and B are captures, packed ones too, or reports that import knows; A may be a file of 'leakscope baseline
    update'. Sites are the same where their code is, in whatever build. The exit code is 0 whatever is found:
    'leakscope check B --baseline A' is the gate.
    """
    from leakscope.cli.attribute import report_of
    from leakscope.cli.check import baseline_file
    from leakscope.detect.attribution import Options
    from leakscope.detect.difference import difference

    if page is not None:
        require_place(page)
    if baseline_file(b):
        raise BadInputError(
            f"{b}: is a baseline file, which does not say when its sites allocated; it can be A: leakscope diff {b} {a}"
        )
    options = Options(layer=layer, pid=pid, warm_up_s=warmup)
    before = baseline_file(a)
    if before and (layer or pid is not None):
        raise BadInputError(f"{a}: is a baseline file, of which --layer and --pid cannot take a part")
    reports = [report_of([path], options, memory, runs=True) for path in ((b,) if before else (a, b))]
    warn(
        f"{row.get('path', 'input')}: {problem}"
        for report in reports
        for row in report.inputs
        for problem in row.get("problems", ())
    )
    found = difference(before or reports[0], reports[-1], per)
    of_a = [{"path": str(a), "kind": "baseline"}] if before else reports[0].inputs
    if page is not None:
        from leakscope.report.html.diff import diff_page

        losses = ([] if before else reports[0].losses, reports[-1].losses)
        write_page(page, diff_page(found, (str(a), str(b)), (of_a, reports[-1].inputs), losses))
    if as_json:
        inputs = {"a": of_a, "b": reports[-1].inputs}
        json.dump(found.to_json() | {"inputs": inputs}, sys.stdout, indent=1, allow_nan=False)
        print()
        return
    from rich.text import Text

    from leakscope.report.console import ReportConsole
    from leakscope.report.diff import diff_lines

    console = ReportConsole()
    for line, style in diff_lines(found, (str(a), str(b)), top):
        console.print(Text(line, style), soft_wrap=True)

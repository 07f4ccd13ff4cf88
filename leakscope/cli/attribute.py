"""``leakscope attribute``: what leaks, who caused it, and how sure that is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakscope.errors import BadInputError, ExitCode
from leakscope.model.words import LAYERS

if TYPE_CHECKING:
    from leakscope.detect.attribution import Options
    from leakscope.model.results import Report

DEFAULT_MEMORY = "2GiB"


def attribute(
    evidence: Annotated[
        list[Path],
        typer.Argument(metavar="EVIDENCE…", help="Captures, packed captures too.", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one object of schema leakscope-report/1.")] = False,
    top: Annotated[int, typer.Option(min=0, help="Sites to list besides those of the findings.")] = 10,
    layer: Annotated[str | None, typer.Option(help=f"Only this layer: {', '.join(LAYERS)}.")] = None,
    pid: Annotated[int | None, typer.Option("--pid", "-p", min=0, help="Only memory of this process.")] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Seconds of each process's life to leave out; default a fifth of it.",
        ),
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 0 for no leak, 1 for a leak, 3 if inconclusive.")
    ] = False,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for sums over events; beyond it they go to disk.")
    ] = DEFAULT_MEMORY,
) -> int:
    """Say what leaks, who caused it, and how sure that is: the verdict first, then chains of calls down to
    the bytes, sites, losses, and how far counters agree.

    Memory of a process counts as kept when its exit begins; of short-lived ones only what outlives them.
    """
    from leakscope.detect.attribution import Options

    if layer is not None and layer not in LAYERS:
        raise BadInputError(f"--layer {layer}: no such layer; the layers are {', '.join(LAYERS)}")
    report = _report(evidence, Options(layer=layer, pid=pid, warm_up_s=warmup, chains=max(top, 20)), memory)
    if as_json:
        from leakscope.report.json import report_json

        json.dump(report_json(report), sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        from rich.console import Console

        from leakscope.report.terminal import print_report

        print_report(Console(highlight=False), report, top)
    if not exit_code:
        return ExitCode.DONE
    codes = {"leak": ExitCode.LEAK_FOUND, "inconclusive": ExitCode.INCONCLUSIVE}
    return codes.get(report.verdict.verdict, ExitCode.DONE)


def _report(evidence: list[Path], options: Options, memory: str) -> Report:
    import duckdb

    from leakscope.capture import Capture
    from leakscope.detect.attribution import attribute as attribute_capture
    from leakscope.detect.combine import combine

    reports = []
    for path in evidence:
        try:
            capture = Capture.open(path)
        except BadInputError as error:
            if not path.exists():
                raise
            raise BadInputError(f"{error}; attribute reads captures and packed captures so far") from None
        try:
            with capture.connect(memory_limit=memory) as connection:
                report = attribute_capture(connection, capture.manifest, options)
        except duckdb.Error as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadInputError(f"{path}: cannot be attributed: {line}") from None
        report.inputs = [
            {
                "path": str(path),
                "kind": "capture",
                "complete": capture.manifest.complete,
                "mem_events": capture.rows("mem_events"),
                "command": next((s.command for s in capture.manifest.sources if s.command), []),
                "problems": capture.problems,
            }
        ]
        reports.append(report)
    return combine(reports)

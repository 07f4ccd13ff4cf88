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
    from leakscope.capture import Capture
    from leakscope.detect.attribution import Options
    from leakscope.model.results import Report

DEFAULT_MEMORY = "2GiB"


def attribute(
    evidence: Annotated[
        list[Path],
        typer.Argument(
            metavar="EVIDENCE…", help="Captures, packed ones too, and reports that import knows.", show_default=False
        ),
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
    from leakscope.detect.combine import combine
    from leakscope.ingest import kind_of

    missing = next((path for path in evidence if not path.exists()), None)
    if missing is not None:
        raise BadInputError(f"{missing}: no such file or capture")
    files = [path for path in evidence if kind_of(path) is not None]
    reports = [_of_capture(path, options, memory) for path in evidence if path not in files]
    return combine([*reports, *_of_files(files, options, memory, alone=not reports)])


def _of_capture(path: Path, options: Options, memory: str) -> Report:
    from leakscope.capture import Capture

    try:
        capture = Capture.open(path)
    except BadInputError as error:
        raise BadInputError(f"{error}; nor is it a report that 'leakscope import' knows") from None
    report = _attributed(capture, path, options, memory)
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
    return report


def _of_files(files: list[Path], options: Options, memory: str, alone: bool) -> list[Report]:
    """The report of reports of other tools, imported together for this once; [] for no files.

    Beside captures, files without memory events give no verdict of their own.
    """
    if not files:
        return []
    import secrets
    from dataclasses import replace

    from leakscope.capture import Capture
    from leakscope.capture.reader import scratch_directory
    from leakscope.ingest import Options as ImportOptions
    from leakscope.ingest import import_files

    path = Path(scratch_directory()) / f"imported-{secrets.token_hex(4)}.lscope"
    imported = import_files(files, path, ImportOptions(pid=options.pid))
    capture = Capture.open(path)
    report = _attributed(capture, files[0], options, memory)
    report.inputs = [file.to_json() | {"mem_events": file.rows.get("mem_events", 0)} for file in imported]
    if not capture.rows("mem_events") and not alone:
        report.judged = False
    said = tuple(f"{file.path.name}: {finding}" for file in imported for finding in file.findings)
    report.verdict = replace(report.verdict, missing=(*report.verdict.missing, *said))
    return [report]


def _attributed(capture: Capture, path: Path, options: Options, memory: str) -> Report:
    import duckdb

    from leakscope.detect.evidence import attribute_evidence

    try:
        with capture.connect(memory_limit=memory) as connection:
            return attribute_evidence(connection, capture.manifest, options)
    except duckdb.Error as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInputError(f"{path}: cannot be attributed: {line}") from None

"""``leakscope attribute``: what leaks, who caused it, and how sure that is."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.cli.live import DurationOption, PoolOption
from leakscope.cli.options import (
    DEFAULT_MEMORY,
    LayerOption,
    MemoryOption,
    PidOption,
    WarmupOption,
    WrappersOption,
    wrapper_rules,
)
from leakscope.errors import BadInputError, ExitCode

if TYPE_CHECKING:
    from leakscope.capture import Capture
    from leakscope.cli.evidence import Gathered
    from leakscope.detect.attribution import Options
    from leakscope.model.results import Report


def attribute(
    evidence: Annotated[
        list[str],
        typer.Argument(
            metavar="EVIDENCE…",
            help="Captures, packed ones too, reports that import knows, and live sources (tcp://HOST:PORT of KV "
            "events, redis://…, memcached://…, http://…/metrics).",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one object of schema leakscope-report/1.")] = False,
    top: Annotated[int, typer.Option(min=0, help="Sites to list besides those of the findings.")] = 10,
    layer: LayerOption = None,
    pid: PidOption = None,
    warmup: WarmupOption = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 0 for no leak, 1 for a leak, 3 if inconclusive.")
    ] = False,
    chains: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the chains as a graph too: .json (node-link), .graphml or .dot."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write a page to look at too: one HTML file without network."),
    ] = None,
    kernel_window_us: Annotated[
        float, typer.Option(min=0, metavar="µS", help="How near a kernel allocation must be to a call of its process.")
    ] = 50,
    gpu_window_us: Annotated[
        float, typer.Option(min=0, metavar="µS", help="The same for a kernel launch, its latency included.")
    ] = 100,
    stack_frames: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Innermost frames that must agree where stacks are joined.")
    ] = 3,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Forecast when leaks reach this; default the limit of the control group."),
    ] = None,
    wrappers: WrappersOption = None,
    duration: DurationOption = None,
    pool_blocks: PoolOption = None,
    memory: MemoryOption = DEFAULT_MEMORY,
) -> int:
    """Say what leaks, who caused it, and how sure that is: the verdict first, then chains of calls down to
    the bytes, sites, losses, and how far counters agree.

    Memory of a process counts as kept when its exit begins; of short-lived ones only what outlives them.
    """
    from leakscope.correlate.joins.driver import JoinOptions
    from leakscope.detect.attribution import Options
    from leakscope.quantities import size_bytes

    if chains is not None:
        from leakscope.report.chain_graph import write_graph, writer_of

        writer_of(chains)  # a wrong suffix is said before the work
    if page is not None:
        from leakscope.cli.outputs import require_place

        require_place(page)
    how = JoinOptions(round(kernel_window_us * 1000), round(gpu_window_us * 1000), stack_frames)
    limit_bytes = size_bytes(limit, "--limit") if limit else None
    options = Options(
        layer, pid, warmup, max(top, 20), how, limit_bytes, wrapper_rules(wrappers), timelines=page is not None
    )
    report = report_of(evidence, options, memory, duration, pool_blocks)
    if chains is not None:
        write_graph(report.chains, chains)
    if page is not None:
        from leakscope.cli.outputs import write_page
        from leakscope.report.html.attribution import attribution_page

        write_page(page, attribution_page(report))
    if as_json:
        from leakscope.report.json import report_json

        json.dump(report_json(report), sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        from leakscope.report.console import ReportConsole
        from leakscope.report.terminal import print_report

        print_report(ReportConsole(), report, top)
    if not exit_code:
        return ExitCode.DONE
    codes = {"leak": ExitCode.LEAK_FOUND, "inconclusive": ExitCode.INCONCLUSIVE}
    return codes.get(report.verdict.verdict, ExitCode.DONE)


def report_of(
    evidence: Sequence[str | Path],
    options: Options,
    memory: str,
    duration_s: float | None = None,
    pool_blocks: int | None = None,
    *,
    runs: bool = False,
    gathered: Gathered | None = None,
) -> Report:
    """The report of everything together. Files of other tools and live sources go into a capture for this once; beside
    captures, those without memory events give no verdict of their own. ``runs``: also what the runs did. ``gathered``:
    the evidence, where it is open already."""
    from contextlib import ExitStack
    from dataclasses import replace

    import duckdb

    from leakscope.cli.evidence import gather
    from leakscope.detect.combine import combine
    from leakscope.detect.runs import run_of
    from leakscope.detect.together import attribute_together

    gathered = gathered or gather(evidence, duration_s, pool_blocks, options.pid)
    captures, imported = gathered.captures, gathered.imported
    inputs = [[_input(capture, path)] for capture, path in zip(captures, gathered.paths, strict=False)]
    if imported:
        inputs.append([file.to_json() | {"mem_events": file.rows.get("mem_events", 0)} for file in imported])
    try:
        with ExitStack() as stack:
            opened = [(stack.enter_context(c.connect(memory_limit=memory)), c.manifest) for c in captures]
            reports = attribute_together(opened, options)
            for report, (con, manifest) in zip(reports, opened, strict=True):
                report.runs = [run_of(con, manifest)] if runs else []
    except duckdb.Error as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInputError(f"{', '.join(map(str, evidence))}: cannot be attributed: {line}") from None
    for report, of_report in zip(reports, inputs, strict=True):
        report.inputs = of_report
    if imported:
        if not captures[-1].rows("mem_events") and gathered.paths:
            reports[-1].judged = False
        said = tuple(f"{file.source.name}: {finding}" for file in imported for finding in file.findings)
        verdict = reports[-1].verdict
        reports[-1].verdict = replace(verdict, missing=(*verdict.missing, *said))
    return combine(reports)


def _input(capture: Capture, path: Path) -> dict[str, Any]:
    return {
        "path": str(path),
        "kind": "capture",
        "complete": capture.manifest.complete,
        "mem_events": capture.rows("mem_events"),
        "command": next((s.command for s in capture.manifest.sources if s.command), []),
        "problems": capture.problems,
    }

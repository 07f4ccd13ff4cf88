"""``leakscope liveness``: who keeps memory alive, what is only still resident, what nobody uses any more."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from leakscope.cli.evidence import opened_evidence
from leakscope.cli.live import DurationOption, PoolOption
from leakscope.cli.options import DEFAULT_MEMORY, MemoryOption, ReportOption
from leakscope.cli.outputs import require_place, write_page
from leakscope.quantities import seconds


def liveness(
    evidence: Annotated[
        list[str],
        typer.Argument(
            metavar="EVIDENCE…",
            help="Captures, packed ones too, files that import knows, and live sources (tcp://HOST:PORT of KV events, "
            "redis://…, memcached://…).",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one object of schema leakscope-liveness/1.")] = False,
    graphml: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the graph as GraphML too.")] = None,
    dot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the part of the graph that retains most as DOT too.")
    ] = None,
    report: ReportOption = None,
    why: Annotated[
        list[str] | None,
        typer.Option(metavar="OBJECT", help="Say why an object is alive: paths from who holds it. May be repeated."),
    ] = None,
    stale_after: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Held or not touched for longer is stale: 30s, 5m [default: what holds that were given up took, "
            "else 30s].",
            show_default=False,
        ),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="TTL of objects whose source tells none, from their birth on [default: not known].",
            show_default=False,
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=0, max=100, help="Times at which the classes are told.")] = 8,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Keepers and stale objects to list.")] = 20,
    duration: DurationOption = None,
    pool_blocks: PoolOption = None,
    memory: MemoryOption = DEFAULT_MEMORY,
) -> None:
    """Say who keeps memory alive: classes of objects, holders and what they retain, what is held or allocated and not
    used, why an object is alive."""
    from leakscope.detect.kv_cache import inferred_holds
    from leakscope.liveness.analyse import Options, analyse

    if report is not None:
        require_place(report)
    options = Options(
        stale_after_s=None if stale_after is None else seconds(stale_after, "--stale-after"),
        ttl_s=None if ttl is None else seconds(ttl, "--ttl"),
        windows=windows,
        top=top,
        why=tuple(why or ()),
        inferred=(inferred_holds,),
    )
    with opened_evidence(evidence, memory, duration, pool_blocks) as (captures, inputs):
        found, graph = analyse(captures, options)
    found.inputs = inputs
    if graphml is not None or dot is not None:
        from leakscope.report.liveness_graph import write_dot, write_graphml

        if graphml is not None:
            write_graphml(graph, graphml)
        if dot is not None:
            write_dot(graph, dot)
    if report is not None:
        from leakscope.liveness.overview import overview
        from leakscope.report.html.liveness import liveness_page

        write_page(report, liveness_page(found, overview(graph, found.ends_ns), top))
    if as_json:
        from leakscope.report.liveness import liveness_json

        json.dump(liveness_json(found, graph), sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        from leakscope.report.console import ReportConsole
        from leakscope.report.liveness import print_liveness

        print_liveness(ReportConsole(), found, top)

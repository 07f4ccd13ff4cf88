"""``leakscope liveness``: who keeps memory alive, what is only still resident, what nobody uses any more."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.cli.live import DurationOption, PoolOption, collect_sources, split_evidence
from leakscope.cli.quantities import seconds
from leakscope.errors import BadInputError

if TYPE_CHECKING:
    from leakscope.liveness.analyse import Options
    from leakscope.liveness.graph import Graph
    from leakscope.model.liveness import Liveness

DEFAULT_MEMORY = "2GiB"


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
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for sums over events; beyond it they go to disk.")
    ] = DEFAULT_MEMORY,
) -> None:
    """Say who keeps memory alive: classes of objects, holders and what they retain, what is held or allocated and not
    used, why an object is alive."""
    from leakscope.detect.kv_cache import inferred_holds
    from leakscope.liveness.analyse import Options

    options = Options(
        stale_after_s=None if stale_after is None else seconds(stale_after, "--stale-after"),
        ttl_s=None if ttl is None else seconds(ttl, "--ttl"),
        windows=windows,
        top=top,
        why=tuple(why or ()),
        inferred=(inferred_holds,),
    )
    found, graph = _analysed(evidence, options, memory, duration, pool_blocks)
    if graphml is not None or dot is not None:
        from leakscope.report.liveness_graph import write_dot, write_graphml

        if graphml is not None:
            write_graphml(graph, graphml)
        if dot is not None:
            write_dot(graph, dot)
    if as_json:
        from leakscope.report.liveness import liveness_json

        json.dump(liveness_json(found, graph), sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        from rich.console import Console

        from leakscope.report.liveness import print_liveness

        print_liveness(Console(highlight=False), found, top)


def _analysed(
    evidence: Sequence[str | Path],
    options: Options,
    memory: str,
    duration_s: float | None = None,
    pool_blocks: int | None = None,
) -> tuple[Liveness, Graph]:
    """The liveness of everything together; files of other tools and live sources go into a capture for this once."""
    import secrets
    from contextlib import ExitStack

    import duckdb

    from leakscope.capture import Capture
    from leakscope.capture.reader import scratch_directory
    from leakscope.ingest import Options as ImportOptions
    from leakscope.ingest import import_files, kind_of
    from leakscope.liveness.analyse import analyse

    addresses, given = split_evidence(evidence)
    missing = next((path for path in given if not path.exists()), None)
    if missing is not None:
        raise BadInputError(f"{missing}: no such file or capture")
    files = [path for path in given if kind_of(path) is not None]
    paths = [path for path in given if path not in files]
    captures = [_opened(path) for path in paths]
    inputs: list[dict[str, Any]] = [
        {"path": str(path), "kind": "capture", "problems": capture.problems}
        for path, capture in zip(paths, captures, strict=True)
    ]
    if files or addresses:
        scratch = Path(scratch_directory()) / f"imported-{secrets.token_hex(4)}.lscope"
        imported = collect_sources(addresses, scratch, duration_s)
        imported += import_files(files, scratch, ImportOptions(pool_blocks=pool_blocks)) if files else []
        inputs += [file.to_json() for file in imported]
        captures.append(Capture.open(scratch))
    try:
        with ExitStack() as stack:
            opened = [(stack.enter_context(c.connect(memory_limit=memory)), c.manifest) for c in captures]
            found, graph = analyse(opened, options)
    except duckdb.Error as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInputError(f"{', '.join(map(str, evidence))}: cannot be analysed: {line}") from None
    found.inputs = inputs
    return found, graph


def _opened(path: Path) -> Any:
    from leakscope.capture import Capture

    try:
        return Capture.open(path)
    except BadInputError as error:
        raise BadInputError(f"{error}; nor is it a report that 'leakscope import' knows") from None

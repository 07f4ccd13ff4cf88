"""``leakscope import``: reports of other tools into a capture."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from leakscope.cli.live import DurationOption, PoolOption, collect_sources, name_of, split_evidence
from leakscope.errors import BadInputError
from leakscope.report.text import printable

SUFFIX = ".lscope"
BAR_BYTES = 8 << 20
"""Smaller files are read before a bar could be seen."""


def import_(
    evidence: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…",
            help="Reports to import, and live sources: tcp://HOST:PORT of KV events, redis://…, "
            "memcached://…, http://…/metrics.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="CAPTURE", help="The capture to make or to add to [default: FILE.lscope, here]."
        ),
    ] = None,
    pid: Annotated[int | None, typer.Option(min=0, help="The process that a PyTorch snapshot is of.")] = None,
    tz: Annotated[
        str | None, typer.Option(metavar="ZONE", help="Time zone of local times: Europe/Berlin or +02:00.")
    ] = None,
    number_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="Numbers of ncu --csv, where they are ambiguous: point (1,234.5) or comma."
        ),
    ] = None,
    duration: DurationOption = None,
    pool_blocks: PoolOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object instead of text.")] = False,
) -> None:
    """Import reports into a new capture or one that exists: Nsight Compute reports and ncu --csv, Nsight Systems
    exports (.sqlite), PyTorch memory snapshots, output of memleak, dumps of /proc/slabinfo.

    What a file is, is told by its content. When one of the files cannot be used, nothing is imported.
    """
    from leakscope.ingest import Options, import_files, refuse_unknown
    from leakscope.report.imports import import_lines

    addresses, files = split_evidence(evidence)
    target = output or Path((files[0].name if files else name_of(addresses[0])) + SUFFIX)
    if output is None and target.exists():
        raise BadInputError(f"{target}: exists already; add to it with -o {target}, or choose another name with -o")
    options = Options(pid=pid, tz=tz, number_format=number_format, pool_blocks=pool_blocks)
    refuse_unknown(files)
    imported = collect_sources(addresses, target, duration)
    if files:
        with _progress(files) as progress:
            imported += import_files(files, target, options, progress)
    described = [file.to_json() for file in imported]
    if as_json:
        json.dump({"capture": str(target), "files": described}, sys.stdout, indent=1, allow_nan=False)
        print()
        return
    for line in import_lines(described):
        print(line)
    print(printable(f"{target}  (next: leakscope attribute {target})"))


@contextlib.contextmanager
def _progress(files: list[Path]) -> Iterator[Callable[[Path, int, int], None] | None]:
    """A bar a file on stderr, where that is a terminal and a file is large; else None."""
    if not sys.stderr.isatty() or not any(f.is_file() and f.stat().st_size >= BAR_BYTES for f in files):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {path: bars.add_task(printable(path.name)[:40], total=None) for path in files}
        yield lambda path, done, total: bars.update(tasks[path], completed=done, total=total)

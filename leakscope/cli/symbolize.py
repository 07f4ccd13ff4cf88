"""``leakscope symbolize``: names and lines for a capture's native frames, after the fact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakscope.cli import warn
from leakscope.errors import BadInputError

if TYPE_CHECKING:
    from leakscope.capture import Capture

TABLES = ("frames", "stacks")


def symbolize(
    capture: Annotated[Path, typer.Argument(help="A capture directory, or with -o a packed capture.")],
    debug_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--debug-dir",
            help="A directory of ELF files: DIR/.build-id/ab/cdef.debug, or anywhere below it. May be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The capture to make [default: change CAPTURE in place].")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the capture OUTPUT if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find names, lines and inlined functions of a capture's native frames by build id.

    Needs no root and not the machine of the recording: modules and their separate debug files are looked for in
    --debug-dir, then at their own paths and in /usr/lib/debug of this machine; the build id has to be the same.
    Nothing is downloaded. Lines need libdw1 (elfutils). The old capture or the new one is there at any moment.
    """
    from leakscope.capture import Capture
    from leakscope.capture.rewrite import replace_tables
    from leakscope.report.symbols import symbolized_json, symbolized_text
    from leakscope.symbols.debug_files import DebugDirectories, SymbolFinder, recorded_segments
    from leakscope.symbols.dwarf_worker import DwarfWorker
    from leakscope.symbols.symbolize import symbolize as resolve

    for directory in debug_dir or []:
        if not directory.is_dir():
            raise BadInputError(f"{directory}: --debug-dir is not a directory")
    if capture.is_file() and output is None:
        raise BadInputError(f"{capture}: a packed capture cannot be changed in place; name the capture to make with -o")
    opened = Capture.open(capture)
    warn(opened.problems)
    _refuse_damaged(opened)
    directories = DebugDirectories(debug_dir or [])
    segments = recorded_segments(source.facts for source in opened.manifest.sources)
    with DwarfWorker() as worker:
        frames, stacks, result = resolve(
            opened.table("frames"), opened.table("stacks"), SymbolFinder(directories).find, segments, worker
        )
    result.problems += directories.problems
    warn(result.problems)
    place = opened.path if output is None else output
    if result.changed or output is not None:
        replace_tables(opened.path, opened.manifest, {"frames": frames, "stacks": stacks}, output, force=force)
    print(json.dumps(symbolized_json(result, str(place))) if as_json else symbolized_text(result, str(place)))


def _refuse_damaged(capture: Capture) -> None:
    """A damaged part of what is written anew would be lost for good."""
    for line in capture.left_out:
        if line.startswith(tuple(f"{table}/" for table in TABLES)):
            raise BadInputError(f"{capture.path}: not changed: {line}")

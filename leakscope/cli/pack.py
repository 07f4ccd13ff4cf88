"""``leakscope pack`` and ``leakscope unpack``: one file of a capture, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leakscope.cli import warn
from leakscope.errors import BadInputError
from leakscope.report.text import printable

SUFFIX = ".tar"


def pack(
    capture: Annotated[Path, typer.Argument(help="A capture directory.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The file to make [default: the capture's name + .tar, here]."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Make one file of a capture, e.g. to keep it as a CI artefact.

    The file is a plain tar (its parts are compressed already), and the same capture always gives the same
    bytes. The verbs that read captures read packed ones too.
    """
    from leakscope import capture as captures

    if capture.is_file():
        raise BadInputError(f"{capture}: is one file already")
    opened = captures.Capture.open(capture)
    warn(opened.problems)
    target = output or Path(capture.resolve().name + SUFFIX)
    captures.pack(opened, target, force=force)
    print(printable(str(target)))


def unpack(
    file: Annotated[Path, typer.Argument(help="A packed capture.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The capture directory to make [default: the name without .tar]."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the capture if it exists.")] = False,
    max_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Refuse a file that holds more bytes than this [default: 64 GiB]."),
    ] = None,
) -> None:
    """Make a capture directory of a packed capture.

    Every member is checked (its path, type, size and checksum) before the directory appears.
    """
    from leakscope import capture as captures

    if output is None and not file.name.endswith(SUFFIX):
        raise BadInputError(f"{file}: name the capture directory to make with -o")
    target = output or Path(file.name.removesuffix(SUFFIX))
    captures.unpack(file, target, force=force, max_bytes=max_bytes or captures.MAX_UNPACKED_BYTES)
    print(printable(str(target)))

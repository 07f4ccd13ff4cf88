"""Files that a verb writes besides what it prints: whole or not at all."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from leakscope.errors import BadInputError
from leakscope.quantities import size
from leakscope.report.text import printable


def require_place(path: Path) -> None:
    """Raise BadInputError where no file can be written, so that it is said before the work."""
    if not path.parent.is_dir():
        raise BadInputError(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise BadInputError(f"{path}: is a folder; name a file")


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename it into place; into a device or pipe as it is.

    Raises BadInputError where there is no such folder, OSError where the disk is full; what was at ``path`` is then as
    before.
    """
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_page(path: Path, page: str) -> None:
    """As :func:`write_whole`, and say on stderr where it is."""
    write_whole(path, page)
    print(f"report: {printable(str(path))} ({size(len(page.encode()))}); open it in a browser", file=sys.stderr)


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to, renamed to it at the end; a device or pipe itself.

    Whatever is raised inside, a file at ``path`` is as before. Raises BadInputError where there is no such folder.
    """
    from leakscope.capture.place import aside_of

    require_place(path)
    if path.exists() and not path.is_file():
        yield path
        return
    aside = aside_of(path)
    try:
        yield aside
        aside.replace(path.resolve())
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def read_text(path: Path, most_bytes: int, what: str) -> str:
    """The text of a small file. Raises BadInputError when it is missing, too large, or no UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror or error}") from None
    if len(data) > most_bytes:
        raise BadInputError(f"{path}: larger than {most_bytes:,} bytes; no {what} is")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: not UTF-8 text (byte {error.start:,}); no {what}") from None

"""Text in the cells of a terminal: as wide as it is shown, cut in the middle, packed into lines, in columns.

A CJK character takes two cells, a combining mark none: lengths of strings say nothing about columns. Everything here
takes untrusted text and shows its control characters as escapes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells
from rich.text import Text

from leakscope.report.text import printable

_PLACE = re.compile(r"^(?P<function>.*) \((?P<file>[^()]+?)(?P<line>:\d+)?\)$", re.DOTALL)
_BETWEEN_WORDS = re.compile(r" (?!(?:[KMGTP]i)?B\b)")
_LONG_PATH = 40
_LEAST_FUNCTION = 12
MAX_MARKS = 3
"""Combining marks that a character may carry: more would be stacked over the lines above and below."""


def shown(text: str) -> str:
    """``text`` with control characters as escapes and without endless combining marks."""
    text = printable(text)
    if text.isascii():
        return text
    kept: list[str] = []
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.combining(character) else 0
        if marks <= MAX_MARKS:
            kept.append(character)
    return "".join(kept)


def cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells, its middle replaced by ``…`` where it is longer."""
    text = shown(text)
    if cell_len(text) <= width:
        return text
    if width < 3:
        return "…"[:width]
    head = (width - 1) - (width - 1) // 2
    return f"{_first(text, head)}…{_last(text, width - 1 - head)}"


def short_frame(frame: str, width: int | None = None) -> str:
    """``f (…/callproc.c:9)`` for a frame whose path is long; JSON has all of it.

    Where that is wider than ``width`` cells the rest is cut in the middle too: the line is the last to go.
    """
    match = _PLACE.match(shown(frame))
    if not match:
        return cut(frame, width) if width is not None else shown(frame)
    function, file, line = match["function"], match["file"], match["line"] or ""
    if width is not None and cell_len(match[0]) <= width and len(file) < _LONG_PATH:
        return match[0]
    name = file.rpartition("/")[2]
    if len(file) + len(line) >= _LONG_PATH or (width is not None and cell_len(match[0]) > width):
        file = f"…/{name}" if name != file else file
    text = f"{function} ({file}{line})"
    if width is None or cell_len(text) <= width:
        return text
    place = f" ({name}{line})"
    if width - cell_len(place) < _LEAST_FUNCTION:
        place = f" ({cut(name, max(8, width // 3))}{line})"
    if width - cell_len(place) < _LEAST_FUNCTION:
        return cut(text, width)
    return cut(function, width - cell_len(place)) + place


def bare_frame(frame: str) -> str:
    """``f (callproc.c:9)``: a frame without the folders of its file."""
    match = _PLACE.match(shown(frame))
    if not match:
        return shown(frame)
    return f"{match['function']} ({match['file'].rpartition('/')[2]}{match['line'] or ''})"


def packed(pieces: Iterable[str], width: int, joint: str) -> list[str]:
    """``pieces`` with ``joint`` between them in lines of at most ``width`` cells.

    A line breaks only behind a joint; a piece that is wider than a line is cut.
    """
    lines: list[str] = []
    line = ""
    for piece in (cut(piece, width - cell_len(joint.rstrip())) for piece in pieces):
        longer = f"{line}{joint}{piece}" if line else piece
        if line and cell_len(longer) > width - cell_len(joint.rstrip()):
            lines.append(line + joint.rstrip())
            line = piece
        else:
            line = longer
    return [*lines, line] if line else lines


def wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` cells, broken between words, not before a unit; a wider word is broken."""
    lines: list[str] = []
    line = ""
    for word in _BETWEEN_WORDS.split(shown(text)):
        longer = f"{line} {word}" if line else word
        if cell_len(longer) <= width:
            line = longer
            continue
        if line:
            lines.append(line)
        *whole, line = chop_cells(word, width) or [""]
        lines += whole
    return [*lines, line] if line else lines


@dataclass(frozen=True)
class Column:
    """A column: ``right`` for numbers; ``least`` cells that a text column keeps when the line is too long."""

    name: str
    right: bool = False
    least: int = 0  # 0: never cut
    frames: bool = False  # cells are frames, which are cut where it hurts least
    optional: int = 0  # left out where there is no room, the highest first; 0: never


def in_columns(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[Text]:
    """A table as lines of text: no boxes, columns as wide as their cells, the widest that may be cut are cut to fit.

    The first line is the header. Cells may be cut, never wrapped: a row is a line.
    """
    cells = [[shown(cell) for cell in row] for row in rows]
    widths = [max([cell_len(c.name), *(cell_len(row[i]) for row in cells)]) for i, c in enumerate(columns)]
    needed = [min(w, max(c.least, cell_len(c.name))) if c.least else w for w, c in zip(widths, columns, strict=True)]
    if sum(needed) + 2 * (len(columns) - 1) > width and any(c.optional for c in columns):
        last = max(range(len(columns)), key=lambda i: columns[i].optional)
        kept = [i for i in range(len(columns)) if i != last]
        return in_columns([columns[i] for i in kept], [[row[i] for i in kept] for row in rows], width)
    while (over := sum(widths) + 2 * (len(columns) - 1) - width) > 0:
        able = [i for i, c in enumerate(columns) if c.least and widths[i] > max(c.least, cell_len(c.name))]
        if not able:
            break
        widest = max(able, key=lambda i: widths[i])
        least = max(columns[widest].least, cell_len(columns[widest].name))
        rivals = [widths[i] for i in able if i != widest and widths[i] < widths[widest]]
        step = min(over, widths[widest] - least, widths[widest] - max(rivals, default=0) or 1)
        widths[widest] -= max(1, step)
    lines = []
    for number, row in enumerate([[c.name for c in columns], *cells]):
        parts = [_cell(text, columns[i], widths[i]) for i, text in enumerate(row)]
        lines.append(Text("  ".join(parts).rstrip(), "" if number else "bold"))
    return lines


def _cell(text: str, column: Column, width: int) -> str:
    if cell_len(text) > width and column.least:
        text = short_frame(text, width) if column.frames else cut(text, width)
    space = " " * max(0, width - cell_len(text))
    return space + text if column.right else text + space


def _first(text: str, width: int) -> str:
    taken, used = 0, 0
    for character in text:
        used += cell_len(character)
        if used > width:
            break
        taken += 1
    return text[:taken]


def _last(text: str, width: int) -> str:
    taken, used = 0, 0
    for character in reversed(text):
        used += cell_len(character)
        if used > width:
            break
        taken += 1
    return text[len(text) - taken :]

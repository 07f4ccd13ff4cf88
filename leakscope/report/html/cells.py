"""Small pieces that several pages share: cells with units, commands, the axis of time."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from leakscope.model.results import Growth
from leakscope.quantities import rate, size
from leakscope.report.html.parts import Table, Value

_UNITS = (("d", 86_400.0), ("h", 3600.0), ("min", 60.0))
_LEAST_OF_UNIT = 3
"""A span of time is told in days, hours or minutes from so many of them on."""


def bytes_cell(value: float | None) -> Value | None:
    """Bytes as people read them; None stays None."""
    return None if value is None else Value(size(value), _plain(value))


def rate_cell(value: float | None) -> Value | None:
    """Bytes a second as people read them; None stays None."""
    return None if value is None else Value(rate(value), _plain(value))


def time_cell(seconds: float | None) -> Value | None:
    """A span of time; None stays None."""
    return None if seconds is None else Value(span(seconds), _plain(seconds))


def growth_cells(growth: Growth | None) -> tuple[Value | None, str | None]:
    """(the rate, its interval in words)."""
    if growth is None:
        return None, None
    return rate_cell(round(growth.bytes_per_s, 3)), f"{rate(growth.ci_low)} … {rate(growth.ci_high)}"


def _plain(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def span(seconds: float) -> str:
    """``1.5 s``, ``12.0 min``, ``3.2 h``, ``2.0 d``."""
    for unit, length in _UNITS:
        if abs(seconds) >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def time_unit(longest_s: float) -> tuple[str, float]:
    """(unit, seconds) of an axis of time that long."""
    return next(((unit, length) for unit, length in _UNITS if longest_s >= _LEAST_OF_UNIT * length), ("s", 1.0))


def size_unit(largest_bytes: float) -> tuple[str, float]:
    """(unit, bytes) of an axis of sizes up to ``largest_bytes``."""
    found = ("B", 1.0)
    for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1):
        if abs(largest_bytes) >= 1024.0**power:
            found = (unit, 1024.0**power)
    return found


def command(*words: str) -> str:
    """A command line to copy, for texts in which `backquotes` mark code."""
    line = " ".join(shlex.quote(word) for word in words)
    return f"`{line.replace('`', chr(0x2019))}`"


def code(text: str) -> str:
    """A name set as code, for the same texts."""
    return f"`{text.replace('`', chr(0x2019))}`"


def without_empty(table: Table) -> Table:
    """The table without columns that say nothing in any row."""
    kept = [i for i in range(len(table.columns)) if any(row[i] not in (None, "") for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return replace(table, columns=[table.columns[i] for i in kept], rows=rows)


def paths_of(inputs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the evidence was called on the command line."""
    return [str(one["path"]) for one in inputs if one.get("path")]

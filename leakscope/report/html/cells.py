"""Small pieces that several pages share: command lines, spans of time, tables without what says nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from leakscope.report.html.parts import Table, Value
from leakscope.report.html.units import duration_text
from leakscope.report.html.words import as_code


def time_cell(seconds: float | None) -> Value | None:
    """A span of time; None stays None."""
    return None if seconds is None else Value(duration_text(seconds), seconds)


def command(*words: str) -> str:
    """A command line to copy, as code."""
    return as_code(" ".join(shlex.quote(word) for word in words))


def without_empty(table: Table) -> Table:
    """The table without columns that say nothing in any row."""
    kept = [i for i in range(len(table.columns)) if any(row[i] not in (None, "") for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return replace(table, columns=[table.columns[i] for i in kept], rows=rows)


def paths_of(inputs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the evidence was called on the command line."""
    return [str(one["path"]) for one in inputs if one.get("path")]

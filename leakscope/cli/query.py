"""``leakscope query``: SQL on the tables of a capture, for people and for programs."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.cli import warn
from leakscope.errors import BadInputError
from leakscope.report.text import printable

if TYPE_CHECKING:
    from leakscope.capture.sql import Selection

MEMORY_LIMIT = "2GiB"


def query(
    capture: Annotated[Path, typer.Argument(help="A capture directory or a packed capture.")],
    sql: Annotated[str, typer.Argument(help='One SELECT, e.g. "SELECT kind, count(*) FROM mem_events GROUP BY 1".')],
    as_json: Annotated[bool, typer.Option("--json", help="Print an array of objects, one for each row.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header line.")] = False,
    max_rows: Annotated[
        int, typer.Option(min=0, help="Rows shown on a terminal, 0 for all; --json, --csv and pipes get all.")
    ] = 1000,
) -> None:
    """Run one SELECT on the tables of a capture (DuckDB SQL; each table is a view of its name).

    Prints a table on a terminal and tab-separated lines with a header into a pipe. SQL reads the capture and
    nothing else on this machine. Tables: mem_events, calls, stacks, frames, samples, census, launches, marks,
    processes, modules, losses; "SHOW TABLES" lists them, "DESCRIBE mem_events" the columns of one.
    """
    if as_json and as_csv:
        raise BadInputError("query: --json and --csv exclude each other")
    from leakscope.capture import Capture
    from leakscope.capture.sql import select

    opened = Capture.open(capture)
    warn(opened.problems)
    selection = select(opened, sql, memory_limit=MEMORY_LIMIT)
    if as_json:
        _print_json(selection)
    elif as_csv:
        _print_csv(selection)
    elif sys.stdout.isatty():
        _print_table(selection, max_rows)
    else:
        _print_tsv(selection)


def _print_json(selection: Selection) -> None:
    lead = "[\n"
    for row in selection.rows:
        values = [_json_value(value) for value in row]
        print(lead, json.dumps(dict(zip(selection.names, values, strict=True))), sep="", end="")
        lead = ",\n"
    print("[]" if lead == "[\n" else "\n]")


def _json_value(value: Any) -> Any:
    """``value`` as JSON has it: integers exact at any width, NaN and infinities null, bytes as hex digits.

    Times and dates are ISO 8601 text; whatever else JSON lacks (intervals, UUIDs) is its text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _text(value: Any) -> str:
    """``value`` for people and lines of text: like JSON, but no quotes around text and '' for NULL."""
    if value is None:
        return ""
    if isinstance(value, float):  # nan and inf say more than an empty cell
        return repr(value)
    plain = _json_value(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _print_csv(selection: Selection) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    safe = printable if sys.stdout.isatty() else str
    writer.writerows([safe(value) for value in row] for row in _with_header(selection))


def _print_tsv(selection: Selection) -> None:
    """Tabs, line ends and backslashes inside values are escaped: a line is a row, a tab a border."""
    for row in _with_header(selection):
        print("\t".join(printable(value.replace("\\", "\\\\")) for value in row))


def _with_header(selection: Selection) -> Iterable[Sequence[str]]:
    yield selection.names
    for row in selection.rows:
        yield [_text(value) for value in row]


def _print_table(selection: Selection, max_rows: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from leakscope.report.console import ReportConsole

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, type_name in zip(selection.names, selection.types, strict=True):
        number = type_name.upper().endswith(("INT", "INTEGER", "DOUBLE", "FLOAT", "NUMBER")) or "DECIMAL" in type_name
        table.add_column(Text(printable(name)), justify="right" if number else "left", overflow="fold")
    shown = 0
    for row in islice(selection.rows, max_rows or None):
        table.add_row(*(Text(printable(_text(value))) for value in row))
        shown += 1
    console = ReportConsole()
    console.print(table)
    more = next(selection.rows, None) is not None
    tail = "; there are more: --max-rows 0 shows all, --csv and --json print all" if more else ""
    console.print(Text(f"{shown} {'row' if shown == 1 else 'rows'}{tail}", style="dim"))

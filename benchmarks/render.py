"""Results as terminal tables and as the generated sections of docs/performance.md."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.results import Bar, Result, Table


def bar_cells(bar: Bar) -> list[str]:
    """What is promised, the median, the limit, and met or missed."""
    return [
        bar.what,
        _number(bar.measured),
        f"{'≥' if bar.at_least else '≤'} {_number(bar.limit)} {bar.unit}".rstrip(),
        "met" if bar.met else "missed",
    ]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


BAR_HEADERS = ["bar", "measured", "limit", ""]


def print_result(result: Result, console: Console) -> None:
    """All tables of a result, its bars and its notes."""
    for table in result.tables:
        _print_table(f"{result.title}: {table.title}", table.headers, table.rows, console)
    if result.bars:
        _print_table(f"{result.title}: bars", BAR_HEADERS, [bar_cells(bar) for bar in result.bars], console)
    for note in result.notes:
        console.print(Text(f"note: {note}"))


def _print_table(title: str, headers: list[str], rows: list[list[str]], console: Console) -> None:
    shown = RichTable(title=Text(title), title_justify="left")
    for number, header in enumerate(headers):
        shown.add_column(header, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*(Text(cell, style="red" if cell == "missed" else "") for cell in row))
    console.print(shown)


def markdown(result: Result, machine: dict[str, str]) -> str:
    """A result as a section: the machine, tables, bars, notes."""
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if value)
    parts = [f"### {result.title}", f"Machine: {facts}."]
    parts += [f"{table.title}:\n\n{_markdown_table(table)}" for table in result.tables]
    if result.bars:
        parts.append(_markdown_table(Table("", BAR_HEADERS, [bar_cells(bar) for bar in result.bars])))
    parts += result.notes
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    lines = [table.headers, ["---", *["---:"] * (len(table.headers) - 1)], *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the markers of section ``name`` of a page; a section that is not there is appended.

    Written aside and renamed.
    """
    begin, end = f"<!-- benchmark {name}: begin -->", f"<!-- benchmark {name}: end -->"
    page = path.read_text()
    section = f"{begin}\n{text}{end}"
    if begin in page:
        before, rest = page.split(begin, 1)
        page = before + section + rest.split(end, 1)[1]
    else:
        page = f"{page.rstrip()}\n\n{section}\n"
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(page)
    aside.replace(path)

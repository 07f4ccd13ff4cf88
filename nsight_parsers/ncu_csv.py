"""The text of ``ncu --csv``: all page layouts, with the program's own output around the tables.

Layouts are told by their column names: the details page and ``--metrics`` have one row a metric, the raw page has one
column a metric and a line of units below the header. A file may hold several tables, of several runs. There is no
command line, TID (but in the NVTX column), API call id or stack in this output.
"""

from __future__ import annotations

import calendar
import csv
import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.launch_order import launch_order
from nsight_parsers.ncu_command import base_name
from nsight_parsers.ncu_memory import LIMITS as MEMORY_LIMITS
from nsight_parsers.ncu_memory import describe, growth_series
from nsight_parsers.numbers import check_number_format, decide, evidence, parse_number
from nsight_parsers.profile_tables import WRITABLE_BYTES, ProfileTables, in_range, process_table
from nsight_parsers.recognise import NCU_HEADER, open_regular, text_encoding

IDENTITY = frozenset(
    {
        "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream",
        "Block Size", "Grid Size", "Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value",
        "Rule Name", "Rule Type", "Rule Description", "Estimated Speedup Type", "Estimated Speedup",
    }
)  # fmt: skip
"""Columns that are no metric of the raw page; so are those of NVTX, whose names contain ``_Range:``."""
PUSH_POP = "Push/Pop_Range:"
MAX_LINE_CHARACTERS = 1 << 20
MAX_RECORD_LINES = 200
"""Lines of one quoted row: rule descriptions may break lines. An open quote beyond that is program output."""
MAX_METRIC_ROWS = 5_000_000
MAX_LAUNCHES = 1_000_000
MAX_ERRORS = 5

BYTE_UNITS = {"byte": 1, "B": 1, "Kbyte": 1e3, "KB": 1e3, "Mbyte": 1e6, "MB": 1e6, "Gbyte": 1e9, "GB": 1e9}
"""Decimal multiples, as ncu scales them."""

LIMITS = (
    "ncu profiles kernels and sees no allocation: no address, no owner, no lifetime, no host memory",
    "CSV holds no command line: which launches were left out by filters is not known",
    "CSV holds no API call id and no CPU stack, and a thread only in the NVTX column",
    "PIDs are those of the PID namespace that ncu ran in",
    *MEMORY_LIMITS,
)

_ROW = re.compile(r'"?\d+"?[,;\t]')
_SUMMARY = re.compile(r'"?Process ID"?[,;\t][^\n]*"?Invocations"?[,;\t]')
_UNITS = re.compile(r'(?:"")?[,;\t]')
_MONTHS = {name: number for number, name in enumerate(calendar.month_abbr) if name}
_TIME = re.compile(r"(\d{4})-([A-Z][a-z]{2}|\d{2})-(\d{2}) (\d{2}):(\d{2}):(\d{2})", re.ASCII)
_DIMENSIONS = re.compile(r"\(\s*(\d{1,10})\s*,\s*(\d{1,10})\s*,\s*(\d{1,10})\s*\)", re.ASCII)
_NVTX = re.compile(r'\s*(\d{1,10})((?:\s+"[^"]*")+)\s*', re.ASCII)
_NVTX_DETAILS = 6
"""Fields behind domain and range in the NVTX column: payload, colour, message and their types."""


@dataclass
class _Table:
    """One table: its column positions, launches by (ID, PID), and metric values as printed."""

    columns: dict[str, int]
    quoted: bool
    raw_metrics: list[tuple[str, int]]
    units: dict[int, str] = field(default_factory=dict)
    launches: dict[tuple[str, str], int] = field(default_factory=dict)
    metrics: list[tuple[int, str, str, str, str]] = field(default_factory=list)


@dataclass
class _Reading:
    """What was found in the file so far."""

    tables: list[_Table] = field(default_factory=list)
    rows: ProfileTables = field(default_factory=ProfileTables)
    programs: dict[int, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    short_rows: int = 0
    beyond_limit: int = 0
    data_rows: int = 0
    rule_rows: int = 0
    contrary: int = 0
    summaries: int = 0
    banner: bool = False
    metric_rows: int = 0


def parse_ncu_csv(path: Path | str, *, number_format: str = "auto") -> ParsedReport:
    """Reads the output of ``ncu --csv`` at ``path``.

    ``number_format`` is ``auto``, ``point`` (1,234.5) or ``comma`` (1.234,5). ``facts``: ``tables``,
    ``data_rows``, ``rule_rows`` (advice, not read), ``pids``, ``number_formats``, ``launch_order`` (refused: CSV stores
    no command line), ``growth``. Raises :class:`nsight_parsers.ReportError` where the file holds no table of launches
    (with ncu's own error where there is one), and where no value proves the number format although some depend on it.
    """
    path = Path(path)
    try:
        wanted = check_number_format(number_format)
    except ValueError as error:
        raise ReportError(str(error)) from error
    reading = _Reading()
    try:
        for table, record in _records(path, reading):
            _add_record(reading, table, record)
    except csv.Error as error:
        raise ReportError(f"{path}: a row of ncu's CSV cannot be read: {error}") from error
    if not reading.tables:
        raise ReportError(_no_table(path, reading))
    formats = [_add_metrics(path, reading, table, wanted) for table in reading.tables]
    return _report(reading, formats)


def _records(path: Path, reading: _Reading) -> Iterator[tuple[_Table, list[str]]]:
    """Yields (table, cells) of each row; headers, units, banners and program output are dealt with here."""
    table: _Table | None = None
    delimiter = ","
    for line in _lines(path, reading):
        header = _header(line)
        if header:
            delimiter = line[line.index("ID") + 2 :].lstrip('"')[0]
            table = _Table(
                {name: position for position, name in reversed(list(enumerate(header)))},
                line.startswith('"'),
                [(name, i) for i, name in enumerate(header) if name not in IDENTITY and "_Range:" not in name],
            )
            reading.tables.append(table)
        elif table is not None and _ROW.match(line) and line.startswith('"') == table.quoted:
            yield table, _cells(line, delimiter)
        elif table is not None and "Metric Name" not in table.columns and not table.launches and _UNITS.match(line):
            table.units = dict(enumerate(_cells(line, delimiter)))
        elif _SUMMARY.match(line):
            reading.summaries += 1
            table = None
        elif line.startswith("=="):
            _add_banner(reading, line)


def _header(line: str) -> list[str]:
    """The column names where ``line`` is the header of a table, none otherwise."""
    if not NCU_HEADER.match(line):
        return []
    cells = _cells(line, line[line.index("ID") + 2 :].lstrip('"')[0])
    return cells if {"ID", "Kernel Name"} <= set(cells) else []


def _lines(path: Path, reading: _Reading) -> Iterator[str]:
    """Physical lines, but a row whose quotes are open is joined with the lines that close them."""
    with open_regular(path) as file:
        encoding = text_encoding(file.read(4096))
        file.seek(0)
        if encoding is None:
            raise ReportError(f"{path} is binary, no output of ncu --csv")
        text = io.TextIOWrapper(file, encoding=encoding, errors="replace", newline=None)
        while line := text.readline(MAX_LINE_CHARACTERS):
            if not _ROW.match(line) or line.count('"') % 2 == 0:
                yield line
                continue
            parts, quotes = [line], line.count('"')
            while quotes % 2 and len(parts) < MAX_RECORD_LINES and (line := text.readline(MAX_LINE_CHARACTERS)):
                parts.append(line)
                quotes += line.count('"')
            if quotes % 2:
                reading.short_rows += 1
                yield from parts[1:]
            else:
                yield "".join(parts)


def _cells(line: str, delimiter: str) -> list[str]:
    return next(csv.reader((line,), delimiter=delimiter), [])


def _add_banner(reading: _Reading, line: str) -> None:
    reading.banner = True
    if line.startswith("==ERROR==") and len(reading.errors) < MAX_ERRORS:
        words = line.removeprefix("==ERROR==").split()[:40]
        safe = ["…" if set(word) & set('/\\="@') else word for word in words]
        reading.errors.append("".join(c for c in " ".join(safe) if c.isprintable()))


def _no_table(path: Path, reading: _Reading) -> str:
    if any("ERR_NVGPUCTRPERM" in error for error in reading.errors):
        return (
            f"{path}: ncu profiled nothing: ERR_NVGPUCTRPERM, its user may not read the GPU's performance counters "
            "(run it as root, or set NVreg_RestrictProfilingToAdminUsers=0)"
        )
    if reading.errors:
        return f"{path}: ncu profiled nothing: {reading.errors[0]}"
    if reading.summaries:
        return f"{path} holds summaries (--print-summary) and no launches: export it without that option"
    if reading.banner:
        return f"{path}: ncu ran and printed no table: no kernel was profiled, or --csv was not given"
    return f"{path}: no table of ncu --csv in it (a header that starts with ID and names Kernel Name)"


def _add_record(reading: _Reading, table: _Table, cells: list[str]) -> None:
    def cell(name: str) -> str:
        position = table.columns.get(name, -1)
        return cells[position] if 0 <= position < len(cells) else ""

    reading.data_rows += 1
    if len(cells) <= table.columns.get("Metric Value", table.columns["Kernel Name"]):
        reading.short_rows += 1
        return
    key = (cell("ID"), cell("Process ID"))
    number = table.launches.get(key)
    if number is None:
        if len(reading.rows.profiles) >= MAX_LAUNCHES:
            reading.beyond_limit += 1
            return
        number = table.launches[key] = _add_launch(reading, table, cells, cell)
    if "Metric Name" not in table.columns:
        for metric, position in table.raw_metrics:
            if position < len(cells) and cells[position]:
                _keep(reading, table, (number, "", metric, table.units.get(position, ""), cells[position]))
        return
    if cell("Metric Name"):
        unit = cell("Metric Unit")
        _keep(reading, table, (number, cell("Section Name"), cell("Metric Name"), unit, cell("Metric Value")))
    else:
        reading.rule_rows += 1


def _keep(reading: _Reading, table: _Table, metric: tuple[int, str, str, str, str]) -> None:
    if reading.metric_rows >= MAX_METRIC_ROWS:
        reading.rows.dropped_metrics += 1
        return
    reading.metric_rows += 1
    table.metrics.append(metric)


def _add_launch(reading: _Reading, table: _Table, cells: list[str], cell: Any) -> int:
    pid = _whole(cell("Process ID"), 32)
    if pid:
        reading.programs.setdefault(pid, base_name(cell("Process Name"))[:256])
    tid, ranges = 0, list[str]()
    nvtx = next((position for name, position in table.columns.items() if PUSH_POP in name), -1)
    if 0 <= nvtx < len(cells):
        tid, ranges = parse_nvtx_cell(cells[nvtx])
    return reading.rows.add_profile(
        pid=pid,
        tid=tid,
        created_s=_seconds(cell("Kernel Time")),
        device=_whole(cell("Device"), 32),
        context=_whole(cell("Context"), 64),
        stream=_whole(cell("Stream"), 64),
        kernel=cell("Kernel Name"),
        grid=_dimensions(cell("Grid Size")),
        block=_dimensions(cell("Block Size")),
        ranges=ranges,
    )


def parse_nvtx_cell(text: str) -> tuple[int, list[str]]:
    """TID and open push/pop ranges, outermost first, of a cell ``TID  "domain:range:…"  "domain:range:…"``.

    The form is known from quotes of others, not from a file: a cell of any other form is one range as printed.
    """
    if not text.strip():
        return 0, []
    found = _NVTX.fullmatch(text[:MAX_LINE_CHARACTERS])
    if not found:
        return 0, [text.strip()]
    ranges = []
    for entry in re.findall(r'"([^"]*)"', found[2]):
        domain, _, name = entry.rsplit(":", _NVTX_DETAILS)[0].partition(":")
        ranges.append(name if domain in ("", "<default domain>") else f"{domain}@{name}")
    return in_range(int(found[1]), 32), ranges


def _add_metrics(
    path: Path, reading: _Reading, table: _Table, wanted: Literal["auto", "point", "comma"]
) -> Literal["point", "comma"]:
    """Adds the metric rows of ``table`` with values in the format that they prove, or that was asked for."""
    texts = {text for *_, text in table.metrics}
    number_format = _format(path, texts, wanted, [t for other in reading.tables for *_, t in other.metrics])
    numbers = {text: parse_number(text.removeprefix("(!) "), number_format) for text in texts}
    seen: dict[tuple[int, str, str, str], str] = {}
    for number, section, metric, unit, text in table.metrics:
        reading.contrary += seen.setdefault((number, section, metric, unit), text) != text
        value = numbers[text]
        printed = text if value is None or not math.isfinite(value) else ""
        value = math.nan if value is None else value
        reading.rows.add_metric(number, section, metric, unit, value, printed)
        if metric == f"{WRITABLE_BYTES}.avg" and unit in BYTE_UNITS:
            reading.rows.profiles[number - 1]["writable_bytes"] = value * BYTE_UNITS[unit]
    table.metrics = []
    return number_format


def _format(
    path: Path, texts: set[str], wanted: Literal["auto", "point", "comma"], all_texts: Iterable[str]
) -> Literal["point", "comma"]:
    verdict = decide(texts)
    if verdict == "mixed":
        raise ReportError(f"{path}: one table mixes decimal points and decimal commas: it was not written by ncu alone")
    if wanted != "auto":
        contrary = next((t for t in texts if evidence(t) in ("point", "comma") and evidence(t) != wanted), None)
        if contrary is not None:
            raise ReportError(f"{path}: {contrary[:40]!r} is no number of the format {wanted} (--number-format)")
        return wanted
    if verdict == "ambiguous":
        verdict = decide(set(all_texts))
    if verdict in ("ambiguous", "mixed"):
        example = next(t for t in sorted(texts) if evidence(t) == "ambiguous")
        raise ReportError(
            f"{path}: {example!r} may be a thousand times more or less, and no value of the file decides: say "
            "--number-format point (1,234.5) or comma (1.234,5)"
        )
    return "comma" if verdict == "comma" else "point"


def _report(reading: _Reading, formats: list[Literal["point", "comma"]]) -> ParsedReport:
    pids = sorted(reading.programs)
    order = launch_order(None, processes=max(len(pids), 1))
    report = ParsedReport(
        tables={**reading.rows.tables(), **process_table(reading.programs)},
        tool="Nsight Compute",
        facts={
            "tables": len(reading.tables),
            "data_rows": reading.data_rows,
            "rule_rows": reading.rule_rows,
            "pids": pids,
            "number_formats": sorted(set(formats)),
            "launch_order": {**asdict(order), "reason": "CSV stores no command line"},
        },
        limits=list(LIMITS),
    )
    series = growth_series(report.tables["kernel_profiles"])
    report.facts["growth"] = [{**asdict(one), "shape": one.shape} for one in series]
    report.findings = _findings(reading)
    report.findings.extend(describe(one) for one in series if one.writable_bytes)
    return report


def _findings(reading: _Reading) -> list[str]:
    said = [f"ncu said: {error}" for error in reading.errors]
    if len(reading.tables) > 1:
        said.append(f"{len(reading.tables)} tables in one file: they may be of several runs")
    if not reading.rows.profiles:
        said.append("the table has no rows: no kernel was profiled")
    elif not reading.programs:
        said.append("no Process ID column: the kernels cannot be joined by PID")
    if reading.short_rows:
        said.append(f"{reading.short_rows} rows that end before their metric's value were left out")
    if reading.contrary:
        said.append(f"{reading.contrary} values repeat a section, metric and unit of the same launch and differ")
    if reading.summaries:
        said.append(f"{reading.summaries} summary tables (--print-summary) were left out: they hold no launches")
    if reading.beyond_limit or reading.rows.dropped_metrics:
        dropped = reading.beyond_limit + reading.rows.dropped_metrics
        said.append(f"{dropped} rows beyond this reader's limits were left out")
    return said


def _whole(text: str, bits: int) -> int:
    text = text.strip()
    return in_range(int(text), bits) if re.fullmatch(r"\d{1,19}", text, re.ASCII) else 0


def _dimensions(text: str) -> list[int]:
    found = _DIMENSIONS.fullmatch(text.strip())
    return [min(int(size), 2**31 - 1) for size in found.groups()] if found else []


def _seconds(text: str) -> int:
    """``2020-Apr-20 14:58:54`` as seconds, the local wall clock read as if it were UTC; 0 for anything else."""
    found = _TIME.fullmatch(text.strip())
    if not found:
        return 0
    year, month, *rest = found.groups()
    number = _MONTHS.get(month) or (int(month) if month.isdigit() else 0)
    if not 1 <= number <= 12:
        return 0
    day, hour, minute, second = map(int, rest)
    return calendar.timegm((int(year), number, day, hour, minute, second))

"""Text tables (CSV) and lines of JSON objects as Arrow columns of strings; nothing is guessed about their types."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from nsight_parsers import ReportError
from nsight_parsers.sniffing import MAX_LINE_BYTES, header_cells

MAX_FILE_BYTES = 2 << 30
MAX_COLUMNS = 4096
MAX_NESTING = 8
"""Lines of the known forms are flat; unknown fields may nest this deep."""


def read_csv(path: Path) -> tuple[pa.Table, int]:
    """(all columns as strings, rows left out as they have too many or too few cells).

    Raises ReportError for a file that is no table, or too large a one.
    """
    data = _read(path)
    names = header_cells(data[:MAX_LINE_BYTES].decode("utf-8", errors="replace"))
    if len(names) > MAX_COLUMNS:
        raise ReportError(f"{path}: more than {MAX_COLUMNS:,} columns")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})[0]
        raise ReportError(f"{path}: two columns are named {twice!r}")
    ragged = 0

    def skip(row: pyarrow.csv.InvalidRow) -> str:
        nonlocal ragged
        ragged += 1
        return "skip"

    try:
        table = pyarrow.csv.read_csv(
            io.BytesIO(data),
            read_options=pyarrow.csv.ReadOptions(use_threads=False, encoding="utf8"),
            parse_options=pyarrow.csv.ParseOptions(invalid_row_handler=skip),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types={name: pa.string() for name in names},
                check_utf8=False,
                strings_can_be_null=True,
                null_values=[""],
            ),
        )
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: no CSV table that can be read: {_line(error)}") from error
    return table.rename_columns([name.strip() for name in table.column_names]), ragged


def read_json_lines(path: Path, fields: Iterable[str]) -> tuple[pa.Table, int]:
    """(the ``fields`` of the objects on the lines as strings, null where one lacks it; lines left out).

    Raises ReportError for a file that cannot be read.
    """
    fields = list(fields)
    data = _read(path)
    if data.count(b"{") + data.count(b"[") > (MAX_NESTING * (data.count(b"\n") + 1)):
        raise ReportError(f"{path}: its lines are nested too deeply for events")
    try:
        table = pyarrow.json.read_json(
            io.BytesIO(data),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=max(1 << 20, min(len(data), 64 << 20))),
        )
        columns = {name: _as_text(table[name]) for name in fields if name in table.column_names}
        rows, skipped = table.num_rows, 0
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return _line_by_line(path, data, fields)
    return pa.table({name: columns.get(name, pa.nulls(rows, pa.string())) for name in fields}), skipped


def _line_by_line(path: Path, data: bytes, fields: list[str]) -> tuple[pa.Table, int]:
    """For files with torn lines, or with fields whose type changes from line to line."""
    values: dict[str, list[str | None]] = {name: [] for name in fields}
    skipped = 0
    for line in data.decode("utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            skipped += 1
            continue
        for name in fields:
            value = row.get(name)
            values[name].append(value if isinstance(value, str) else None if value is None else json.dumps(value))
    if not values[fields[0]]:
        raise ReportError(f"{path}: no line of it is a JSON object")
    return pa.table({name: pa.array(column, pa.string()) for name, column in values.items()}), skipped


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise ReportError(f"{path}: more than {MAX_FILE_BYTES >> 30} GiB; split it")
            data = file.read(size)  # room is made for as much as is asked for
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    return _as_utf8(data.removeprefix(b"\xef\xbb\xbf"))


def _as_utf8(data: bytes) -> bytes:
    """``data`` with U+FFFD in the place of what is no UTF-8, which Arrow would read and fail on later."""
    ends = pa.array([0, len(data)], pa.int64()).buffers()[1]
    text = pa.Array.from_buffers(pa.large_string(), 1, [None, ends, pa.py_buffer(data)])  # no copy is made
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return data.decode("utf-8", errors="replace").encode()
    return data


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]

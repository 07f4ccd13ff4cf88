"""Request traces of caches as arrays, whatever published form they come in. Told by content, gzip too."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.errors import BadInputError

MAX_BYTES = 2 << 30
"""Of a trace, unpacked."""
MAX_REQUESTS = 50_000_000
MAX_LINE_BYTES = 4 << 20
ORACLE_GENERAL = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
TWITTER_COLUMNS = 7
TIME_NAMES = ("t_s", "time", "timestamp", "ts")
OBJECT_NAMES = ("object", "obj", "key", "obj_id", "id")
SIZE_NAMES = ("size", "size_bytes", "obj_size", "bytes")


@dataclass(frozen=True)
class Trace:
    """References to objects in the order of the trace.

    times_s: float64 [n], seconds, never going back. objects: int64 [n], numbered from 0. sizes: int64 [n], bytes, 1
    where the trace has none. groups: int64 [n], which request a reference belongs to where one reads several blocks of
    a prefix, else None. ttls_s: float64 [n], NaN where not given, or None.
    """

    form: str
    times_s: npt.NDArray[np.float64]
    objects: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64] | None = None
    ttls_s: npt.NDArray[np.float64] | None = None
    unordered: int = 0
    """References whose time was before that of an earlier one; they count as simultaneous with it."""
    left_out: int = 0
    """Lines that cannot be read."""

    @property
    def distinct(self) -> int:
        """How many objects there are."""
        return int(self.objects.max()) + 1 if len(self.objects) else 0

    @property
    def distinct_bytes(self) -> int:
        """The sum of the objects' sizes, each at its largest."""
        largest = np.zeros(self.distinct, np.int64)
        np.maximum.at(largest, self.objects, self.sizes)
        return int(largest.sum())


def read_trace(path: Path | str) -> Trace:
    """Reads a trace. Raises BadInputError for a file that is none, or too large.

    Forms: Mooncake and Bailian (JSON lines with ``timestamp`` and ``hash_ids``), oracleGeneral of libCacheSim (records
    of 24 bytes), Twitter's (CSV of 7 columns without header), CSV with a header or JSON lines that name a time and an
    object, and a size if there is one.
    """
    path = Path(path)
    data = _content(path)
    start = data[:65_536].lstrip(b"\xef\xbb\xbf \r\n")
    if start.startswith(b"{"):
        return _json_lines(path, data)
    if b"\0" in data[:4096]:
        return _oracle_general(path, data)
    return _csv(path, data)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            if head == b"\x1f\x8b":
                with gzip.open(file) as unpacked:
                    data = unpacked.read(MAX_BYTES + 1)
            else:
                data = file.read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInputError(f"{path}: damaged gzip: {error}") from error
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise BadInputError(f"{path}: more than {MAX_BYTES >> 30} GiB; cut the trace")
    if not data.strip():
        raise BadInputError(f"{path}: empty")
    return data


def _lines(data: bytes) -> Iterator[str]:
    for line in io.BytesIO(data):
        if line.strip() and len(line) <= MAX_LINE_BYTES:
            yield line.decode("utf-8-sig", errors="replace")


def _json_lines(path: Path, data: bytes) -> Trace:
    times: list[float] = []
    objects: list[object] = []
    sizes: list[object] = []
    groups: list[int] = []
    left_out = chained = 0
    for number, line in enumerate(_lines(data)):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        time = _first(row, TIME_NAMES) if isinstance(row, dict) else None
        ids = row.get("hash_ids") if isinstance(row, dict) else None
        named = _first(row, OBJECT_NAMES) if isinstance(row, dict) and ids is None else None
        if not isinstance(time, int | float) or isinstance(time, bool) or (named is None and not isinstance(ids, list)):
            left_out += 1
            continue
        found = [item for item in ids if isinstance(item, int | str)] if isinstance(ids, list) else [named]
        chained += isinstance(ids, list)
        times += [float(time)] * len(found)
        objects += found
        sizes += [_first(row, SIZE_NAMES)] * len(found)
        groups += [number] * len(found)
        if len(times) > MAX_REQUESTS:
            raise BadInputError(f"{path}: more than {MAX_REQUESTS:,} references; cut the trace")
    if not times:
        raise BadInputError(f"{path}: no line has a time and an object or hash_ids: no trace of a cache")
    # Mooncake's times are milliseconds from the start, Bailian's seconds; Bailian's rows name a turn.
    form = "requests"
    scale = 1.0
    if chained:
        bailian = b'"turn"' in data[:65_536] or b'"chat_id"' in data[:65_536]
        form, scale = ("Bailian", 1.0) if bailian else ("Mooncake", 1e-3)
    named_groups = np.array(groups, np.int64) if chained else None
    return _made(path, form, np.array(times) * scale, objects, sizes, named_groups, None, left_out)


def _oracle_general(path: Path, data: bytes) -> Trace:
    if len(data) % ORACLE_GENERAL.itemsize:
        raise BadInputError(f"{path}: binary, but not of records of 24 bytes (oracleGeneral): no trace that is known")
    if len(data) // ORACLE_GENERAL.itemsize > MAX_REQUESTS:
        raise BadInputError(f"{path}: more than {MAX_REQUESTS:,} references; cut the trace")
    rows = np.frombuffer(data, ORACLE_GENERAL)
    upcoming = rows["next"]
    if ((upcoming < -1) | ((upcoming >= 0) & (upcoming <= np.arange(len(rows))) & (upcoming < len(rows)))).mean() > 0.5:
        raise BadInputError(f"{path}: binary, but no oracleGeneral trace: its next accesses lie in the past")
    times, sizes = rows["time"].astype(np.float64), rows["size"].astype(np.int64)
    return _made(path, "oracleGeneral", times, rows["object"].copy(), sizes, None, None, 0)


def _csv(path: Path, data: bytes) -> Trace:
    first = next(_lines(data), "")
    try:
        cells = [cell.strip() for cell in next(csv.reader([first]), [])]
    except csv.Error as error:
        raise BadInputError(f"{path}: no CSV: {error}") from error
    named = {name.lower(): name for name in cells}
    time, item = (next((named[n] for n in names if n in named), None) for names in (TIME_NAMES, OBJECT_NAMES))
    if time is None or item is None:
        if len(cells) == TWITTER_COLUMNS and cells[0].isdigit() and cells[3].isdigit() and cells[6].isdigit():
            return _twitter(path, data)
        raise BadInputError(
            f"{path}: no trace of objects: its columns name no time and object ({', '.join(cells)[:200]})"
        )
    size = next((named[n] for n in SIZE_NAMES if n in named), None)
    table = _table(path, data, header=0)
    times = pd.to_numeric(table[time], errors="coerce")
    good = (times.notna() & table[item].notna()).to_numpy()
    sizes = list(table[size][good]) if size else [None] * int(good.sum())
    return _made(
        path, "CSV", times.to_numpy(np.float64)[good], list(table[item][good]), sizes, None, None, int((~good).sum())
    )


def _twitter(path: Path, data: bytes) -> Trace:
    """timestamp s, key, key size, value size, client, operation, TTL s; reads (get, gets) alone are requests."""
    table = _table(path, data, header=None)
    numbers = {column: pd.to_numeric(table[column], errors="coerce") for column in (0, 2, 3, 6)}
    known = (numbers[0].notna() & table[1].notna()).to_numpy()
    good = known & table[5].isin(("get", "gets")).to_numpy()
    if not good.any():
        raise BadInputError(f"{path}: a trace without a get")
    sizes = (numbers[2].fillna(0) + numbers[3].fillna(0)).clip(lower=1)[good]
    ttls = numbers[6].where(numbers[6] > 0)[good].to_numpy(np.float64)
    return _made(
        path,
        "Twitter",
        numbers[0].to_numpy(np.float64)[good],
        list(table[1][good]),
        list(sizes),
        None,
        ttls,
        int((~known).sum()),
    )


def _table(path: Path, data: bytes, header: int | None) -> pd.DataFrame:
    try:
        return pd.read_csv(io.BytesIO(data), header=header, dtype=str, on_bad_lines="skip", encoding_errors="replace")
    except (ValueError, pd.errors.ParserError) as error:
        raise BadInputError(f"{path}: no CSV table that can be read: {str(error).splitlines()[0][:200]}") from error


def _made(
    path: Path,
    form: str,
    times: npt.NDArray[np.float64],
    objects: Sequence[Any] | npt.NDArray[np.uint64],
    sizes: Sequence[Any] | npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64] | None,
    ttls: npt.NDArray[np.float64] | None,
    left_out: int,
) -> Trace:
    good = np.isfinite(times)
    if not good.all():
        raise BadInputError(f"{path}: a time is no finite number")
    if not len(times):
        raise BadInputError(f"{path}: no reference to an object")
    names = objects if isinstance(objects, np.ndarray) else pd.Series(objects, dtype=object).astype(str).to_numpy()
    codes, _ = pd.factorize(names)
    measured = (
        pd.to_numeric(pd.Series(list(sizes), dtype=object), errors="coerce")
        .fillna(1)
        .clip(1, 2**40)
        .to_numpy()
        .astype(np.int64)
    )
    ordered = np.maximum.accumulate(times)
    return Trace(form, ordered, codes.astype(np.int64), measured, groups, ttls, int((ordered > times).sum()), left_out)


def _first(row: dict[str, object], names: tuple[str, ...]) -> object:
    return next((row[name] for name in names if row.get(name) is not None), None)

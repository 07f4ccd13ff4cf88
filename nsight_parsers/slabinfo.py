"""Dumps of ``/proc/slabinfo`` (version 2.x), one or several after each other in a file.

Columns: name, active_objs, num_objs, objsize, objperslab, pagesperslab (slabinfo(5)). A dump has no time of its own. A
line directly before it with seconds since 1970 (``date +%s``) or an ISO 8601 time is taken for its time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.arrow import Coded, Interned, build_table, not_empty

MAX_FILE_BYTES = 256 << 20
MAX_CACHES = 16_000
MAX_DUMPS = 100_000

_DUMP = re.compile(r"^slabinfo - version: (\d+\.\d+)", re.MULTILINE)
_CACHE = re.compile(r"^(\S{1,200})\s+(\d{1,15})\s+(\d{1,15})\s+(\d{1,9})\s+\d+\s+\d+\s+:", re.MULTILINE)
_EPOCH = re.compile(r"\d{9,11}(\.\d{1,9})?")
_TORN = re.compile(r"^[^#\s]\S*\s+\d", re.MULTILINE)

LIMITS = [
    "active objects include those cached per CPU: they lag behind frees",
    "merged caches (SLUB) count under one of their names; it does not say who allocated",
]


class Dump(NamedTuple):
    """One dump: ``time_ns`` (UTC) is 0 where it has none; ``caches`` maps names to (active, all) bytes in objects."""

    time_ns: int
    caches: dict[str, tuple[int, int]]
    unread: int  # lines that look like a cache and are none


def parse_slabinfo(
    path: Path | str, *, tz: str | None = None, progress: Callable[[int, int], None] | None = None
) -> ParsedReport:
    """Reads dumps as samples ``slab_<cache>`` (active objects) and ``slab_<cache>_num`` (all objects), in bytes.

    ``tz`` is the time zone of times without one: a name (Europe/Berlin) or an offset (+02:00). Dumps without times are
    numbered from 1. Raises ReportError for a file without a whole dump.
    """
    path = Path(path)
    text = read_text(path, MAX_FILE_BYTES)
    found = list(_DUMP.finditer(text))
    if not found:
        raise ReportError(f"{path}: no 'slabinfo - version' line: not a dump of /proc/slabinfo")
    if len(found) > MAX_DUMPS:
        raise ReportError(f"{path}: more than {MAX_DUMPS:,} dumps in one file; split it")
    zone = time_zone(tz)
    version = found[0][1]
    if not version.startswith("2."):
        raise ReportError(f"{path}: slabinfo version {version}; leakscope knows 2.x (kernels since 2.6)")
    bounds = [*(match.start() for match in found), len(text)]
    dumps = [
        _dump(text[max(0, bounds[i - 1] if i else 0) : bounds[i]], text[bounds[i] : bounds[i + 1]], zone)
        for i in range(len(found))
    ]
    whole = [dump for dump in dumps if dump.caches]
    if not whole:
        raise ReportError(f"{path}: no cache line in it: cut short, or read without root")
    timed = all(dump.time_ns for dump in whole)
    report = ParsedReport(
        not_empty({"samples": _samples(whole, timed)}), tool="slabinfo", version=version,
        clock="utc" if timed else "none", limits=list(LIMITS),
    )  # fmt: skip
    report.facts = {"dumps": len(whole), "caches": len({name for dump in whole for name in dump.caches})}
    unread = sum(dump.unread for dump in dumps)
    if not timed:
        report.findings.append(
            "a dump has no time: rates cannot be told (precede each with 'date +%s')" if len(whole) > 1
            else "one dump without a time: a state, no growth"
        )  # fmt: skip
    if len(whole) < len(dumps):
        report.findings.append(f"{len(dumps) - len(whole):,} dumps hold no cache: left out")
    if unread:
        report.findings.append(f"{unread:,} lines are no cache lines of this version: left out")
    return report


def _dump(before: str, text: str, zone: timezone | ZoneInfo | None) -> Dump:
    caches: dict[str, tuple[int, int]] = {}
    rows = _CACHE.findall(text)
    for name, active, total, size in rows:
        known = caches.get(name, (0, 0))
        caches[name] = (known[0] + int(active) * int(size), known[1] + int(total) * int(size))
    last = before.rstrip("\n").rsplit("\n", 1)[-1]
    torn = sum(1 for line in _TORN.finditer(text) if not line[0].startswith("slabinfo"))
    return Dump(time_of(last, zone), caches, max(0, torn - len(rows)))


def time_of(line: str, zone: timezone | ZoneInfo | None) -> int:
    """UTC nanoseconds of a line that holds nothing but a time; 0 for any other line."""
    line = line.strip()[:64]
    if _EPOCH.fullmatch(line):
        seconds, _, fraction = line.partition(".")
        return int(seconds) * 1_000_000_000 + int(fraction.ljust(9, "0") or 0)
    try:
        at = datetime.fromisoformat(line)
    except ValueError:
        return 0
    if at.tzinfo is None:
        if zone is None:
            return 0
        at = at.replace(tzinfo=zone)
    return max(0, round((at - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1)) * 1000)


def time_zone(name: str | None) -> timezone | ZoneInfo | None:
    """The time zone of an option value; ReportError for one that does not exist."""
    if not name:
        return None
    offset = re.fullmatch(r"([+-])(\d\d):?(\d\d)", name)
    try:
        if offset:
            minutes = int(offset[2]) * 60 + int(offset[3])
            return timezone(timedelta(minutes=-minutes if offset[1] == "-" else minutes))
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise ReportError(
            f"no time zone {name!r}: give a name such as Europe/Berlin or an offset such as +02:00"
        ) from None


def _samples(dumps: list[Dump], timed: bool) -> pa.Table:
    counters = Interned()
    times, codes, values = [], [], []
    for number, dump in enumerate(dumps, 1):
        for name, (active, total) in dump.caches.items():
            for counter, value in ((f"slab_{name}", active), (f"slab_{name}_num", total)):
                codes.append(counters.code(counter))
                values.append(float(value))
                times.append(dump.time_ns if timed else number)
    if len(counters.words) > 2 * MAX_CACHES:
        raise ReportError(f"more than {MAX_CACHES:,} slab caches: no kernel has so many")
    return build_table(
        "samples", len(codes), ts_ns=np.array(times, np.int64), scope="host", scope_id="",
        counter=Coded(np.array(codes, np.int64), counters.words), value=np.array(values, np.float64),
    )  # fmt: skip


def read_text(path: Path, max_bytes: int) -> str:
    """A text file of at most ``max_bytes``; undecodable bytes become U+FFFD. Raises ReportError."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ReportError(f"{path}: more than {max_bytes:,} bytes of text; split it")
    return data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")

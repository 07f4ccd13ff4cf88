"""What tells each kind of report by its beginning, except those of Nsight Compute. Imports no parser."""

from __future__ import annotations

import csv
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsight_parsers.recognise import Sample

SQLITE_MAGIC = b"SQLite format 3\0"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_LINE_BYTES = 1 << 20
TIME_COLUMN = "t_s"
EVENT_COLUMNS = frozenset({"ts_ns", "op", "addr"})
NSYS_REPORT_SUFFIXES = (".nsys-rep", ".qdrep")
NSYS_SUFFIXES = (".sqlite", ".sqlite3", ".db", *NSYS_REPORT_SUFFIXES)


def is_nsys(sample: Sample) -> bool:
    """An SQLite file whose parser then looks for the tables of an export, or what stands for one.

    Git LFS pointers, and ``.nsys-rep``/``.qdrep`` files by their suffix (their format is not published): the parser
    says what to do with them.
    """
    suffix = sample.path.suffix.lower()
    if sample.head.startswith(LFS_POINTER):
        return suffix in NSYS_SUFFIXES
    return sample.head.startswith(SQLITE_MAGIC) or suffix in NSYS_REPORT_SUFFIXES


def is_torch_snapshot(sample: Sample) -> bool:
    """A pickle of protocol 2 to 5, or JSON, whose beginning has the keys of a snapshot."""
    head = sample.head
    if head[:1] == b"\x80" and len(head) > 2 and 2 <= head[1] <= 5:
        return b"segments" in head or b"device_traces" in head or (b"total_size" in head and b"segment_type" in head)
    text = sample.text
    if text is None or not text.lstrip().startswith(("{", "[")):
        return False
    return ('"device_traces"' in text or '"segments"' in text) and ('"blocks"' in text or '"action"' in text)


_MEMLEAK = re.compile(
    r"^\[\d\d:\d\d:\d\d\] Top \d+ stacks with outstanding allocations:|^\s*\d+ bytes in \d+ allocations from stack\s*$",
    re.MULTILINE,
)


def is_memleak(sample: Sample) -> bool:
    """Text with the report lines of bcc's or libbpf-tools' memleak."""
    return sample.text is not None and _MEMLEAK.search(sample.text) is not None


def is_slabinfo(sample: Sample) -> bool:
    """Text with the first line of ``/proc/slabinfo``."""
    return sample.text is not None and re.search(r"^slabinfo - version: \d", sample.text, re.MULTILINE) is not None


def header_cells(text: str) -> list[str]:
    """The cells of the first line that is not empty, stripped; [] where there is none."""
    line = next((line for line in text.split("\n", 100)[:100] if line.strip()), "")
    if len(line) > MAX_LINE_BYTES or "\0" in line:
        return []
    try:
        return [cell.strip() for cell in next(csv.reader([line]), [])]
    except csv.Error:
        return []


def first_object(text: str) -> dict[str, object]:
    """The JSON object on the first line that is not empty; {} where there is none."""
    line = next((line for line in text.split("\n", 100)[:100] if line.strip()), "").strip()
    if not line.startswith("{") or len(line) > MAX_LINE_BYTES:
        return {}
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_samples_csv(sample: Sample) -> bool:
    """A table whose header names ``t_s`` and something else."""
    if sample.text is None:
        return False
    cells = header_cells(sample.text)
    return TIME_COLUMN in cells and len(cells) > 1


def is_memory_events(sample: Sample) -> bool:
    """A table, or lines of JSON objects, with ``ts_ns``, ``op`` and ``addr``."""
    if sample.text is None:
        return False
    names = (
        set(header_cells(sample.text)) if not sample.text.lstrip().startswith("{") else set(first_object(sample.text))
    )
    return names >= EVENT_COLUMNS


def is_events_meta(sample: Sample) -> bool:
    """A JSON object that says how events were recorded and what was lost of them."""
    text = sample.text
    if text is None or not text.lstrip().startswith("{"):
        return False
    keys = {"attach", "lost", "stack_map_full"}
    try:
        value = json.loads(text) if sample.size <= len(sample.head) else None
    except (ValueError, RecursionError):
        return False
    if value is None:
        return sum(f'"{key}"' in text for key in keys) >= 2
    return isinstance(value, dict) and bool(keys & value.keys()) and "segments" not in value


def is_cache_log(sample: Sample) -> bool:
    """Lines of JSON objects with ``ts_ns``, ``op`` and ``obj``."""
    return sample.text is not None and {"ts_ns", "op", "obj"} <= first_object(sample.text).keys()


def is_kv_recording(sample: Sample) -> bool:
    """Lines of JSON objects with ``seq`` and ``payload_b64``, plain or gzip; the first may be longer than the head."""
    from nsight_parsers.kv_recording import GZIP_MAGIC, head_of

    if not sample.head.startswith((b"{", GZIP_MAGIC)):
        return False
    head = head_of(sample.head)
    return head.startswith(b"{") and re.search(rb'"seq"\s*:\s*\d', head) is not None and b'"payload_b64"' in head

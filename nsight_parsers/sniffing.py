"""What tells an Nsight Systems export, a PyTorch snapshot, memleak's output and a slabinfo dump by their beginning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsight_parsers.recognise import Sample

SQLITE_MAGIC = b"SQLite format 3\0"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
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

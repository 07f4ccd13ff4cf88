"""Which kind of report a file is, told by its content; the suffix is never asked.

``KINDS`` is the registry: one :class:`Kind` a line, tried in order. A kind names its parser as
``module:function`` so that recognising a file imports none of them. A sniff function sees a :class:`Sample` and must
cope with any bytes: it answers, it does not raise.
"""

from __future__ import annotations

import importlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.sniffing import (
    is_cache_log,
    is_events_meta,
    is_kv_recording,
    is_memleak,
    is_memory_events,
    is_nsys,
    is_samples_csv,
    is_slabinfo,
    is_torch_snapshot,
)

HEAD_BYTES = 64 << 10
"""What is read of every file to tell its kind."""
SEARCH_BYTES = 64 << 20
"""How far a table is looked for behind a program's own output."""

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
NCU_MAGIC = b"NVR\0"


@dataclass(frozen=True)
class Sample:
    """The beginning of a file."""

    path: Path
    head: bytes
    size: int

    @cached_property
    def text(self) -> str | None:
        """``head`` as text; None for binary content."""
        encoding = text_encoding(self.head)
        return self.head.decode(encoding, errors="replace") if encoding else None


@dataclass(frozen=True)
class Kind:
    """One kind of report: its ``name``, what users call it, how it is told and who reads it.

    ``parser`` is ``module:function``; the function takes the path and keyword options, of which it declares those
    that it understands, and returns a :class:`ParsedReport`.
    """

    name: str
    title: str
    sniff: Callable[[Sample], bool]
    parser: str


def read_sample(path: Path | str) -> Sample:
    """The first ``HEAD_BYTES`` of a regular file; raises :class:`ReportError` where there is none to read."""
    path = Path(path)
    with open_regular(path) as file:
        return Sample(path, file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size)


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file to read; raises :class:`ReportError` for anything else (a pipe would block for ever)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ReportError(f"cannot read {path}: it is no regular file")
    return open(descriptor, "rb")


def text_encoding(head: bytes) -> str | None:
    """The encoding of text that starts with ``head``: UTF-8, UTF-16 as a Windows shell writes it, None for binary."""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if b"\0" not in head:
        return "utf-8-sig"
    if len(head) >= 4 and head[1::2].count(0) > len(head) * 2 // 5 and not head[::2].count(0):
        return "utf-16-le"
    return None


def recognise(path: Path | str) -> str | None:
    """The name of the kind of ``path``, None for no known one. Raises :class:`ReportError` for an unreadable file."""
    sample = read_sample(path)
    return next((kind.name for kind in KINDS if kind.sniff(sample)), None)


def parse(path: Path | str, kind: str | None = None, **options: object) -> ParsedReport:
    """Reads ``path`` with the parser of its kind (recognised where not given).

    ``options`` go to the parser, those that it does not declare are dropped: a caller passes what its user gave for
    any of several files. Raises :class:`ReportError` for a file of no known kind or one that its parser refuses.
    """
    name = kind or recognise(path)
    found = next((k for k in KINDS if k.name == name), None)
    if found is None:
        known = ", ".join(k.title for k in KINDS)
        raise ReportError(f"{path}: no kind of report that leakscope knows; it reads {known}")
    module, function = found.parser.split(":")
    parser = getattr(importlib.import_module(module), function)
    accepted = parser.__code__.co_varnames[: parser.__code__.co_argcount + parser.__code__.co_kwonlyargcount]
    report: ParsedReport = parser(path, **{name: value for name, value in options.items() if name in accepted})
    report.kind = found.name
    return report


def is_ncu_rep(sample: Sample) -> bool:
    """``NVR\\0``, plain or inside a zstd frame (``.ncu-repz``), or a block without it (a run that crashed)."""
    if sample.head.startswith(NCU_MAGIC):
        return True
    if sample.head.startswith(ZSTD_MAGIC):
        return _zstd_head(sample).startswith(NCU_MAGIC)
    from nsight_parsers.ncu_container import is_block

    return sample.text is None and is_block(sample.head)


NCU_HEADER = re.compile(r'^"?ID"?[,;\t](?:[^\n]*[,;\t])?"?Kernel Name"?(?=[,;\t\r\n])', re.MULTILINE)
_NCU_BANNER = re.compile(r"^==(?:PROF|ERROR|WARNING)== ", re.MULTILINE)


def is_ncu_csv(sample: Sample) -> bool:
    """Text with a header whose first cell is ``ID`` and that names ``Kernel Name``, or with lines ``==PROF==``."""
    if sample.text is None:
        return False
    if NCU_HEADER.search(sample.text) or _NCU_BANNER.search(sample.text):
        return True
    return sample.size > len(sample.head) and _found_further_on(sample)


def _found_further_on(sample: Sample) -> bool:
    """A header of ``ncu --csv`` behind more than ``HEAD_BYTES`` of a program's output."""
    with open(sample.path, "rb") as file:
        content = file.read(SEARCH_BYTES)
    if text_encoding(sample.head) != "utf-8-sig":
        content = content.replace(b"\0", b"")
    return re.search(rb'^"ID",[^\n]{0,4096}"Kernel Name"|^==PROF== ', content, re.MULTILINE) is not None


def _zstd_head(sample: Sample) -> bytes:
    import pyarrow as pa

    try:
        with pa.CompressedInputStream(pa.BufferReader(sample.head), "zstd") as stream:
            return bytes(stream.read(len(NCU_MAGIC)))
    except (OSError, pa.ArrowException):
        return b""


KINDS: tuple[Kind, ...] = (
    Kind("ncu_rep", "Nsight Compute reports (.ncu-rep)", is_ncu_rep, "nsight_parsers.ncu_rep:parse_ncu_rep"),
    Kind("nsys", "Nsight Systems exports (.sqlite)", is_nsys, "nsight_parsers.nsys:parse_nsys"),
    Kind(
        "torch_snapshot",
        "PyTorch memory snapshots",
        is_torch_snapshot,
        "nsight_parsers.torch_snapshot:parse_torch_snapshot",
    ),
    Kind("memleak", "the output of memleak", is_memleak, "nsight_parsers.memleak:parse_memleak"),
    Kind("slabinfo", "dumps of /proc/slabinfo", is_slabinfo, "nsight_parsers.slabinfo:parse_slabinfo"),
    Kind(
        "samples", "tables of counters (CSV with t_s)", is_samples_csv, "nsight_parsers.samples_csv:parse_samples_csv"
    ),
    Kind(
        "events",
        "allocation events (CSV or JSON lines)",
        is_memory_events,
        "nsight_parsers.memory_events:parse_memory_events",
    ),
    Kind(
        "kv_events",
        "recorded KV-cache events (JSON lines)",
        is_kv_recording,
        "nsight_parsers.kv_recording:parse_kv_recording",
    ),
    Kind("cache_log", "cache events (JSON lines)", is_cache_log, "nsight_parsers.cache_log:parse_cache_log"),
    Kind(
        "events_meta",
        "what was lost of events (JSON)",
        is_events_meta,
        "nsight_parsers.memory_events:parse_events_meta",
    ),
    Kind("ncu_csv", "the output of ncu --csv", is_ncu_csv, "nsight_parsers.ncu_csv:parse_ncu_csv"),
)

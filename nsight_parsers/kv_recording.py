"""Recorded KV events: one JSON object a line with ``seq`` and ``payload_b64`` (the msgpack payload), plain or gzip.

The lines are the frames as they came from the publisher's socket, in that order; ``topic`` is optional.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.kv_decode import MAX_PAYLOAD_BYTES
from nsight_parsers.kv_events import LIMITS, EventBook

GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE = MAX_PAYLOAD_BYTES * 4 // 3 + (1 << 16)
MAX_UNPACKED_BYTES = 4 << 30
MAX_ROWS = 50_000_000


def parse_kv_recording(
    path: Path | str, *, pool_blocks: int | None = None, progress: Callable[[int, int], None] | None = None
) -> ParsedReport:
    """Reads recorded KV events as ``cache_events``. ``pool_blocks``: usable blocks of the engine's pool, where known.

    Raises ReportError for a file without one batch that can be read.
    """
    path = Path(path)
    book, torn = EventBook(), 0
    with path.open("rb") as raw:
        for line in _lines(path, raw):
            try:
                frame = json.loads(line)
                topic, number, text = frame.get("topic", ""), frame["seq"], frame["payload_b64"]
                payload = base64.b64decode(text, validate=True)
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError, binascii.Error):
                torn += 1
                continue
            if not isinstance(number, int) or not 0 <= number < 1 << 63:
                torn += 1
                continue
            book.add(topic if isinstance(topic, str) else "", number, payload)
            if book.rows > MAX_ROWS:
                raise ReportError(f"{path}: more than {MAX_ROWS:,} blocks; split it")
            if progress is not None:
                progress(raw.tell(), path.stat().st_size)
    if not book.batches:
        raise ReportError(f"{path}: no batch of KV events in it that can be read")
    findings = list(book.findings())
    if torn:
        findings.append(f"{torn:,} lines are no frames and are left out")
    facts = book.facts() | ({"pool_blocks": pool_blocks} if pool_blocks else {})
    return ParsedReport(book.tables(), findings, "KV events", facts=facts, limits=list(LIMITS), clock="utc")


def head_of(head: bytes) -> bytes:
    """The beginning of the content: of a gzip file what its first bytes unpack to, at most 64 KiB."""
    if not head.startswith(GZIP_MAGIC):
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, 64 << 10)
    except zlib.error:
        return b""


def _lines(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    packed = raw.read(2) == GZIP_MAGIC
    raw.seek(0)
    file = gzip.GzipFile(fileobj=raw) if packed else raw
    total = 0
    try:
        while line := file.readline(MAX_LINE):
            total += len(line)
            if total > MAX_UNPACKED_BYTES:
                raise ReportError(f"{path}: more than {MAX_UNPACKED_BYTES >> 30} GiB; split it")
            if line.strip():
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise ReportError(f"{path}: damaged: {error}") from error

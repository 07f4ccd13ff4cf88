"""The container of an Nsight Compute report: magic, file header, then blocks of a header and result messages.

NVIDIA's customization guide, "Report File Format": ``NVR\\0``; u32 size and file header; then blocks of u32 size,
block header, payload of u32-size-prefixed messages (little endian). ``.ncu-repz`` is the same inside zstd. The field
numbers were read off report files of 2019 to 2026:

block header: 1 count of source entries, 2 count of kernel results (in this order in the payload), 3 session,
4 string table {1 strings}, 5 payload size, 6 process; any other count is of a kind of result that this reader does
not know.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from nsight_parsers import ReportError
from nsight_parsers.recognise import NCU_MAGIC, ZSTD_MAGIC, open_regular
from nsight_parsers.wire import BYTES, VARINT, WireError, fields, integer, messages

KNOWN_VERSION = 7
"""The version in the file header of every report seen, tools of 2019 to 2026."""
MAX_MESSAGE_BYTES = 64 << 20
"""A header or result larger than this is damage: the largest real one has 1.2 MB."""
MAX_UNPACKED_RATIO = 200
"""How much larger than itself a ``.ncu-repz`` may unpack (protobuf and assembly text: about 10)."""
SKIP_BYTES = 1 << 20


@dataclass
class Block:
    """One block: its strings join the report's table, ``results`` are its kernel results as protobuf messages."""

    offset: int
    results_announced: int = 0
    unknown_counts: dict[int, int] = field(default_factory=dict)
    session: bytes = b""
    strings: list[bytes] = field(default_factory=list)
    process: bytes = b""
    results: list[bytes] = field(default_factory=list)
    unknown_messages: int = 0


@dataclass
class Walk:
    """How the walk over a report went; complete only after the last block.

    ``stopped`` says where and why it ended early, empty when every block was whole.
    """

    version: int = 0
    has_magic: bool = True
    stopped: str = ""
    truncated: bool = False


class _Stopped(Exception):
    def __init__(self, why: str, truncated: bool) -> None:
        super().__init__(why)
        self.truncated = truncated


def walk_blocks(path: Path, walk: Walk) -> Iterator[Block]:
    """Yields the blocks of the report at ``path`` and fills in ``walk``.

    A damaged or truncated block ends the walk after its whole results were yielded. Raises :class:`ReportError` for a
    file that is empty or no report.
    """
    with _open_report(path) as stream:
        _read_file_header(path, stream, walk)
        while walk_on := _read_block(stream, walk):
            yield walk_on
            if walk.stopped:
                return


def is_block(head: bytes) -> bool:
    """Whether ``head`` starts with a block of a report whose file header was never written (a run that crashed)."""
    if len(head) < 8:
        return False
    size = int.from_bytes(head[:4], "little")
    if not 8 <= size <= len(head) - 4:
        return False
    try:
        kinds = {(number, wire_type) for number, wire_type, _ in fields(head[4 : 4 + size])}
    except WireError:
        return False
    return {(1, VARINT), (2, VARINT), (5, VARINT)} <= kinds and bool(kinds & {(3, BYTES), (6, BYTES)})


class _Stream:
    """Reads forward, counts the bytes, and never holds more than it was asked for."""

    def __init__(self, raw: BinaryIO, unpacked_limit: int | None = None) -> None:
        self.raw, self.unpacked_limit, self.offset = raw, unpacked_limit, 0

    def read(self, size: int) -> bytes:
        """``size`` bytes, fewer at the end of the file."""
        if self.unpacked_limit is not None and self.offset + size > self.unpacked_limit:
            raise _Stopped(f"stopped at byte {self.offset}: too much unpacked from so small a file", truncated=False)
        parts = []
        while size:
            try:
                part = self.raw.read(min(size, SKIP_BYTES))
            except (OSError, ValueError) as error:
                raise _Stopped(f"unpacking failed at byte {self.offset}: {error}", truncated=False) from error
            if not part:
                break
            parts.append(part)
            size -= len(part)
            self.offset += len(part)
        return b"".join(parts)

    def whole(self, size: int) -> bytes:
        """``size`` bytes; raises where the file ends before."""
        data = self.read(size)
        if len(data) < size:
            raise _Stopped(f"truncated at byte {self.offset}", truncated=True)
        return data

    def skip(self, size: int) -> None:
        while size:
            step = min(size, SKIP_BYTES)
            self.whole(step)
            size -= step


@contextmanager
def _open_report(path: Path) -> Iterator[_Stream]:
    with open_regular(path) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        magic = file.read(4)
        file.seek(0)
        if not size:
            raise ReportError(f"{path} is empty: ncu or the program was stopped before the first result was written")
        if magic != ZSTD_MAGIC:
            yield _Stream(file)
            return
        import pyarrow as pa

        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd") as unpacked:
            yield _Stream(unpacked, size * MAX_UNPACKED_RATIO + SKIP_BYTES)


def _read_file_header(path: Path, stream: _Stream, walk: Walk) -> None:
    try:
        magic = stream.read(4)
        if magic == NCU_MAGIC:
            (size,) = struct.unpack("<I", stream.whole(4))
            if size > SKIP_BYTES:
                raise WireError("a file header of more than 1 MiB")
            walk.version = integer(stream.whole(size), 1)
            return
        head = magic + stream.read(SKIP_BYTES)
    except (_Stopped, WireError) as error:
        raise ReportError(f"{path}: no whole Nsight Compute report: {error}") from error
    if not is_block(head):
        raise ReportError(f"{path} is no Nsight Compute report: it does not start with NVR and holds no block of one")
    walk.has_magic = False
    stream.raw = _Chained(head, stream.raw)  # type: ignore[assignment]
    stream.offset = 0


class _Chained:
    """Bytes that were read already, then the rest of the file."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self.head, self.rest = io.BytesIO(head), rest

    def read(self, size: int) -> bytes:
        return self.head.read(size) or self.rest.read(size)


def _read_block(stream: _Stream, walk: Walk) -> Block | None:
    """The next block, None at a clean end; a block that is not whole sets ``walk.stopped``."""
    block = Block(stream.offset)
    try:
        prefix = stream.read(4)
        if not prefix:
            return None
        if len(prefix) < 4:
            raise _Stopped(f"truncated at byte {stream.offset}", truncated=True)
        size = int.from_bytes(prefix, "little")
        if not 0 < size <= MAX_MESSAGE_BYTES:
            raise _Stopped(f"damaged at byte {block.offset}: a block header of {size} bytes", truncated=False)
        header = stream.whole(size)
        try:
            sources, payload_bytes = _read_block_header(header, block)
        except WireError as error:
            raise _Stopped(f"damaged at byte {block.offset}: {error} in a block header", truncated=False) from error
        _read_payload(stream, block, sources, payload_bytes)
    except _Stopped as stop:
        walk.stopped, walk.truncated = str(stop), stop.truncated
    return block


def _read_block_header(header: bytes, block: Block) -> tuple[int, int]:
    sources = payload_bytes = 0
    for number, wire_type, value in fields(header):
        if wire_type == VARINT and isinstance(value, int):
            if number == 1:
                sources = value
            elif number == 2:
                block.results_announced = value
            elif number == 5:
                payload_bytes = value
            elif value:
                block.unknown_counts[number] = value
        elif isinstance(value, bytes):
            if number == 3:
                block.session = value
            elif number == 4:
                block.strings.extend(messages(value, 1))
            elif number == 6:
                block.process = value
    return sources, payload_bytes


def _read_payload(stream: _Stream, block: Block, sources: int, payload_bytes: int) -> None:
    end = stream.offset + payload_bytes
    position = 0
    while stream.offset + 4 <= end:
        at = stream.offset
        size = int.from_bytes(stream.whole(4), "little")
        if size > end - stream.offset:
            raise _Stopped(f"damaged at byte {at}: a message of {size} bytes in a smaller block", truncated=False)
        if sources <= position < sources + block.results_announced:
            if size > MAX_MESSAGE_BYTES:
                raise _Stopped(f"damaged at byte {at}: a result of {size} bytes", truncated=False)
            block.results.append(stream.whole(size))
        else:
            block.unknown_messages += position >= sources
            stream.skip(size)
        position += 1
    stream.skip(end - stream.offset)

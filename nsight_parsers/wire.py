"""A tolerant reader of the protobuf wire format: fields by number, without any definition of the messages.

Format: https://protobuf.dev/programming-guides/encoding/. Nothing here recurses: the caller decides which fields are
messages and how deep it looks, so no input can nest too deeply.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_FIELD_NUMBER = (1 << 29) - 1
MAX_FIELDS = 250_000
"""Fields of one message, nested ones not counted; the most seen in a report: some 6,000."""

Value = int | bytes
"""A varint or fixed-width value as an unsigned number; a length-delimited one as bytes."""


class WireError(ValueError):
    """Bytes that are no protobuf message."""


def fields(message: bytes) -> Iterator[tuple[int, int, Value]]:
    """Yields (field number, wire type, value) of ``message``.

    Fixed-width values come as unsigned integers: see :func:`double`. Raises :class:`WireError` where the bytes are no
    message, after what could be read before it.
    """
    position, end, count = 0, len(message), 0
    while position < end:
        count += 1
        if count > MAX_FIELDS:
            raise WireError(f"more than {MAX_FIELDS} fields")
        key, position = _varint(message, position, end)
        number, wire_type = key >> 3, key & 7
        if not 0 < number <= MAX_FIELD_NUMBER:
            raise WireError(f"field number {number}")
        if wire_type == BYTES:
            length, position = _varint(message, position, end)
            if length > end - position:
                raise WireError("a field longer than its message")
            yield number, wire_type, message[position : position + length]
            position += length
        elif wire_type == VARINT:
            value, position = _varint(message, position, end)
            yield number, wire_type, value
        elif wire_type in (FIXED64, FIXED32):
            width = 8 if wire_type == FIXED64 else 4
            if width > end - position:
                raise WireError("a number cut short")
            yield number, wire_type, int.from_bytes(message[position : position + width], "little")
            position += width
        else:
            raise WireError(f"wire type {wire_type}")


def double(value: int) -> float:
    """The IEEE 754 double whose bits are ``value``."""
    number: float = struct.unpack("<d", value.to_bytes(8, "little"))[0]
    return number


def integer(message: bytes, number: int, default: int = 0) -> int:
    """The last varint of field ``number``, ``default`` where there is none (in proto3 a zero is left out)."""
    found = default
    for field, wire_type, value in fields(message):
        if field == number and wire_type == VARINT:
            assert isinstance(value, int)
            found = value
    return found


def texts(message: bytes, number: int) -> list[str]:
    """The strings of field ``number``; undecodable bytes become replacement characters."""
    return [as_text(value) for field, kind, value in fields(message) if field == number and kind == BYTES]


def as_text(value: Value) -> str:
    """A string field as text, without NULs at its end (Windows paths have one)."""
    return value.decode("utf-8", errors="replace").rstrip("\0") if isinstance(value, bytes) else ""


def messages(message: bytes, number: int) -> Iterator[bytes]:
    """The length-delimited values of field ``number``."""
    for field, kind, value in fields(message):
        if field == number and kind == BYTES and isinstance(value, bytes):
            yield value


def signed(value: int) -> int:
    """A varint as the signed 64-bit number that protobuf's int64 means."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(message: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
        if shift > 63:
            raise WireError("a number of more than ten bytes")
    raise WireError("a number cut short")

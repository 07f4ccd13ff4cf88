"""Writing protocol buffers: the four things that profiles need of the wire format.

https://protobuf.dev/programming-guides/encoding: a field is a varint of (number << 3 | wire type), then the value. A
varint has 7 bits a byte, the lowest first, and the high bit set in all bytes but the last; wire type 0 is a varint, 2 a
length and as many bytes. A negative int64 takes ten bytes, as its two's complement.
"""

from __future__ import annotations

from collections.abc import Iterable

_VARINT, _BYTES = 0, 2


def varint(value: int) -> bytes:
    """``value`` in -2^63..2^64-1 as a varint."""
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def integer(field: int, value: int) -> bytes:
    """An int64, uint64 or bool field; nothing for 0, which is what a missing field reads as."""
    return varint(field << 3 | _VARINT) + varint(value) if value else b""


def message(field: int, content: bytes) -> bytes:
    """A nested message, or one element of repeated ones; an empty one counts as well."""
    return varint(field << 3 | _BYTES) + varint(len(content)) + content


def text(field: int, value: str) -> bytes:
    """One element of repeated strings; lone surrogates become escapes, as protobuf's strings are UTF-8."""
    return message(field, value.encode(errors="backslashreplace"))


def packed(field: int, values: Iterable[int]) -> bytes:
    """Repeated int64 or uint64 in packed form."""
    return message(field, b"".join(map(varint, values)))

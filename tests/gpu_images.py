"""Hand-made GPU code images for tests: laid out as nvcc's are, without any code in them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

Parameters = Sequence[tuple[int, int]]
"""(offset, size) of each parameter."""


def info(parameters: Parameters, *, version: int = 1, total: int | None = None, before: bytes = b"") -> bytes:
    """A section .nv.info.<kernel>; `version` 2 is EIATTR_KPARAM_INFO_V2."""
    end = max((offset + size for offset, size in parameters), default=0)
    text = before + struct.pack("<BBH", 3, 0x19, end if total is None else total)
    for ordinal, (offset, size) in reversed(list(enumerate(parameters))):  # the compiler lists the last one first
        packed = size << 18 | 0x1F000 if version == 1 else size | 0x0500 << 16
        text += struct.pack("<BBHIHHI", 4, 0x17 if version == 1 else 0x45, 12, 0, ordinal, offset, packed)
    return text


def cubin(kernels: dict[str, bytes], machine: int = 190) -> bytes:
    """An ELF file with a section of type 0x70000000 for each kernel."""
    names = b"\0.shstrtab\0" + b"".join(f".nv.info.{name}\0".encode() for name in kernels)
    body, headers = names, [struct.pack("<IIQQQQIIQQ", *[0] * 10)]
    headers.append(struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, 64, len(names), 0, 0, 1, 0))
    for name, content in kernels.items():
        at = names.index(f".nv.info.{name}\0".encode())
        headers.append(struct.pack("<IIQQQQIIQQ", at, 0x70000000, 0, 0, 64 + len(body), len(content), 0, 0, 4, 0))
        body += content
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    table_at = 64 + len(body)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, table_at, 0, 64, 0, 0, 64, len(headers), 1)
    return header + body + b"".join(headers)


def entry(code: bytes, *, kind: int = 2, arch: int = 90, how: str = "") -> bytes:
    """One entry of a fat binary; `how`: '' as it is, lz4 or zstd compressed."""
    import pyarrow as pa

    payload, flags = code, 0x11
    if how:
        payload = bytes(pa.Codec("lz4_raw" if how == "lz4" else "zstd").compress(code))
        flags |= 0x2000 if how == "lz4" else 0x8000
    padded = payload + bytes(-len(payload) % 8)
    header = struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(padded), len(payload) if how else 0, 0, 8, 1, arch, 0, 0, flags, 0,
        len(code) if how else 0,
    )  # fmt: skip
    return header + padded


def fatbin(*entries: bytes) -> bytes:
    """A container of entries."""
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)

"""The parameters of the kernels in a GPU code image: a cubin (ELF for CUDA) or PTX text.

A cubin has a section `.nv.info.<kernel>` for each kernel: a list of attributes, each a format byte, an attribute byte
and 16 bits that are the value or (format 4) the length of what follows. NVIDIA documents the names of the attributes
by the output of cuobjdump and nvdisasm alone; numbers and fields used here are those that public tools read
(CuAssembler, tinygrad, LLVM's readers) and that the images of NVIDIA's own libraries of CUDA 12 and 13 bear out.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

Bytes = bytes | memoryview | mmap.mmap

ELF_MAGIC = b"\x7fELF"
EM_CUDA = 190  # elf.h
_SHT_CUDA_INFO = 0x70000000
_SHN_XINDEX = 0xFFFF
_SECTION = np.dtype(
    [
        ("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("addr", "<u8"), ("offset", "<u8"), ("size", "<u8"),
        ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8"),
    ]
)  # fmt: skip
_HAS_PAYLOAD = 4  # EIFMT_SVAL
_PARAM_CBANK, _KPARAM_INFO, _CBANK_PARAM_SIZE, _KPARAM_INFO_V2 = 0x0A, 0x17, 0x19, 0x45

MAX_SECTIONS = 1 << 20
MAX_INFO_BYTES = 1 << 20
MAX_PARAMETERS_BYTES = 32764
"""Parameters of a launch take at most this (CUDA 12.1 and later; 4,096 before)."""


class Parameter(NamedTuple):
    """One parameter of a kernel: where it lies in the packed parameter buffer, and its size."""

    offset_bytes: int
    size_bytes: int


class Section(NamedTuple):
    """A section of an ELF file: name, type and bytes."""

    name: str
    kind: int
    data: memoryview


def sections(image: Bytes) -> Iterator[Section]:
    """The sections of a little-endian 64-bit ELF file; those that reach beyond it are left out.

    Raises ValueError where there is no such file.
    """
    data = memoryview(image).cast("B")
    if len(data) < 64 or bytes(data[:6]) != ELF_MAGIC + b"\x02\x01":
        raise ValueError("no little-endian 64-bit ELF file")
    table_at = struct.unpack_from("<Q", data, 40)[0]
    entry_bytes, count, names_at = struct.unpack_from("<HHH", data, 58)
    if entry_bytes != _SECTION.itemsize or not 0 < table_at <= len(data) - _SECTION.itemsize:
        raise ValueError("no section table")
    # With 65,280 sections or more the true numbers stand in the first one (ELF specification, e_shnum).
    first = np.frombuffer(data, _SECTION, 1, table_at)[0]
    count = count or int(first["size"])
    names_at = int(first["link"]) if names_at == _SHN_XINDEX else names_at
    if not names_at < count <= MAX_SECTIONS or table_at + count * _SECTION.itemsize > len(data):
        raise ValueError(f"{count} sections do not fit")
    table = np.frombuffer(data, _SECTION, count, table_at)
    names = _bytes_of(data, table[names_at])
    for row in table:
        name, inside = int(row["name"]), _bytes_of(data, row)
        if name < len(names) and inside is not None:
            yield Section(_text(names, name), int(row["type"]), inside)


def _bytes_of(data: memoryview, row: np.void) -> memoryview:
    start, size = int(row["offset"]), int(row["size"])
    return data[start : start + size] if start + size <= len(data) else data[:0]


def _text(names: memoryview, start: int) -> str:
    longest = bytes(names[start : start + 16384])
    return longest.partition(b"\0")[0].decode("utf-8", "replace")


def cubin_kernels(image: Bytes) -> dict[str, tuple[Parameter, ...]]:
    """Parameters of each kernel of a cubin, in their order.

    A kernel whose list is damaged or not whole is left out. Raises ValueError for anything but a CUDA ELF file.
    """
    data = memoryview(image).cast("B")
    if len(data) < 20 or struct.unpack_from("<H", data, 18)[0] != EM_CUDA:
        raise ValueError("not a CUDA ELF file")
    found: dict[str, tuple[Parameter, ...]] = {}
    for section in sections(data):
        kernel = section.name.removeprefix(".nv.info.")
        if section.kind == _SHT_CUDA_INFO and kernel != section.name and len(section.data) <= MAX_INFO_BYTES:
            parameters = _parameters(section.data)
            if parameters is not None:
                found[kernel] = parameters
    return found


def _parameters(info: memoryview) -> tuple[Parameter, ...] | None:
    """The parameters that a `.nv.info.<kernel>` lists; None where the list cannot be trusted."""
    by_ordinal: dict[int, Parameter] = {}
    total = 0
    for attribute, value, payload in _attributes(info):
        if attribute == _CBANK_PARAM_SIZE:
            total = value
        elif attribute == _PARAM_CBANK and len(payload) >= 8:  # symbol, offset in the bank, size
            total = struct.unpack_from("<H", payload, 6)[0]
        elif attribute in (_KPARAM_INFO, _KPARAM_INFO_V2) and len(payload) == 12:
            _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
            # Above bit 18 the size, below it alignment, space and bank; version 2 has the size in its low half.
            size = packed >> 18 if attribute == _KPARAM_INFO else packed & 0xFFFF
            by_ordinal[ordinal] = Parameter(offset, size)
    whole = sorted(by_ordinal) == list(range(len(by_ordinal)))
    ends = [p.offset_bytes + p.size_bytes for p in by_ordinal.values()]
    if not whole or max(ends, default=0) > MAX_PARAMETERS_BYTES or (total and max(ends, default=0) > total):
        return None
    if total and not by_ordinal:
        return None
    return tuple(by_ordinal[ordinal] for ordinal in range(len(by_ordinal)))


def _attributes(info: memoryview) -> Iterator[tuple[int, int, bytes]]:
    """(attribute, 16-bit value, payload) in order, up to where the list stops making sense."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        size = value if form == _HAS_PAYLOAD else 0
        if not 1 <= form <= _HAS_PAYLOAD or at + size > len(info):
            return
        yield attribute, value, bytes(info[at : at + size])
        at += size


_PTX_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?")
_PTX_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([subfb])(8|16|32|64)\s+(?:\.ptr\s+[^,]*?)?([\w$]+)\s*(?:\[\s*(\d+)\s*\])?\s*$"
)


def ptx_kernels(text: str) -> dict[str, tuple[Parameter, ...]]:
    """Parameters of each kernel of PTX text, in their order (PTX ISA, "Kernel Function Parameters").

    A kernel with a parameter of a type that is not known here is left out.
    """
    found: dict[str, tuple[Parameter, ...]] = {}
    for entry in _PTX_ENTRY.finditer(text):
        declared = [part.strip() for part in (entry[2] or "").split(",") if part.strip()]
        matches = [_PTX_PARAMETER.search(part) for part in declared]
        if all(matches):
            found[entry[1]] = _packed([match for match in matches if match])
    return found


def _packed(declared: list[re.Match[str]]) -> tuple[Parameter, ...]:
    parameters, end = [], 0
    for match in declared:
        element = int(match[3]) // 8
        alignment = min(max(int(match[1] or element), 1), 128)
        offset = (end + alignment - 1) // alignment * alignment
        size = element * int(match[5] or 1)
        parameters.append(Parameter(offset, size))
        end = offset + size
    return tuple(parameters)

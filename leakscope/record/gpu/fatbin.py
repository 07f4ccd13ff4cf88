"""Fat binaries: containers of one program's code for several GPU architectures.

What nvcc puts into the section `.nv_fatbin` and what is given to cuModuleLoadFatBinary. NVIDIA publishes the wrapper
(fatbinary_section.h) but not the container; its fields here are those that public tools read (cricket,
cuda-fatbin-decompression) and that the images of NVIDIA's own libraries of CUDA 12 and 13 bear out: a header of
16 bytes, then entries one after another, each a header with its own length and the (compressed) payload behind it.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from leakscope.record.gpu.cubin import ELF_MAGIC, Bytes, Parameter, cubin_kernels, ptx_kernels, sections

CONTAINER_MAGIC = 0xBA55ED50
WRAPPER_MAGIC = 0x466243B1
"""__fatBinC_Wrapper_t: magic, version, address of the container."""
KIND_PTX, KIND_ELF = 1, 2
_FLAG_LZ4, _FLAG_ZSTD = 0x2000, 0x8000

MAX_ENTRY_BYTES = 64 << 20
MAX_CONTAINERS_BYTES = 256 << 20
"""Of a search: payload, uncompressed, that is looked through for one kernel's name before it is given up."""
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")


@dataclass(frozen=True)
class Entry:
    """Code for one architecture (``arch``: 90 for sm_90) in a container."""

    kind: int
    arch: int
    flags: int
    payload: memoryview
    size_bytes: int  # uncompressed; 0 = it is not compressed

    @property
    def unpacked_bytes(self) -> int:
        """Length of the code."""
        return self.size_bytes or len(self.payload)

    def code(self) -> bytes | memoryview:
        """The image, uncompressed. Raises ValueError where it is damaged, too large, or packed in an unknown way."""
        if not self.flags & (_FLAG_LZ4 | _FLAG_ZSTD):
            return self.payload
        if not 0 < self.size_bytes <= MAX_ENTRY_BYTES:
            raise ValueError(f"{self.size_bytes} bytes are too many")
        import pyarrow as pa

        codec = "lz4_raw" if self.flags & _FLAG_LZ4 else "zstd"
        try:
            return bytes(pa.Codec(codec).decompress(self.payload, decompressed_size=self.size_bytes))
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"cannot be uncompressed: {error}") from None


def container_bytes(header: Bytes) -> int:
    """The length of a container from its first 16 bytes; raises ValueError where none begins there."""
    data = memoryview(header).cast("B")
    if len(data) < _HEADER.size:
        raise ValueError("no fat binary")
    magic, _, header_bytes, size = _HEADER.unpack_from(data)
    if magic != CONTAINER_MAGIC or header_bytes < _HEADER.size:
        raise ValueError("no fat binary")
    return int(header_bytes + size)


def entries(container: Bytes) -> Iterator[Entry]:
    """The entries of one container, as far as they lie within it. Raises ValueError where none begins."""
    data = memoryview(container).cast("B")
    end = min(container_bytes(data), len(data))
    at = _HEADER.unpack_from(data)[2]
    while at + _ENTRY.size <= end:
        kind, _, header_bytes, size, packed_bytes, _, _, _, arch, _, _, flags, _, unpacked = _ENTRY.unpack_from(
            data, at
        )
        start, after = at + header_bytes, at + header_bytes + size
        if header_bytes < _ENTRY.size or after > end or after <= at:
            return
        payload = data[start : start + packed_bytes] if 0 < packed_bytes <= size else data[start:after]
        yield Entry(kind, arch, flags, payload, unpacked)
        at = after


def containers(region: Bytes) -> Iterator[memoryview]:
    """The containers of a section `.nv_fatbin`: one after another, 8-aligned, with padding between."""
    data = memoryview(region).cast("B")
    magic, at = struct.pack("<I", CONTAINER_MAGIC), 0
    while at + _HEADER.size <= len(data):
        if data[at : at + 4] != magic:
            at += 8
            continue
        size = container_bytes(data[at:])
        yield data[at : at + size]
        at += (size + 7) & ~7


def fatbin_section(file: Bytes) -> memoryview:
    """The section `.nv_fatbin` of a host program or library, empty where there is none; ValueError: no ELF file."""
    for section in sections(file):
        if section.name == ".nv_fatbin":
            return section.data
    return memoryview(b"")


def image_kernels(image: Bytes) -> Iterator[dict[str, tuple[Parameter, ...]]]:
    """Parameters of the kernels of an image, a piece at a time: a cubin, PTX text, or one or several containers.

    Each container gives one architecture first and the others in later rounds: all take the same arguments, so whoever
    looks for one kernel has it early. Damaged pieces are passed over; beyond :data:`MAX_CONTAINERS_BYTES` nothing more
    is looked at. Raises ValueError for a damaged cubin and an image of an unknown kind.
    """
    data = memoryview(image).cast("B")
    if data[:4] == ELF_MAGIC:
        yield cubin_kernels(data)
        return
    if data[:4] != struct.pack("<I", CONTAINER_MAGIC):
        yield ptx_kernels(_ptx_text(data))
        return
    # PTX last: it is text of many times the size. Small ones first: there are as many kernels in each.
    by_container = [sorted(entries(c), key=lambda e: (e.kind != KIND_ELF, e.unpacked_bytes)) for c in containers(data)]
    left = MAX_CONTAINERS_BYTES
    for turn in range(max(map(len, by_container), default=0)):
        for of_container in by_container:
            if turn < len(of_container):
                left -= of_container[turn].unpacked_bytes
                if left < 0:
                    return
                with contextlib.suppress(ValueError):
                    yield _entry_kernels(of_container[turn])


def _entry_kernels(entry: Entry) -> dict[str, tuple[Parameter, ...]]:
    code = memoryview(entry.code())
    if entry.kind == KIND_ELF:
        return cubin_kernels(code)
    return ptx_kernels(_ptx_text(code)) if entry.kind == KIND_PTX else {}


def _ptx_text(data: memoryview) -> str:
    text = bytes(data[:MAX_ENTRY_BYTES]).partition(b"\0")[0].decode("utf-8", "replace")
    if ".version" not in text[:4096]:
        raise ValueError("an image of an unknown kind")
    return text

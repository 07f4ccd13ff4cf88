"""Code images in a target's memory: found while the process lives, read when a kernel of theirs is first launched.

An image in a mapped file (a library's `.nv_fatbin`) is kept as a place in that file, which outlives the process. One in
other memory may be freed at once and is copied.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from leakscope.record.gpu import fatbin
from leakscope.record.gpu.cubin import ELF_MAGIC, Bytes, Parameter
from leakscope.record.probes import functions
from leakscope.record.records import KERNEL_NAME_BYTES

MAX_COPY_BYTES = 16 << 20
"""An image outside of mapped files that is larger is not copied: it would hold up the draining of the rings."""
MAX_HELD_BYTES = 256 << 20
"""Copies whose kernels were not looked up yet; beyond it new ones are not made."""
MAX_FILES = 256
_MAX_PTX_BYTES = 4 << 20
_MAX_NAME_BYTES = 1 << 14


class Image:
    """One image. It is read as far as questions about its kernels need, and dropped once all of it was read."""

    def __init__(self, read: Callable[[], Bytes], held_bytes: int = 0) -> None:
        """`read` gives the bytes, at the first question; `held_bytes` is what they take until then."""
        self.held_bytes = held_bytes
        self._pieces: Iterator[dict[str, tuple[Parameter, ...]]] | None = _pieces(read)
        self._kernels: dict[str, tuple[Parameter, ...]] = {}

    def parameters(self, kernel: str) -> tuple[Parameter, ...] | None:
        """The parameters of a kernel by its (mangled) name; None where the image does not tell."""
        while kernel not in self._kernels and self._pieces is not None:
            try:
                piece = next(self._pieces, None)
            except (OSError, ValueError):
                piece = None
            if piece is None:
                self._pieces, self.held_bytes = None, 0
            else:
                self._kernels = piece | self._kernels
        return self._kernels.get(kernel)


def _pieces(read: Callable[[], Bytes]) -> Iterator[dict[str, tuple[Parameter, ...]]]:
    yield from fatbin.image_kernels(read())


@dataclass
class _Mapped:
    """The file mappings of a process at one moment, sorted by address."""

    starts: list[int] = field(default_factory=list)
    rows: list[tuple[int, int, str, int]] = field(default_factory=list)  # end, file offset, path, inode

    @classmethod
    def read(cls, pid: int) -> _Mapped:
        space = cls()
        try:
            text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
        except OSError:
            return space
        for line in text.splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith("/"):
                start, end = (int(part, 16) for part in fields[0].split("-"))
                space.starts.append(start)
                space.rows.append((end, int(fields[2], 16), fields[5], int(fields[4])))
        return space

    def find(self, address: int) -> tuple[int, str, int] | None:
        """(file offset, path, inode) of an address."""
        index = bisect_right(self.starts, address) - 1
        if index < 0 or address >= self.rows[index][0]:
            return None
        _, offset, path, inode = self.rows[index]
        return offset + address - self.starts[index], path, inode


class Images:
    """Takes images out of processes. Belongs to the thread that drains the rings: it must be quick and in time."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, int], int | None] = {}  # (path, inode): descriptor
        self._copies: list[Image] = []
        self.unreadable = 0

    def take(self, records: np.ndarray) -> list[Image | str | None]:
        """What KERNEL_RECORDs point to: images, and names that the probes did not, or not wholly, read.

        None for the other rows, and where it cannot be had.
        """
        maps: dict[int, _Mapped] = {}
        taken: list[Image | str | None] = [None] * len(records)
        roles = records["role"]
        lengths = records["name_bytes"]
        named = np.isin(roles, (functions.KERNEL_REGISTER, functions.KERNEL_GET)) & (records["result"] == 0)
        for row in np.flatnonzero(named & ((lengths == 0) | (lengths >= KERNEL_NAME_BYTES))):
            pid = int(records["pid"][row])
            if pid not in maps:
                maps[pid] = _Mapped.read(pid)
            taken[row] = self._name(pid, int(records["address"][row]), maps[pid])
        loads = np.isin(roles, (functions.IMAGE_LOAD, functions.IMAGE_REGISTER, functions.IMAGE_FILE))
        for row in np.flatnonzero(loads & (records["result"] == 0)):
            pid, address = int(records["pid"][row]), int(records["address"][row])
            if roles[row] == functions.IMAGE_FILE:
                taken[row] = self._file_image(pid, os.fsdecode(bytes(records["name"][row]).partition(b"\0")[0]))
            else:
                if pid not in maps:
                    maps[pid] = _Mapped.read(pid)
                if not address:  # the wrapper lay in a page that was never touched
                    address = _word(pid, int(records["container"][row]) + 8)
                taken[row] = self._at(pid, address, maps[pid])
            self.unreadable += taken[row] is None
        return taken

    def _name(self, pid: int, address: int, mapped: _Mapped) -> str | None:
        for size in (1024, _MAX_NAME_BYTES):
            raw = self._file_bytes(pid, address, mapped, size) or _read(pid, address, size)
            name, end, _ = raw.partition(b"\0")
            if end:
                return name.decode("utf-8", "replace")
        return None

    def _file_bytes(self, pid: int, address: int, mapped: _Mapped, size: int) -> bytes:
        """What a mapped file holds for an address: a name is never written to. Empty where no file is mapped."""
        found = mapped.find(address)
        file = self._open(f"/proc/{pid}/root{found[1]}", found[2]) if found else None
        return _pread(file, size, found[0]) if file is not None and found else b""

    def _file_image(self, pid: int, path: str) -> Image | None:
        root = f"/proc/{pid}/root" if path.startswith("/") else f"/proc/{pid}/cwd/"
        file = self._open(f"{root}{path}", -1)
        return Image(partial(_pread, file, fatbin.MAX_ENTRY_BYTES, 0)) if file is not None else None

    def _open(self, path: str, inode: int) -> int | None:
        """A descriptor of a regular file; paths come from the target, which may name anything."""
        key = (path, inode)
        if key not in self._files and len(self._files) < MAX_FILES:
            self._files[key] = None
            with contextlib.suppress(OSError, ValueError):
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    status = os.fstat(place)
                    if stat.S_ISREG(status.st_mode) and inode in (-1, status.st_ino):
                        self._files[key] = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
                finally:
                    os.close(place)
        return self._files.get(key)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            if file is not None:
                os.close(file)
        self._files.clear()

    def _at(self, pid: int, address: int, mapped: _Mapped) -> Image | None:
        header = _read(pid, address, 16)
        if header[:4] == struct.pack("<I", fatbin.WRAPPER_MAGIC) and len(header) == 16:
            address = struct.unpack_from("<Q", header, 8)[0]
            header = _read(pid, address, 16)
        found = mapped.find(address)
        if found is not None:
            offset, path, inode = found
            file = self._open(f"/proc/{pid}/root{path}", inode)
            # A process that is gone cannot be asked; a file that its memory contradicts is another's.
            if file is not None and header in (b"", _pread(file, 16, offset)):
                return Image(partial(_file_image_bytes, file, offset))
        if not header:
            return None
        size = _image_bytes(pid, address, header)
        self._copies = [image for image in self._copies if image.held_bytes]
        held = sum(image.held_bytes for image in self._copies)
        if not 0 < size <= min(MAX_COPY_BYTES, MAX_HELD_BYTES - held):
            return None
        copy = _read(pid, address, size)
        self._copies.append(Image(lambda: copy, len(copy)))
        return self._copies[-1]


def _file_image_bytes(file: int, offset: int) -> bytes:
    """An image in a file: of a section of containers the one that begins there, others belong to other modules."""
    try:
        size = fatbin.container_bytes(_pread(file, 16, offset))
    except ValueError:
        size = fatbin.MAX_ENTRY_BYTES
    return _pread(file, min(size, fatbin.MAX_CONTAINERS_BYTES), offset)


def _pread(file: int, size: int, offset: int) -> bytes:
    try:
        return os.pread(file, size, offset)
    except (OSError, OverflowError):
        return b""


def _image_bytes(pid: int, address: int, header: bytes) -> int:
    """How long an image is, from its own headers; 0 where it is of an unknown kind."""
    if header[:4] == ELF_MAGIC:
        # The section table of a cubin is followed by its program headers at most: the end is the last of all.
        table = _read(pid, address, 64)
        if len(table) < 64:
            return 0
        segments_at, sections_at = struct.unpack_from("<QQ", table, 32)
        _, segment_bytes, segments, section_bytes, count = struct.unpack_from("<HHHHH", table, 52)
        end = max(segments_at + segment_bytes * segments, sections_at + section_bytes * count)
        if end > MAX_COPY_BYTES:
            return int(end)
        rows = _read(pid, address + sections_at, section_bytes * count) if section_bytes == 64 else b""
        for at in range(0, len(rows) - 63, 64):
            kind, offset, size = (struct.unpack_from(form, rows, at + place)[0] for form, place in _SECTION_ENDS)
            if kind != _SHT_NOBITS:
                end = max(end, offset + size)
        return int(end)
    try:
        return fatbin.container_bytes(header)
    except ValueError:
        text = _read(pid, address, _MAX_PTX_BYTES)
        return text.find(b"\0") if b".version" in text[:4096] else 0


_SHT_NOBITS = 8
_SECTION_ENDS = (("<I", 4), ("<Q", 24), ("<Q", 32))  # type, offset and size of a section header


def _word(pid: int, address: int) -> int:
    return int.from_bytes(_read(pid, address, 8), "little")


def _read(pid: int, address: int, size: int) -> bytes:
    """Memory of a process, as much of it as can be read in one piece; empty where it cannot."""
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return _pread(memory, size, address)
    finally:
        os.close(memory)

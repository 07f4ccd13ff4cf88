"""Finding the files that know the names and lines of a module: itself, or its separate debug file.

Conventions of GDB and elfutils (https://sourceware.org/gdb/current/onlinedocs/gdb.html/Separate-Debug-Files.html):
``DIR/.build-id/ab/cdef….debug`` by build id, and the name in ``.gnu_debuglink`` beside the module, in ``.debug`` beside
it, or below ``/usr/lib/debug``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakscope.symbols.elf import ElfFile, Segment

SYSTEM_DEBUG = "/usr/lib/debug"
MAX_FILES = 200_000
"""Files below a directory that are looked at for their build ids."""
MAX_LINK_CHECK_BYTES = 4 << 30


@dataclass(frozen=True)
class SymbolFile:
    """An ELF file that belongs to a module, opened; `path` is where another process can open it too."""

    path: str
    elf: ElfFile


def open_elf(path: str) -> ElfFile:
    """The ELF file at a path. Raises ValueError for what is no regular file, or no ELF file; OSError if unreadable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        if os.pread(descriptor, 4, 0) != b"\x7fELF":
            raise ValueError("not an ELF file")
        return ElfFile(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


class DebugDirectories:
    """Files below some directories by build id: in the ``.build-id`` layout, else wherever they are.

    `problems` says what could not be looked at.
    """

    def __init__(self, directories: Iterable[Path]) -> None:
        self._directories = list(directories)
        self._index: dict[str, list[str]] | None = None
        self.problems: list[str] = []

    def find(self, build_id: str) -> list[SymbolFile]:
        """All files with this build id (hexadecimal)."""
        if len(build_id) < 4:
            return []
        roots = [directory / layout for directory in self._directories for layout in (".build-id", "")]
        names = (f"{build_id[2:]}.debug", build_id[2:])
        found = matching((str(root / build_id[:2] / name) for root in roots for name in names), build_id)
        if not any(file.elf.has_debug_info for file in found) or not any(file.elf.code for file in found):
            found += matching(self._anywhere().get(build_id, ()), build_id)
        return found

    def _anywhere(self) -> dict[str, list[str]]:
        if self._index is None:
            self._index = {}
            looked_at = 0
            for directory in self._directories:
                for folder, folders, names in os.walk(directory):
                    folders.sort()
                    for name in sorted(names):
                        looked_at += 1
                        if looked_at > MAX_FILES:
                            self.problems.append(f"{directory}: only the first {MAX_FILES:,} files were looked at")
                            return self._index
                        path = str(Path(folder) / name)
                        try:
                            build_id = open_elf(path).build_id
                        except (OSError, ValueError):
                            continue
                        if build_id:
                            self._index.setdefault(build_id, []).append(path)
        return self._index


class SymbolFinder:
    """The files of a module on whatever machine this is: in some directories, then where the module itself was."""

    def __init__(self, directories: DebugDirectories) -> None:
        self._directories = directories

    def find(self, module: str, build_id: str) -> list[SymbolFile]:
        """Files of the module with this build id; none for a module without one."""
        if not build_id:
            return []
        found = self._directories.find(build_id)
        if module.startswith("/"):
            found += matching([module], build_id)
        name = f"{SYSTEM_DEBUG}/.build-id/{build_id[:2]}/{build_id[2:]}.debug"
        found += matching([name], build_id)
        for file in list(found):
            if file.elf.code:
                found += separate_debug_files(file.elf, module)
        return list({file.path: file for file in found}.values())


def recorded_segments(facts: Iterable[Mapping[str, Any]]) -> dict[str, list[Segment]]:
    """Executable segments by build id from the facts of a capture's sources, which nobody vouches for."""
    found: dict[str, list[Segment]] = {}
    for of_source in facts:
        recorded = of_source.get("segments")
        for build_id, rows in recorded.items() if isinstance(recorded, dict) else ():
            with contextlib.suppress(TypeError, ValueError):
                segments = [Segment(int(address), int(offset), int(size), True) for offset, size, address in rows]
                if all(0 <= number < 1 << 63 for s in segments for number in (s.address, s.offset, s.size_bytes)):
                    found[build_id] = segments
    return found


def matching(paths: Iterable[str], build_id: str) -> list[SymbolFile]:
    """Those of the files that are ELF files with this build id."""
    found = []
    for path in paths:
        try:
            elf = open_elf(path)
            if elf.build_id == build_id:
                found.append(SymbolFile(path, elf))
        except (OSError, ValueError):
            continue
    return found


def separate_debug_files(elf: ElfFile, path: str, roots: Sequence[str] = ("",)) -> list[SymbolFile]:
    """The separate debug files of the module at `path` (as its process sees it), below any of some root directories.

    One that a link names has to have the module's build id, or, where there is none, the CRC-32 that the link states.
    """
    found: list[SymbolFile] = []
    if len(elf.build_id) >= 4:
        name = f"{SYSTEM_DEBUG}/.build-id/{elf.build_id[:2]}/{elf.build_id[2:]}.debug"
        found += matching([root + name for root in roots], elf.build_id)
    link = elf.debug_link
    if link is None or found:
        return found
    name, checksum = link
    folder = os.path.dirname(path)  # noqa: PTH120 (text to put a root before)
    beside = [f"{folder}/{name}", f"{folder}/.debug/{name}", f"{SYSTEM_DEBUG}{folder}/{name}"]
    candidates = [root + place for root in roots for place in beside if place != path]
    if elf.build_id:
        return matching(candidates, elf.build_id)
    return [file for file in matching(candidates, "") if _crc(file.path) == checksum]


def _crc(path: str) -> int | None:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_LINK_CHECK_BYTES:
                return None
            checksum = 0
            while piece := file.read(1 << 20):
                checksum = zlib.crc32(piece, checksum)
            return checksum
    except OSError:
        return None

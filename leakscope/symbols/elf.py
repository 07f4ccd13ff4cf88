"""Function symbols, build id and segments of an ELF file, read with pyelftools and decoded in bulk by numpy.

Addresses are those of the file (its link-time virtual addresses); offsets are places in the file. A separate debug file
has the addresses of the file that it was made from, but not its offsets: objcopy(1) drops them with the contents.
"""

from __future__ import annotations

import contextlib
import io
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

_SYMBOL_64 = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_STT_FUNC, _STT_GNU_IFUNC = 2, 10
_PF_X = 1
MAX_DEBUG_LINK_BYTES = 4096


@dataclass(frozen=True)
class Segment:
    """A loadable segment: virtual address, file offset, bytes in the file."""

    address: int
    offset: int
    size_bytes: int
    executable: bool


def address_of(segments: Iterable[Segment], offset: int) -> int | None:
    """The address at a file offset, None where no segment has it."""
    for segment in segments:
        if segment.offset <= offset < segment.offset + segment.size_bytes:
            return offset - segment.offset + segment.address
    return None


@contextlib.contextmanager
def _damage_as_value_error() -> Iterator[None]:
    """A damaged or hostile file makes the parser trip in ways of its own; here all of them are a ValueError."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"not a usable ELF file: {error}") from error


class ElfFile:
    """One ELF file. A mapped file is read where it is looked at, other data is copied.

    Every member raises ValueError with what is wrong for a damaged file; 32-bit files are not supported.
    """

    def __init__(self, data: bytes | memoryview | mmap.mmap) -> None:
        from elftools.elf.elffile import ELFFile

        with _damage_as_value_error():
            stream: Any = data if isinstance(data, mmap.mmap) else io.BytesIO(data)
            self._elf: Any = ELFFile(stream)
            if self._elf.elfclass != 64:
                raise ValueError("32-bit ELF files are not supported")
            self.segments = [
                Segment(s["p_vaddr"], s["p_offset"], s["p_filesz"], bool(s["p_flags"] & _PF_X))
                for s in self._elf.iter_segments()
                if s["p_type"] == "PT_LOAD"
            ]

    @cached_property
    def build_id(self) -> str:
        """The GNU build id in hexadecimal, or ''."""
        with _damage_as_value_error():
            return self._read_build_id()

    def _read_build_id(self) -> str:
        section = self._elf.get_section_by_name(".note.gnu.build-id")
        if section is not None:
            for note in section.iter_notes():
                if note["n_type"] == "NT_GNU_BUILD_ID":
                    return str(note["n_desc"])
        return ""

    @property
    def code(self) -> tuple[Segment, ...]:
        """The executable segments; () for a separate debug file, whose segments have no contents."""
        return tuple(segment for segment in self.segments if segment.executable and segment.size_bytes)

    @cached_property
    def has_debug_info(self) -> bool:
        """Whether the file itself has DWARF that says more than how to unwind."""
        with _damage_as_value_error():
            return any(self._elf.get_section_by_name(name) for name in (".debug_info", ".zdebug_info"))

    @cached_property
    def debug_link(self) -> tuple[str, int] | None:
        """(file name, CRC-32 of its content) of the separate debug file that `.gnu_debuglink` names, None without.

        The section holds a name that ends with a zero byte, padding to four bytes, and the CRC
        (https://sourceware.org/gdb/current/onlinedocs/gdb.html/Separate-Debug-Files.html).
        """
        with _damage_as_value_error():
            section = self._elf.get_section_by_name(".gnu_debuglink")
            if section is None or section["sh_size"] > MAX_DEBUG_LINK_BYTES:
                return None
            name, _, rest = section.data().partition(b"\0")
            if not name or b"/" in name or len(rest) < 4:
                return None
            return name.decode("utf-8", "surrogateescape"), int.from_bytes(rest[-4:], "little")

    @cached_property
    def _functions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(address, size, string table, place of the name in it) of all function symbols, sorted by address."""
        with _damage_as_value_error():
            return self._read_functions()

    def _read_functions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        columns: list[tuple[np.ndarray, ...]] = []
        self._strings: list[bytes] = []
        for section_name in (".symtab", ".dynsym"):
            section = self._elf.get_section_by_name(section_name)
            if section is None or section["sh_type"] == "SHT_NOBITS":
                continue
            self._strings.append(self._elf.get_section(section["sh_link"]).data())
            table = np.frombuffer(section.data(), _SYMBOL_64)
            kinds = table["info"] & 15
            table = table[((kinds == _STT_FUNC) | (kinds == _STT_GNU_IFUNC)) & (table["section"] != 0)]
            which = np.full(len(table), len(self._strings) - 1)
            columns.append((table["value"].astype(np.int64), table["size"].astype(np.int64), which, table["name"]))
        if not columns:
            empty = np.empty(0, np.int64)
            return empty, empty, empty, empty
        addresses, sizes, which, places = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        order = np.lexsort((sizes, addresses))
        return addresses[order], sizes[order], which[order], places[order]

    def function_at(self, offset: int) -> str:
        """Name of the function that covers a file offset, as the file has it (mangled); '' when none does."""
        address = address_of(self.segments, offset)
        return "" if address is None else self.function_at_address(address)

    def function_at_address(self, address: int) -> str:
        """Name of the function that covers an address, as the file has it (mangled); '' when none does."""
        addresses, sizes, _, _ = self._functions
        index = int(np.searchsorted(addresses, address, "right")) - 1
        if index < 0:
            return ""
        start = addresses[index]
        first = int(np.searchsorted(addresses, start, "left"))
        # Size 0 marks hand-written assembly, which reaches to the next symbol.
        found = [self._name(i) for i in range(first, index + 1) if address < start + sizes[i] or sizes[i] == 0]
        # Of several names the public one: malloc rather than __libc_malloc.
        return min(found, key=lambda name: (len(name) - len(name.lstrip("_")), len(name), name), default="")

    def function_offsets(self) -> dict[str, int]:
        """File offset of each exported or local function by name (symbol versions dropped)."""
        addresses = self._functions[0]
        offsets = addresses.copy()
        for segment in self.segments:
            inside = (addresses >= segment.address) & (addresses < segment.address + segment.size_bytes)
            offsets[inside] = addresses[inside] - segment.address + segment.offset
        return {self._name(index): int(offset) for index, offset in enumerate(offsets)}

    def data_symbols(self, names: Iterable[str]) -> dict[str, int]:
        """Address of each defined symbol of these names, of whatever kind; without those that are not there."""
        with _damage_as_value_error():
            return self._find_data_symbols(list(names))

    def _find_data_symbols(self, names: list[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for section_name in (".dynsym", ".symtab"):
            missing = [name for name in names if name not in found]
            section = self._elf.get_section_by_name(section_name) if missing else None
            if section is None:
                continue
            table = np.frombuffer(section.data(), _SYMBOL_64)
            table = table[table["section"] != 0]
            strings = b"\0" + self._elf.get_section(section["sh_link"]).data()
            for name in missing:
                text, place = name.encode() + b"\0", -1
                # A name may also be the tail of a longer one: every place that reads so counts.
                while (place := strings.find(text, place + 1)) > 0:
                    rows = np.flatnonzero(table["name"] == place - 1)
                    if len(rows):
                        found[name] = int(table["value"][rows[0]])
                        break
        return found

    def needs(self, library: str) -> bool:
        """Whether a library whose name begins so is among those the file is linked to."""
        with _damage_as_value_error():
            section = self._elf.get_section_by_name(".dynamic")
            tags = section.iter_tags("DT_NEEDED") if section is not None else ()
            return any(tag.needed.startswith(library) for tag in tags)

    def read(self, address: int, size_bytes: int) -> bytes:
        """Initial data at an address; raises ValueError where the file has none."""
        for segment in self.segments:
            if segment.address <= address and address + size_bytes <= segment.address + segment.size_bytes:
                self._elf.stream.seek(address - segment.address + segment.offset)
                return bytes(self._elf.stream.read(size_bytes))
        raise ValueError(f"no data at {address:#x}")

    def _name(self, index: int) -> str:
        _, _, which, places = self._functions
        strings, start = self._strings[int(which[index])], int(places[index])
        return strings[start : strings.index(b"\0", start)].decode("utf-8", "replace")

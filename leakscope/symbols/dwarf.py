"""Source lines and inlined functions of addresses, from a file's DWARF.

The frames at one address follow the DWARF 5 standard, §3.3.8: inside a concrete function lie the entries of what was
inlined there, each with the place that it was called from. The innermost function is at the line of the address, each
outer one at the place where the next inner one was called.
"""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from leakscope.symbols import libdw
from leakscope.symbols.demangle import MAX_NAME, demangle
from leakscope.symbols.libdw import Die

MAX_INLINED = 64
"""Functions inlined into each other at one address that are told; the innermost ones beyond are left out."""
MAX_DEPTH = 200
"""Entries inside each other that are followed; a hostile file may nest without end."""
MAX_FILE_NAME = 4096
MAX_LINE = 2**31 - 1
_SCOPES = frozenset(
    {libdw.DW_TAG_NAMESPACE, libdw.DW_TAG_MODULE, libdw.DW_TAG_CLASS, libdw.DW_TAG_STRUCTURE, libdw.DW_TAG_UNION}
)
_BLOCKS = frozenset(
    {libdw.DW_TAG_LEXICAL_BLOCK, libdw.DW_TAG_INLINED_SUBROUTINE, libdw.DW_TAG_TRY_BLOCK, libdw.DW_TAG_CATCH_BLOCK}
)
_UNNAMED = {libdw.DW_TAG_NAMESPACE: "(anonymous namespace)"}


class SourceFrame(NamedTuple):
    """A function and the line in it; '' and 0 where DWARF does not say."""

    function: str
    file: str
    line: int


@dataclass
class _Block:
    """A function, a function inlined into it, or a block of either: the code that it covers and what lies inside.

    `name` is None for a block. `call` is the (file, line) where an inlined function was called.
    """

    ranges: list[tuple[int, int]]
    name: str | None = None
    call: tuple[str, int] | None = None
    # Seen as a part of its caller: what the compiler made up, or the programmer's wish (GCC's attribute `artificial`).
    artificial: bool = False
    inside: list[_Block] = field(default_factory=list)


@dataclass
class _Unit:
    """A compilation unit. `functions` are (start, end, index into `dies`) of its concrete functions, by start."""

    die: Die
    scope: Die
    dies: list[Die] = field(default_factory=list)
    functions: np.ndarray | None = None
    files: tuple[c_void_p, int] | None = None
    directory: str | None = None
    blocks: dict[int, _Block] = field(default_factory=dict)


def _sorted(rows: list[tuple[int, int, int]]) -> np.ndarray:
    table = np.array(rows, np.uint64).reshape(-1, 3)
    return table[np.argsort(table[:, 0], kind="stable")]


def _find(table: np.ndarray, address: int) -> int | None:
    """The third column of the row of (start, end, …) that holds an address."""
    index = int(np.searchsorted(table[:, 0], np.uint64(address), "right")) - 1
    return int(table[index, 2]) if index >= 0 and address < table[index, 1] else None


class DwarfFile:
    """The DWARF of an open file. Raises OSError without libdw, ValueError where the file has no DWARF to read."""

    def __init__(self, descriptor: int) -> None:
        self._dw: Any = libdw.library()
        self._handle = self._dw.dwarf_begin(descriptor, 0)  # DWARF_C_READ
        if not self._handle:
            raise ValueError(libdw.last_error())
        self._names: dict[int, str] = {}
        self._units = [_Unit(die, scope) for die, scope in libdw.units(self._handle)]
        # Not from .debug_aranges: clang writes none.
        self._code = _sorted([(*r, i) for i, unit in enumerate(self._units) for r in libdw.ranges(unit.die)])

    def __enter__(self) -> DwarfFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._dw.dwarf_end(self._handle)
        self._handle = None

    def frames_at(self, address: int) -> list[SourceFrame]:
        """The frames at an address of the file, outermost (the concrete function) first; [] where it says nothing."""
        index = _find(self._code, address)
        if index is None:
            return []
        unit = self._units[index]
        at = self._line(unit, address)
        frames: list[SourceFrame] = []
        functions = [block for block in reversed(self._around(unit, address)) if block.name is not None]
        for index, block in enumerate(functions):
            if index + 1 < len(functions) and functions[index + 1].name == block.name:
                continue  # a function that the compiler split and put together again, as glibc's mmap: one frame
            if not block.artificial or block.call is None:
                frames.append(SourceFrame(block.name or "", *at))
            at = block.call or at
        if not frames and at[0]:
            frames = [SourceFrame("", *at)]
        return frames[::-1][: MAX_INLINED + 1]

    def _line(self, unit: _Unit, address: int) -> tuple[str, int]:
        row = self._dw.dwarf_getsrc_die(byref(unit.die), address)
        line = c_int()
        if not row or self._dw.dwarf_lineno(row, byref(line)) != 0:
            return "", 0
        # Line 0 is code that belongs to no line in particular.
        return self._path(unit, self._dw.dwarf_linesrc(row, None, None)), max(line.value, 0)

    def _around(self, unit: _Unit, address: int) -> list[_Block]:
        """The function at an address and what lies inside it there, outermost first."""
        if unit.functions is None:
            unit.functions = self._read_functions(unit)
        number = _find(unit.functions, address)
        if number is None:
            return []
        if number not in unit.blocks:
            unit.blocks[number] = self._read_block(unit, libdw.DW_TAG_SUBPROGRAM, unit.dies[number], 0)
        nest, inside = [unit.blocks[number]], unit.blocks[number].inside
        while block := next((b for b in inside if any(start <= address < end for start, end in b.ranges)), None):
            nest.append(block)
            inside = block.inside
        return nest

    def _read_functions(self, unit: _Unit) -> np.ndarray:
        """libdw's own search passes over functions inside of namespaces and types, where Rust has all of them."""
        rows: list[tuple[int, int, int]] = []
        waiting = [(unit.scope, 0)]
        while waiting:
            outer, depth = waiting.pop()
            for tag, die in libdw.children(outer):
                if tag == libdw.DW_TAG_SUBPROGRAM:
                    if found := libdw.ranges(die):
                        rows += [(*r, len(unit.dies)) for r in found]
                        unit.dies.append(die)
                elif tag in _SCOPES and depth < MAX_DEPTH:
                    waiting.append((die, depth + 1))
        return _sorted(rows)

    def _read_block(self, unit: _Unit, tag: int, die: Die, depth: int) -> _Block:
        block = _Block(libdw.ranges(die))
        if tag == libdw.DW_TAG_INLINED_SUBROUTINE:
            line = min(libdw.number(die, libdw.DW_AT_CALL_LINE), MAX_LINE)
            block.call = (self._source_file(unit, libdw.number(die, libdw.DW_AT_CALL_FILE)), line)
        if tag in (libdw.DW_TAG_INLINED_SUBROUTINE, libdw.DW_TAG_SUBPROGRAM):
            block.name = self._name(die)
            block.artificial = bool(self._dw.dwarf_hasattr_integrate(byref(die), libdw.DW_AT_ARTIFICIAL))
        if depth < MAX_DEPTH:
            inside = [(t, d) for t, d in libdw.children(die) if t in _BLOCKS]
            block.inside = [self._read_block(unit, t, d, depth + 1) for t, d in inside]
        return block

    def _name(self, die: Die) -> str:
        declared = libdw.origin(die)
        key = declared.addr or 0
        if key not in self._names:
            mangled = libdw.text(die, libdw.DW_AT_LINKAGE_NAME, libdw.DW_AT_MIPS_LINKAGE_NAME)
            self._names[key] = demangle(mangled) if mangled else self._qualified(declared)
        return self._names[key]

    def _qualified(self, declared: Die) -> str:
        """`namespace::class::function` of a function that has no symbol (one that only its file sees)."""
        parts = [_decoded(self._dw.dwarf_diename(byref(declared)))]
        for die in libdw.scopes_of(declared)[1:] if parts[0] else ():
            tag = self._dw.dwarf_tag(byref(die))
            if tag in _SCOPES:
                name = _decoded(self._dw.dwarf_diename(byref(die))) or _UNNAMED.get(tag, "")
                parts += [name] if name else []
        return "::".join(reversed(parts))[:MAX_NAME]

    def _source_file(self, unit: _Unit, index: int) -> str:
        if unit.files is None:
            files, count = c_void_p(), c_size_t()
            found = self._dw.dwarf_getsrcfiles(byref(unit.die), byref(files), byref(count)) == 0
            unit.files = (files, count.value if found else 0)
        files, count_of = unit.files
        return self._path(unit, self._dw.dwarf_filesrc(files, index, None, None)) if index < count_of else ""

    def _path(self, unit: _Unit, name: bytes | None) -> str:
        """The path of a source file; libdw leaves those relative that are so to the directory of the compilation."""
        path = _decoded(name)
        if path == "???":
            return ""
        if path and not path.startswith("/"):
            if unit.directory is None:
                unit.directory = libdw.text(unit.die, libdw.DW_AT_COMP_DIR)
            path = f"{unit.directory}/{path}" if unit.directory else path
        return path if len(path) <= MAX_FILE_NAME else ""


def _decoded(name: bytes | None) -> str:
    return name.decode("utf-8", "replace") if name else ""

"""Names, lines and inlined functions for the native frames of `frames` and `stacks`, from files found by build id.

A frame keeps its id and becomes the concrete function at its address; a function inlined there is a new frame of kind
`inlined` behind it in every stack. Ids of stacks stay, so that rows which name them do too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from leakscope.model.symbolized import MissingSymbols, Symbolized
from leakscope.model.tables import FRAMES, STACKS
from leakscope.symbols.debug_files import SymbolFile
from leakscope.symbols.demangle import demangle
from leakscope.symbols.dwarf import SourceFrame
from leakscope.symbols.dwarf_worker import DwarfWorker
from leakscope.symbols.elf import Segment, address_of

FindFiles = Callable[[str, str], Sequence[SymbolFile]]
"""(path of a module, its build id or '') → the module itself and its debug files, as far as they are to be had."""

NO_FILE = "no file with this build id was found"
NO_BUILD_ID = "the module has no build id, so no file can be known to be the same"
NO_DEBUG_INFO = "no debug information was found"
NO_ADDRESSES = "its debug file alone does not say where its code lay; add the module itself"


def symbolize(
    frames: pa.Table,
    stacks: pa.Table,
    find: FindFiles,
    segments: Mapping[str, Sequence[Segment]],
    worker: DwarfWorker,
) -> tuple[pa.Table, pa.Table, Symbolized]:
    """`frames` and `stacks` with what could be found out, and what could not.

    `segments` are the executable segments of modules by build id, as recorded: a separate debug file no longer knows
    the file offsets that frames have.
    """
    table = _Frames(frames, _return_addresses(stacks))
    result = table.counts()
    for (module, build_id), rows in table.pending().items():
        reason = _resolve(table, rows, find(module, build_id), segments.get(build_id, ()), worker)
        without = [row for row in rows if not table.line[row]]
        if without and (reason or table.unnamed(without)):
            reason = reason or "no symbol covers these addresses"
            if not build_id and reason == NO_FILE:
                reason = NO_BUILD_ID
            result.missing.append(MissingSymbols(module, build_id, len(without), table.unnamed(without), reason))
    result.missing.sort(key=lambda missing: (-missing.unnamed, -missing.frames, missing.module, missing.build_id))
    after = table.counts()
    result.unnamed_after, result.without_line_after = after.unnamed_before, after.without_line_before
    result.inlined = len(table.added)
    result.changed = table.changed
    return table.frames(), table.stacks(stacks), result


def _resolve(
    table: _Frames,
    rows: list[int],
    files: Sequence[SymbolFile],
    recorded: Sequence[Segment],
    worker: DwarfWorker,
) -> str:
    """Fill in what the files know of some frames of one module; why lines are missing, '' when they need not be."""
    if not files:
        return NO_FILE
    code = recorded or next((file.elf.code for file in files if file.elf.code), ())
    if not code:
        return NO_ADDRESSES
    at = {row: address for row in rows if (address := address_of(code, table.place(row))) is not None}
    for row, address in at.items():
        if not table.function[row]:
            table.function[row] = _function(files, address)
    with_lines = [file for file in files if file.elf.has_debug_info]
    reason = NO_DEBUG_INFO
    for file in with_lines:
        distinct = sorted(set(at.values()))
        try:
            found = dict(zip(distinct, worker.frames(file.path, distinct), strict=True))
        except ValueError as error:
            reason = f"its debug information cannot be used: {error}"
            continue
        for row, address in at.items():
            table.describe(row, found[address])
        return ""
    return reason


def _function(files: Iterable[SymbolFile], address: int) -> str:
    for file in files:
        try:
            if name := file.elf.function_at_address(address):
                return demangle(name)
        except ValueError:  # damaged
            continue
    return ""


class _Frames:
    """The columns of `frames` as lists, to be changed in place, and the frames that are added."""

    def __init__(self, frames: pa.Table, return_addresses: np.ndarray) -> None:
        self._table = frames
        columns = {name: frames[name].to_pylist() for name in ("id", "module", "build_id", "offset", "kind")}
        self.id, self.module, self.build_id, self.offset, self.kind = columns.values()
        self.function: list[str] = [name or "" for name in frames["function"].to_pylist()]
        self.file: list[str] = frames["file"].to_pylist()
        self.line: list[int] = frames["line"].to_pylist()
        self.added: list[dict[str, Any]] = []
        self._inlined: dict[int, list[int]] = {}
        self._next_id = max(self.id, default=0) + 1
        self._is_return = set(return_addresses.tolist())
        self._native = [row for row, kind in enumerate(self.kind) if kind == "native"]
        for row in self._native:
            self.function[row] = demangle(self.function[row])

    def counts(self) -> Symbolized:
        """The state of the native frames, as that before."""
        unnamed = sum(not self.function[row] for row in self._native)
        without_line = sum(not self.line[row] for row in self._native)
        return Symbolized(len(self._native), unnamed, unnamed, without_line, without_line)

    def pending(self) -> dict[tuple[str, str], list[int]]:
        """Rows of native frames of mapped files without a line, by (module, build id)."""
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for row in self._native:
            if not self.line[row] and self.offset[row] and self.module[row]:
                groups[self.module[row], self.build_id[row] or ""].append(row)
        return groups

    def unnamed(self, rows: Iterable[int]) -> int:
        """How many of the rows have no function."""
        return sum(not self.function[row] for row in rows)

    def place(self, row: int) -> int:
        """The file offset to look up: a return address stands behind its call, one byte back is inside of it."""
        return self.offset[row] - (self.id[row] in self._is_return)

    def describe(self, row: int, found: Sequence[SourceFrame]) -> None:
        """Take over what DWARF says of a frame: the concrete function first, then what is inlined there."""
        if not found:
            return
        concrete, *inlined = found
        self.function[row] = self.function[row] or concrete.function
        self.file[row], self.line[row] = concrete.file, concrete.line
        new = []
        for frame in inlined:
            new.append(self._next_id)
            self._next_id += 1
            self.added.append(
                {
                    "id": new[-1], "function": frame.function, "file": frame.file, "line": frame.line,
                    "module": self.module[row], "build_id": self.build_id[row], "offset": 0, "kind": "inlined",
                }
            )  # fmt: skip
        if new:
            self._inlined[self.id[row]] = new

    @property
    def changed(self) -> bool:
        """Whether any row is not as it was."""
        if self.added or self.line != self._table["line"].to_pylist() or self.file != self._table["file"].to_pylist():
            return True
        return self.function != self._table["function"].to_pylist()

    def frames(self) -> pa.Table:
        """The rows of `frames`, the added ones at the end."""
        changed = {"function": self.function, "file": self.file, "line": self.line}
        arrays = [pa.array(changed[f.name], f.type) if f.name in changed else self._table[f.name] for f in FRAMES]
        return pa.concat_tables(
            [pa.table(arrays, schema=FRAMES), pa.Table.from_pylist(self.added, schema=FRAMES)]
        ).unify_dictionaries()

    def stacks(self, stacks: pa.Table) -> pa.Table:
        """The rows of `stacks` with inlined frames behind those that they are in."""
        if not self._inlined or not stacks.num_rows:
            return stacks
        flat, ends = _flat(stacks)
        extra = np.zeros(max(int(flat.max(initial=0)), *self._inlined) + 1, np.int64)
        for frame, new in self._inlined.items():
            extra[frame] = len(new)
        lengths = 1 + extra[flat]
        places = np.concatenate([[0], np.cumsum(lengths)])
        expanded = np.zeros(places[-1], np.int32)
        expanded[places[:-1]] = flat
        for place in np.flatnonzero(lengths > 1).tolist():
            expanded[places[place] + 1 : places[place + 1]] = self._inlined[int(flat[place])]
        lists = pa.ListArray.from_arrays(pa.array(places[ends], pa.int32()), pa.array(expanded, pa.int32()))
        return pa.table([stacks["id"], lists], schema=STACKS)


def _flat(stacks: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """(frame ids of all stacks one behind the other, len + 1 places where each stack begins and ends)."""
    lists = stacks["frames"].combine_chunks()
    lists = lists if isinstance(lists, pa.Array) else pa.concat_arrays(lists.chunks)
    ends = np.concatenate([[0], np.cumsum(lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))])
    return lists.flatten().to_numpy(zero_copy_only=False), ends.astype(np.int64)


def _return_addresses(stacks: pa.Table) -> np.ndarray:
    """Ids of the frames that called another one in some stack: all but the innermost ones."""
    if not stacks.num_rows:
        return np.zeros(0, np.int32)
    flat, ends = _flat(stacks)
    outer = np.ones(len(flat), bool)
    outer[ends[1:][ends[1:] > ends[:-1]] - 1] = False
    return np.unique(flat[outer])

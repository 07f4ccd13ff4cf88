"""Launch records → `launch_arguments`: the words of launches that point into memory that the recorder knows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from leakscope.model.tables import LAUNCH_ARGUMENTS
from leakscope.record import records
from leakscope.record.decode.columns import KIND_CODES, OP_CODES, distinct
from leakscope.record.gpu.kernels import Kernel, Kernels
from leakscope.record.probes import functions
from leakscope.record.probes.functions import FUNCTIONS

_HANDLE_MAPS = np.array([probe.role == functions.HANDLE_MAP for probe in FUNCTIONS])
_REACHED = np.zeros(len(KIND_CODES), bool)
_REACHED[[KIND_CODES[kind] for kind in ("device", "managed", "async", "ipc", "pinned", "registered")]] = True
"""Kinds of memory that a kernel gets as a pointer. Arrays and handles of cuMemCreate have no address of their own."""
NOT_READ = -1
"""Position of the row that says that not all of a launch's parameters were read."""


class Ranges:
    """Memory that launches can point into, by process, as far as the recorder saw it being allocated."""

    def __init__(self) -> None:
        self._known = np.empty((0, 4), np.uint64)  # pid, address, end, time of the allocation

    def add(self, pid: np.ndarray, address: np.ndarray, size: np.ndarray, ts_ns: np.ndarray) -> None:
        """Take allocations; equally long arrays."""
        columns = [column.astype(np.uint64) for column in (pid, address, address + np.maximum(size, 1), ts_ns)]
        self._known = np.concatenate([self._known, np.stack(columns, axis=1)])

    def remove(self, pid: np.ndarray, address: np.ndarray, ts_ns: np.ndarray) -> None:
        """Drop what was freed: `ts_ns` are times of allocations."""
        if not len(pid) or not len(self._known):
            return
        key = np.dtype([("pid", "<u8"), ("address", "<u8"), ("ts_ns", "<u8")])
        ended = np.stack([column.astype(np.uint64) for column in (pid, address, ts_ns)], axis=1)
        mine = np.ascontiguousarray(self._known[:, [0, 1, 3]])
        gone = np.isin(mine.view(key).reshape(-1), np.ascontiguousarray(ended).view(key).reshape(-1))
        self._known = self._known[~gone]

    def hold(self, pid: np.ndarray, value: np.ndarray) -> np.ndarray:
        """bool[n]: whether a value lies in memory of its process."""
        inside = np.zeros(len(value), bool)
        for process in np.unique(pid):
            mine = self._known[self._known[:, 0] == process]
            if len(mine):
                order = np.argsort(mine[:, 1])
                starts, ends = mine[order, 1], np.maximum.accumulate(mine[order, 2])
                asked = pid == process
                index = np.searchsorted(starts, value[asked], "right").astype(np.int64) - 1
                # Ends only grow: a range that an earlier, longer one covers counts to it.
                inside[asked] = (index >= 0) & (value[asked] < ends[np.maximum(index, 0)])
        return inside


@dataclass
class LaunchCounts:
    """Launches by how much of their parameters is known."""

    approximate: int = 0  # the kernel's parameter list was not to be had
    partial: int = 0  # it has more words than were read


class LaunchArguments:
    """Makes `launch_arguments` rows. Every batch: :meth:`table`, with the memory events of the same time."""

    def __init__(self, kernels: Kernels, source_id: int) -> None:
        self.kernels = kernels
        self.counts = LaunchCounts()
        self._source_id = source_id
        self._ranges = Ranges()

    def names(self, launched: np.ndarray) -> pa.Array:
        """Names of the kernels of launches (CALL_RECORD), '' where unknown."""
        names = np.full(len(launched), "", object)
        for rows, kernel in self._by_kernel(launched["pid"], launched["addr"], launched["enter_ns"]):
            names[rows] = kernel.name if kernel else ""
        return pa.array(names, pa.string())

    def table(self, launches: list[np.ndarray], events: list[pa.Table], calls: np.ndarray) -> pa.Table:
        """Rows of LAUNCH_RECORDs. `events`: mem_events of the batch, `calls`: its CALL_RECORDs of functions."""
        freed = self._follow(events, calls)
        parts = [self._rows(np.concatenate(launches))] if launches else []
        self._ranges.remove(*freed)
        return pa.concat_tables(parts) if parts else LAUNCH_ARGUMENTS.empty_table()

    def _follow(self, events: list[pa.Table], calls: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take the allocations of a batch; (pid, address, time of allocation) of its frees, which come later."""
        freed: list[np.ndarray] = []
        for table in events:
            op, kind = (table.column(name).combine_chunks().indices.to_numpy() for name in ("op", "kind"))
            pid, addr, size, ts_ns, alloc_ts_ns = (
                table.column(name).to_numpy() for name in ("pid", "addr", "size_bytes", "ts_ns", "alloc_ts_ns")
            )
            made = _REACHED[kind] & (op == OP_CODES["alloc"])
            self._ranges.add(pid[made], addr[made], size[made].astype(np.uint64), ts_ns[made])
            ended = _REACHED[kind] & (op == OP_CODES["free"])
            freed.append(np.stack([pid[ended].astype(np.uint64), addr[ended], alloc_ts_ns[ended].astype(np.uint64)]))
        mapped = calls[_HANDLE_MAPS[calls["function"]] & (calls["result"] == 0)] if len(calls) else calls
        if len(mapped):  # addresses of cuMemMap are kept to the end: unmapping them changes no meaning of a pointer
            self._ranges.add(mapped["pid"], mapped["addr"], mapped["size_bytes"], mapped["exit_ns"])
        joined = np.concatenate(freed, axis=1) if freed else np.empty((3, 0), np.uint64)
        return joined[0], joined[1], joined[2]

    def _by_kernel(
        self, pid: np.ndarray, function: np.ndarray, ts_ns: np.ndarray
    ) -> list[tuple[np.ndarray, Kernel | None]]:
        """(rows, their kernel): a handle stands for the same kernel from one naming of it to the next."""
        if not len(pid):
            return []
        first, group = distinct(pid, function)
        order = np.argsort(group, kind="stable")
        bounds = np.searchsorted(group[order], np.arange(len(first) + 1))
        found: list[tuple[np.ndarray, Kernel | None]] = []
        for number, at in enumerate(first):
            rows = order[bounds[number] : bounds[number + 1]]
            process, handle = int(pid[at]), int(function[at])
            times = self.kernels.changes(process, handle)
            parts = np.searchsorted(np.array(times, np.int64), ts_ns[rows].astype(np.int64), "right")
            for part in np.unique(parts):
                chosen = rows[parts == part]
                found.append((chosen, self.kernels.of(process, handle, int(ts_ns[chosen[0]]))))
        return found

    def _rows(self, launches: np.ndarray) -> pa.Table:
        position = np.zeros((len(launches), records.LAUNCH_WORDS), np.int16)
        kept = np.zeros(position.shape, bool)
        approximate = np.zeros(len(launches), bool)
        partial = np.zeros(len(launches), bool)
        number = launches["first"][:, None].astype(np.int64) + np.arange(records.LAUNCH_WORDS)
        there = np.arange(records.LAUNCH_WORDS) < launches["count"][:, None]
        for rows, kernel in self._by_kernel(launches["pid"], launches["function"], launches["ts_ns"]):
            for layout_id in np.unique(launches["layout"][rows]):
                for packed in (False, True):
                    chosen = rows[
                        (launches["layout"][rows] == layout_id)
                        & (((launches["flags"][rows] & records.LAUNCH_BUFFER) != 0) == packed)
                    ]
                    if not len(chosen):
                        continue
                    meant = _Meaning.of(self.kernels, kernel, int(layout_id), packed)
                    words = number[chosen]
                    named = words < len(meant.position)
                    position[chosen] = meant.position[np.minimum(words, max(len(meant.position) - 1, 0))]
                    kept[chosen] = there[chosen] & named & (position[chosen] >= 0)
                    approximate[chosen] = meant.approximate
                    partial[chosen] = meant.partial
            if kernel is not None and (launches["layout"][rows] != kernel.layout_id).any():
                last = launches[rows[-1]]
                self.kernels.tell(int(last["pid"]), int(last["function"]), kernel)
        return self._as_table(launches, position, kept, approximate, partial)

    def _as_table(
        self,
        launches: np.ndarray,
        position: np.ndarray,
        kept: np.ndarray,
        approximate: np.ndarray,
        partial: np.ndarray,
    ) -> pa.Table:
        first = launches["first"] == 0
        self.counts.approximate += int((approximate & first).sum())
        self.counts.partial += int((partial & ~approximate & first).sum())
        row, column = np.nonzero(kept)
        value = launches["values"][row, column]
        known = self._ranges.hold(launches["pid"][row].astype(np.uint64), value)
        row, column, value = row[known], column[known], value[known]
        missing = np.flatnonzero((approximate | partial) & first)
        rows = np.concatenate([row, missing])
        order = np.argsort(launches["ts_ns"][rows], kind="stable")
        rows = rows[order]
        columns = {
            "source_id": np.full(len(rows), self._source_id),
            "launch_id": launches["launch_id"][rows],
            "ts_ns": launches["ts_ns"][rows],
            "pid": launches["pid"][rows],
            "position": np.concatenate([position[row, column], np.full(len(missing), NOT_READ, np.int16)])[order],
            "value": np.concatenate([value, np.zeros(len(missing), np.uint64)])[order],
            "approximate": approximate[rows],
        }
        arrays = [pa.array(columns[f.name].astype(f.type.to_pandas_dtype())) for f in LAUNCH_ARGUMENTS]
        return pa.Table.from_arrays(arrays, schema=LAUNCH_ARGUMENTS)


@dataclass(frozen=True)
class _Meaning:
    """What the words of a launch record are: `position`: int16[words], -1 = no argument."""

    position: np.ndarray
    approximate: bool
    partial: bool

    @classmethod
    def of(cls, kernels: Kernels, kernel: Kernel | None, layout_id: int, packed: bool) -> _Meaning:
        """Of records that were read by a layout (0: by none), from a packed buffer or from kernelParams."""
        every = np.arange(kernels.limit, dtype=np.int16)
        if layout_id:
            read_for = kernels.of_layout(layout_id)
            if read_for is None or read_for.layout is None:
                return cls(every[:0], True, True)
            slots = read_for.layout.slots.astype(np.int16)
            right = kernel is not None and kernel.parameters == read_for.parameters
            return cls(slots, not right, not (right and read_for.layout.whole))
        if kernel is None or kernel.parameters is None or kernel.layout is None:
            return cls(every, True, True)
        slots, offsets, limit = kernel.layout.slots, kernel.layout.offsets, kernels.limit
        position = np.full(limit, -1, np.int16)
        # The number of each word among those that were read: those of the buffer, or the first one of each slot.
        number = kernel.layout.buffer_offsets // 8 if packed else np.where(offsets == 0, slots, limit)
        read = number < limit
        position[number[read]] = slots[read]
        return cls(position, False, not (kernel.layout.whole and bool(read.all())))

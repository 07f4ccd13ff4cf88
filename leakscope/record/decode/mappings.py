"""Map calls → `mem_events`. What is mapped is kept here, range by range and in the order of time.

The probes tell calls as they were; what a munmap, a remapping or a fixed overlay ended is decided here. So a freed byte
is always one that was allocated, in whatever order calls cut, move and overlay ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from leakscope.model.recording import Loss
from leakscope.record import records
from leakscope.record.decode.columns import CAUSE_CODES, KIND_CODES, LAYER_CODES, OP_CODES, EventColumns
from leakscope.record.decode.marks import mark_ids
from leakscope.record.decode.ranges import Cut, Ranges

_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MREMAP_DONTUNMAP = 4
"""The old range stays, without its pages (kernel 5.7, e346b3813067)."""
_PROT_NONE = 0

API_NAMES = {
    records.MAP_MMAP: "mmap",
    records.MAP_MUNMAP: "munmap",
    records.MAP_MREMAP: "mremap",
    records.MAP_BRK: "brk",
    records.MAP_MADVISE: "madvise",
}

ROW = np.dtype(
    [
        ("ts_ns", "i8"), ("pid", "i4"), ("tid", "i4"), ("cpu", "i2"), ("op", "i2"), ("cause", "i2"), ("kind", "i2"),
        ("function", "i2"), ("addr", "u8"), ("size_bytes", "i8"), ("requested_bytes", "i8"), ("user_stack", "i4"),
        ("python_stack", "i4"), ("mark", "u4"), ("call_id", "i8"), ("result", "i4"), ("alloc_ts_ns", "i8"),
    ]
)  # fmt: skip
"""A map event; stacks are ids."""

_MIN_KEPT = 1 << 14
"""Rows of mappings that ended may be kept up to this many, or as many as there are others."""


def kinds(flags: np.ndarray, prot: np.ndarray) -> np.ndarray:
    """Kind codes of mappings by mmap's flags and protection: malloc's own, reservation, anonymous, file."""
    anonymous = (flags & _MAP_ANONYMOUS) != 0
    reserve = (prot == _PROT_NONE) | ((flags & _MAP_NORESERVE) != 0)
    codes = np.where(anonymous, KIND_CODES["mmap_anon"], KIND_CODES["mmap_file"])
    codes = np.where(anonymous & reserve, KIND_CODES["mmap_reserve"], codes)
    return np.where((flags & records.MAP_IN_HEAP) != 0, KIND_CODES["heap_backing"], codes).astype(np.int16)


class ProcessEnd(NamedTuple):
    """The end of a process's mappings: its exit or the replacement of its image (cause `exit` or `exec`)."""

    ts_ns: int
    pid: int
    cause: str


class _Ended:
    """Pieces of mappings that ended, as columns: by which call of a batch (or -1 - by which end of a process)."""

    def __init__(self) -> None:
        self.by: list[int] = []
        self.cause: list[int] = []
        self.addr: list[int] = []
        self.size_bytes: list[int] = []
        self.mapping: list[int] = []
        self.rest: list[bool] = []

    def add(self, by: int, cause: str, cuts: Sequence[Cut]) -> None:
        """Pieces that one call or end of a process ended."""
        if cuts:
            self.by += [by] * len(cuts)
            self.cause += [CAUSE_CODES[cause]] * len(cuts)
            addr, size_bytes, mapping, rest = zip(*cuts, strict=True)
            self.addr += addr
            self.size_bytes += size_bytes
            self.mapping += mapping
            self.rest += rest

    def add_all(self, by: int, cause: str, ranges: Ranges) -> None:
        """All pieces of an address space in which no mapping is in several."""
        self.by += [by] * len(ranges.starts)
        self.cause += [CAUSE_CODES[cause]] * len(ranges.starts)
        self.addr += ranges.starts
        self.size_bytes += map(int.__sub__, ranges.stops, ranges.starts)
        self.mapping += ranges.mappings
        self.rest += [False] * len(ranges.starts)


class Mappings:
    """Decodes CALL_MAP records; `unmatched_frees` counts munmaps of what was not seen mapped.

    Mappings and growth of the break of less than `min_size` bytes are left out: `small_objects` and `small_bytes`.
    """

    def __init__(self, columns: EventColumns, min_size: int = 0) -> None:
        self._columns = columns
        self._min_size = min_size
        self.small_objects = 0
        self.small_bytes = 0
        self._ranges: dict[int, Ranges] = {}  # by pid
        self._breaks: dict[int, Ranges] = {}
        self._made = np.empty(0, ROW)  # the rows of mappings, by their number
        self._tidy_at = _MIN_KEPT
        self.unmatched_frees = 0

    def losses(self) -> list[Loss]:
        """What was left out."""
        if not self.small_objects:
            return []
        detail = f"mappings smaller than --min-size: {self.small_bytes:,} bytes"
        return [Loss("mappings", "below_min_size", self.small_objects, detail)]

    def rows(
        self,
        batch: np.ndarray,
        user_stacks: np.ndarray,
        python_stacks: np.ndarray,
        ends: Sequence[ProcessEnd] = (),
    ) -> np.ndarray:
        """ROW array of a batch of CALL_RECORD of type CALL_MAP, whose stacks have these ids.

        `ends` are the processes that ended meanwhile. Failed calls give no rows.
        """
        own = np.flatnonzero(batch["result"] == 0)
        own = own[np.argsort(batch["exit_ns"][own], kind="stable")]
        batch, stacks = batch[own], {"user_stack": user_stacks[own], "python_stack": python_stacks[own]}
        function = batch["function"]
        grown = (function == records.MAP_BRK) & (batch["arg0"] > batch["addr"])
        made = np.isin(function, (records.MAP_MMAP, records.MAP_MREMAP)) | grown
        rows = self._bulk(batch, stacks, made, "alloc")
        breaks = rows["function"] == records.MAP_BRK
        rows["size_bytes"][breaks] = (batch["arg0"] - batch["addr"])[grown]
        rows["requested_bytes"][breaks] = rows["size_bytes"][breaks]
        small = rows["size_bytes"] < self._min_size
        self.small_objects += int(small.sum())
        self.small_bytes += int(rows["size_bytes"][small].sum())
        number = np.full(len(batch), -1)
        number[np.flatnonzero(made)[~small]] = len(self._made) + np.arange(len(rows) - int(small.sum()))
        first = len(self._made)
        self._made = np.concatenate([self._made, rows[~small]])
        ends = sorted(ends)
        ended = self._replay(batch, number.tolist(), ends)
        found = np.concatenate(
            [
                self._made[first:],
                self._ended_rows(batch, ends, ended),
                self._bulk(batch, stacks, function == records.MAP_MADVISE, "advise"),
            ]
        )
        if len(self._made) > self._tidy_at:
            self._tidy()
        return found[np.argsort(found["ts_ns"], kind="stable")]

    def _bulk(self, batch: np.ndarray, stacks: dict[str, np.ndarray], which: np.ndarray, op: str) -> np.ndarray:
        batch = batch[which]
        rows = np.zeros(len(batch), ROW)
        for name in ("pid", "tid", "cpu", "function", "addr", "size_bytes", "requested_bytes", "mark"):
            rows[name] = batch[name]
        for name, ids in stacks.items():
            rows[name] = ids[which]
        rows["ts_ns"] = batch["exit_ns"]
        rows["op"] = OP_CODES[op]
        rows["call_id"] = batch["parent_id"]
        in_heap = (op == "alloc") & ((batch["flags"] & records.CALL_IN_HEAP) != 0)
        other = np.where(batch["function"] == records.MAP_BRK, KIND_CODES["brk"], KIND_CODES["mmap_anon"])
        other = np.where(in_heap, KIND_CODES["heap_backing"], other)
        mapped = batch["function"] == records.MAP_MMAP
        rows["kind"] = np.where(mapped, kinds(batch["arg0"], batch["arg1"]), other)
        return rows

    def _replay(self, batch: np.ndarray, numbers: list[int], ends: list[ProcessEnd]) -> _Ended:
        """Apply a batch (in the order of time) to the ranges. `numbers` are those of the mappings that calls made, -1
        for none; what a call moves takes its kind along."""
        names = ("function", "exit_ns", "enter_ns", "pid", "addr", "size_bytes", "arg0", "arg1", "context")
        made_ns, kind = self._made["ts_ns"], self._made["kind"]
        ended, done = _Ended(), 0
        next_end_ns = ends[0].ts_ns if ends else 1 << 63
        for index, (function, now, enter_ns, pid, addr, size, arg0, arg1, flags) in enumerate(
            zip(*(batch[name].tolist() for name in names), strict=True)
        ):
            while next_end_ns <= now:
                self._process_end(ended, -1 - done, ends[done])
                done += 1
                next_end_ns = ends[done].ts_ns if done < len(ends) else 1 << 63
            if function == records.MAP_MADVISE:
                continue
            spaces = self._breaks if function == records.MAP_BRK else self._ranges
            ranges = spaces.get(pid)
            if ranges is None:
                ranges = spaces[pid] = Ranges()
            number = numbers[index]
            if function == records.MAP_BRK:  # what it shrinks by is the newest growth
                if arg0 < addr:
                    ended.add(index, "call", ranges.cut(arg0, addr, now, made_ns))
                elif number >= 0:
                    ranges.add(addr, arg0, number)
                continue
            if function == records.MAP_MUNMAP:
                # Only what was mapped before the call: the address may be another thread's by the time it returns.
                cuts = ranges.cut(addr, addr + size, enter_ns, made_ns)
                self.unmatched_frees += not cuts
                ended.add(index, "call", cuts)
                continue
            cause = "call"
            if function == records.MAP_MREMAP:
                if not flags & _MREMAP_DONTUNMAP:
                    cuts = ranges.cut(arg0, arg0 + arg1, enter_ns, made_ns)
                    ended.add(index, cause, cuts)
                    if cuts and number >= 0:
                        kind[number] = kind[cuts[0].mapping]
            elif not arg0 & _MAP_FIXED:
                cause = "reuse"  # the kernel gives out free addresses alone: that these were freed was missed
            ended.add(index, cause, ranges.cut(addr, addr + size, now, made_ns))
            if number >= 0:
                ranges.add(addr, addr + size, number)
        for place in range(done, len(ends)):
            self._process_end(ended, -1 - place, ends[place])
        return ended

    def _process_end(self, ended: _Ended, by: int, end: ProcessEnd) -> None:
        """End what a process had mapped by then."""
        for spaces in (self._ranges, self._breaks):
            ranges = spaces.pop(end.pid, None)
            if ranges is None or not ranges.starts:
                continue
            if ranges.left_bytes or self._made["ts_ns"][max(ranges.mappings)] >= end.ts_ns:
                ended.add(by, end.cause, ranges.cut(0, 1 << 64, end.ts_ns, self._made["ts_ns"]))
                if ranges.starts:
                    spaces[end.pid] = ranges
            else:
                ended.add_all(by, end.cause, ranges)

    def _ended_rows(self, batch: np.ndarray, ends: list[ProcessEnd], ended: _Ended) -> np.ndarray:
        by, mapping = np.array(ended.by, np.int64), np.array(ended.mapping, np.int64)
        rows = self._made[mapping]
        rows["call_id"] = 0
        rows["op"] = OP_CODES["free"]
        rows["alloc_ts_ns"] = rows["ts_ns"]
        rows["cause"] = ended.cause
        rows["result"] = ended.rest
        rows["addr"] = ended.addr
        size = np.array(ended.size_bytes, np.int64)
        rows["requested_bytes"] = np.where(size == rows["size_bytes"], rows["requested_bytes"], size)
        rows["size_bytes"] = size
        called = by >= 0
        for name, of in (("ts_ns", "exit_ns"), ("pid", "pid"), ("tid", "tid"), ("cpu", "cpu")):
            rows[name][called] = batch[of][by[called]]
        if ends:
            end = -1 - by[~called]
            rows["ts_ns"][~called] = np.array([of.ts_ns for of in ends], np.int64)[end]
            rows["pid"][~called] = np.array([of.pid for of in ends], np.int64)[end]
            rows["tid"][~called] = rows["cpu"][~called] = 0
        return rows

    def _tidy(self) -> None:
        """Forget the rows of mappings that have ended."""
        spaces = [*self._ranges.values(), *self._breaks.values()]
        alive = np.unique(np.fromiter(chain.from_iterable(ranges.mappings for ranges in spaces), np.int64))
        number = np.zeros(len(self._made), np.int64)
        number[alive] = np.arange(len(alive))
        self._made = self._made[alive]
        for ranges in spaces:
            ranges.mappings = number[ranges.mappings].tolist()
            ranges.left_bytes = {int(number[mapping]): left for mapping, left in ranges.left_bytes.items()}
        self._tidy_at = max(_MIN_KEPT, 2 * len(self._made))

    def table(self, rows: np.ndarray) -> pa.Table:
        """`mem_events` of a ROW array."""
        apis = np.array([self._columns.apis.code(API_NAMES[i]) for i in sorted(API_NAMES)], np.int16)
        columns = {name: rows[name] for name in ROW.names or () if name not in ("function", "mark")}
        return self._columns.table(
            len(rows),
            layer=LAYER_CODES["host"],
            api=apis[rows["function"]],
            mark_id=mark_ids(rows["pid"], rows["mark"]),
            weight=1,
            **columns,
        )

"""Map calls → `mem_events`. What is mapped is kept here, range by range and in the order of time.

The probes match a munmap with the one mapping that it ends exactly, which spares a record; parts, several mappings at
once and fixed overlays they leave to this side, which alone decides what ended. So a freed byte is always one that
was allocated, in whatever order calls cut, move and overlay ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from leakscope.model.recording import Loss
from leakscope.record import records
from leakscope.record.decode.columns import CAUSE_CODES, KIND_CODES, LAYER_CODES, OP_CODES, EventColumns
from leakscope.record.decode.marks import mark_ids
from leakscope.record.decode.ranges import Cut, Mapping, Ranges, Stacks

_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
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
        ("function", "i2"), ("addr", "u8"), ("size_bytes", "i8"), ("requested_bytes", "i8"), ("raw_stack", "i4"),
        ("caller", "u8"), ("python_stack", "u4"), ("mark", "u4"), ("call_id", "i8"), ("result", "i4"),
        ("alloc_ts_ns", "i8"),
    ]
)  # fmt: skip
"""A map event before its stack is resolved."""


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


class Mappings:
    """Decodes CALL_MAP and CALL_MAP_FREE records; `unmatched_frees` counts munmaps of what was not seen mapped.

    Mappings and growth of the break of less than `min_size` bytes are left out: `small_objects` and `small_bytes`.
    """

    def __init__(self, columns: EventColumns, min_size: int = 0) -> None:
        self._columns = columns
        self._min_size = min_size
        self.small_objects = 0
        self.small_bytes = 0
        self._ranges: dict[int, Ranges] = {}  # by pid
        self._breaks: dict[int, Ranges] = {}
        self.unmatched_frees = 0

    def losses(self) -> list[Loss]:
        """What was left out."""
        if not self.small_objects:
            return []
        detail = f"mappings smaller than --min-size: {self.small_bytes:,} bytes"
        return [Loss("mappings", "below_min_size", self.small_objects, detail)]

    def rows(self, batch: np.ndarray, ends: Sequence[ProcessEnd] = ()) -> np.ndarray:
        """ROW array of a batch of CALL_RECORD of types CALL_MAP and CALL_MAP_FREE.

        `ends` are the processes that ended meanwhile. Failed calls give no rows.
        """
        batch = batch[batch["result"] == 0]
        # What the kernel side saw ending by reuse ends here when the range is mapped anew.
        batch = batch[(batch["type"] == records.CALL_MAP) | (batch["cause"] == records.CAUSE_CALL)]
        batch = batch[np.argsort(batch["exit_ns"], kind="stable")]
        ended = batch["type"] == records.CALL_MAP_FREE
        made = ~ended & np.isin(batch["function"], (records.MAP_MMAP, records.MAP_MREMAP))
        advised = ~ended & (batch["function"] == records.MAP_MADVISE)
        made_rows = self._bulk(batch[made], "alloc")
        changed = self._replay(batch[~advised], made_rows, sorted(ends))
        made_rows = made_rows[made_rows["size_bytes"] >= self._min_size]
        rows = np.concatenate([made_rows, changed, self._bulk(batch[advised], "advise")])
        return rows[np.argsort(rows["ts_ns"], kind="stable")]

    def _bulk(self, batch: np.ndarray, op: str) -> np.ndarray:
        rows = np.zeros(len(batch), ROW)
        for name in (
            "pid",
            "tid",
            "cpu",
            "function",
            "addr",
            "size_bytes",
            "requested_bytes",
            "caller",
            "python_stack",
            "mark",
        ):
            rows[name] = batch[name]
        rows["ts_ns"] = batch["exit_ns"]
        rows["op"] = OP_CODES[op]
        remapped = batch["function"] == records.MAP_MREMAP
        flags = np.where(remapped, batch["context"] & 0xFFFFFFFF, batch["arg0"])
        prot = np.where(remapped, batch["context"] >> 32, batch["arg1"])
        rows["kind"] = KIND_CODES["mmap_anon"] if op == "advise" else kinds(flags, prot)
        rows["raw_stack"] = batch["user_stack"]
        rows["call_id"] = batch["parent_id"]
        return rows

    def _replay(self, batch: np.ndarray, made: np.ndarray, ends: list[ProcessEnd]) -> np.ndarray:
        """Apply a batch (in the order of time) to the ranges; rows of frees and of the break.

        `made` are the rows of its mappings in the same order; a moved part takes the kind of what it was a part of.
        """
        names = ("type", "function", "flags", "exit_ns", "enter_ns", "pid", "tid", "cpu", "addr", "size_bytes",
                 "requested_bytes", "arg0", "arg1", "user_stack", "caller", "python_stack", "mark")  # fmt: skip
        kind_of_made = made["kind"].tolist()
        rows: list[tuple[int, ...]] = []
        done, next_made = 0, 0
        for (call_type, function, flags, now, enter_ns, pid, tid, cpu, addr, size, requested, arg0, arg1,
             *stacks) in zip(*(batch[name].tolist() for name in names), strict=True):  # fmt: skip
            while done < len(ends) and ends[done].ts_ns <= now:
                rows += self._process_end(ends[done])
                done += 1
            ranges = self._ranges.get(pid)
            if ranges is None:
                ranges = self._ranges[pid] = Ranges()
            by = (now, pid, tid, cpu)
            if call_type == records.CALL_MAP_FREE:
                rows += _frees(by, "call", ranges.cut(addr, addr + size, now))
            elif function == records.MAP_BRK:
                rows += self._moved_break(by, addr, arg0, tuple(stacks), bool(flags & records.CALL_IN_HEAP))
            elif function == records.MAP_MUNMAP:
                # Only what was mapped before the call: the address may be another thread's by the time it returns.
                cuts = ranges.cut(addr, addr + size, enter_ns)
                self.unmatched_frees += not cuts
                rows += _frees(by, "call", cuts)
            else:
                cause = "call"
                if function == records.MAP_MREMAP:
                    cuts = ranges.cut(arg0, arg0 + arg1, now) if flags & records.CALL_PARTIAL else []
                    rows += _frees(by, cause, cuts)
                    if cuts:
                        kind_of_made[next_made] = cuts[0].mapping.kind
                elif not arg0 & _MAP_FIXED:
                    cause = "reuse"  # the kernel gives out free addresses alone: that these were freed was missed
                rows += _frees(by, cause, ranges.cut(addr, addr + size, now))
                if not self._is_small(size):
                    mapping = Mapping(now, size, requested, function, kind_of_made[next_made], tuple(stacks), size)
                    ranges.add(addr, addr + size, mapping)
                next_made += 1
        for end in ends[done:]:
            rows += self._process_end(end)
        made["kind"] = kind_of_made
        return np.array(rows, ROW)

    def _moved_break(
        self, by: tuple[int, int, int, int], before: int, after: int, stacks: Stacks, in_heap: bool
    ) -> list[tuple[int, ...]]:
        """The break moved: growth is an allocation, shrinking frees the newest growth first."""
        now, pid, _, _ = by
        ranges = self._breaks.setdefault(pid, Ranges())
        if after <= before:
            return _frees(by, "call", ranges.cut(after, before, now))
        size = after - before
        if self._is_small(size):
            return []
        kind = KIND_CODES["heap_backing" if in_heap else "brk"]
        ranges.add(before, after, Mapping(now, size, size, records.MAP_BRK, kind, stacks, size))
        codes = (OP_CODES["alloc"], CAUSE_CODES["call"], kind, records.MAP_BRK)
        return [(*by, *codes, before, size, size, *stacks, 0, 0, 0)]

    def _is_small(self, size: int) -> bool:
        if size >= self._min_size:
            return False
        self.small_objects += 1
        self.small_bytes += size
        return True

    def _process_end(self, end: ProcessEnd) -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = []
        for spaces in (self._ranges, self._breaks):
            ranges = spaces.pop(end.pid, None)
            if ranges is not None:
                rows += _frees((end.ts_ns, end.pid, 0, 0), end.cause, ranges.end(end.ts_ns))
        return rows

    def table(self, rows: np.ndarray, user_stacks: np.ndarray, python_stacks: np.ndarray) -> pa.Table:
        """`mem_events` of ROW arrays whose stacks were resolved."""
        resolved = ("function", "raw_stack", "caller", "python_stack", "mark")
        apis = np.array([self._columns.apis.code(API_NAMES[i]) for i in sorted(API_NAMES)], np.int16)
        columns = {name: rows[name] for name in ROW.names or () if name not in resolved}
        return self._columns.table(
            len(rows),
            layer=LAYER_CODES["host"],
            api=apis[rows["function"]],
            user_stack=user_stacks,
            python_stack=python_stacks,
            mark_id=mark_ids(rows["pid"], rows["mark"]),
            weight=1,
            **columns,
        )


def _frees(by: tuple[int, int, int, int], cause: str, cuts: list[Cut]) -> list[tuple[int, ...]]:
    """ROW tuples of pieces that ended; `by` is (time, pid, tid, cpu) of what ended them."""
    free, code = OP_CODES["free"], CAUSE_CODES[cause]
    return [
        (
            *by, free, code, m.kind, m.function, addr, size,
            m.requested_bytes if size == m.size_bytes else size,
            *m.stacks, 0, int(rest), m.ts_ns,
        )
        for addr, size, m, rest in cuts
    ]  # fmt: skip

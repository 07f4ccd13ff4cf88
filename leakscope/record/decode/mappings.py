"""Map calls → `mem_events`: whole mappings in bulk, the rest (parts, fixed overlays, the break) range by range.

The kernel side matches a munmap with the one mapping that it ends exactly. What remains is flagged CALL_PARTIAL and
split here against `live_ranges`, which is updated so that the kernel side goes on matching.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from leakscope.record import records
from leakscope.record.decode.columns import CAUSE_CODES, KIND_CODES, LAYER_CODES, OP_CODES, EventColumns
from leakscope.record.kernel.bpf import Map

_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
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
        ("caller", "u8"), ("call_id", "i8"), ("result", "i4"), ("alloc_ts_ns", "i8"),
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


class Mappings:
    """Decodes CALL_MAP and CALL_MAP_FREE records."""

    def __init__(self, columns: EventColumns, live_ranges: Map) -> None:
        self._columns = columns
        self._live = live_ranges
        self._break_pieces: dict[int, list[np.void]] = {}
        self.unmatched_frees = 0

    def rows(self, batch: np.ndarray) -> np.ndarray:
        """ROW array of a batch of CALL_RECORD of types CALL_MAP and CALL_MAP_FREE (failed calls give none)."""
        batch = batch[batch["result"] == 0]
        ended = batch["type"] == records.CALL_MAP_FREE
        function = batch["function"]
        made = ~ended & np.isin(function, (records.MAP_MMAP, records.MAP_MREMAP))
        advised = ~ended & (function == records.MAP_MADVISE)
        pieces = [
            self._bulk(batch[made], "alloc"),
            self._bulk(batch[ended], "free"),
            self._bulk(batch[advised], "advise"),
        ]
        by_range = ~ended & (((batch["flags"] & records.CALL_PARTIAL) != 0) | (function == records.MAP_BRK))
        shortened = ended & (batch["cause"] == records.CAUSE_REUSE)
        if by_range.any() or shortened.any():
            pieces.append(self._by_range(batch[by_range | shortened]))
        rows = np.concatenate(pieces)
        return rows[np.argsort(rows["ts_ns"], kind="stable")]

    def _bulk(self, batch: np.ndarray, op: str) -> np.ndarray:
        rows = np.zeros(len(batch), ROW)
        free = op == "free"
        for name in ("pid", "tid", "cpu", "function", "addr", "size_bytes", "requested_bytes", "result", "caller"):
            rows[name] = batch[name]
        rows["ts_ns"] = batch["exit_ns"]
        rows["op"] = OP_CODES[op]
        rows["cause"] = batch["cause"]
        remapped = (batch["function"] == records.MAP_MREMAP) & ~free
        flags = np.where(remapped, batch["context"] & 0xFFFFFFFF, batch["arg0"])
        prot = np.where(remapped, batch["context"] >> 32, batch["arg1"])
        rows["kind"] = KIND_CODES["mmap_anon"] if op == "advise" else kinds(flags, prot)
        rows["raw_stack"] = batch["user_stack"]
        rows["call_id"] = batch["parent_id"]
        rows["alloc_ts_ns"] = batch["alloc_ts_ns"] if free else 0
        return rows

    def _by_range(self, batch: np.ndarray) -> np.ndarray:
        """Split ranges one event at a time, in order: these are rare beside whole mappings."""
        rows: list[np.void] = []
        known = _KnownRanges(self._live)
        for record in batch[np.argsort(batch["exit_ns"], kind="stable")]:
            if record["type"] == records.CALL_MAP_FREE:
                rows += self._overlaid(record, batch, known)
            elif record["function"] == records.MAP_BRK:
                rows += self._moved_break(record)
            else:
                remapped = record["function"] == records.MAP_MREMAP
                start = int(record["arg0"] if remapped else record["addr"])
                size = int(record["arg1"] if remapped else record["size_bytes"])
                rows += self._unmapped(record, start, start + size, known)
        return np.array(rows, ROW) if rows else np.zeros(0, ROW)

    def _unmapped(self, record: np.void, start: int, end: int, known: _KnownRanges) -> list[np.void]:
        pid, now = int(record["pid"]), int(record["exit_ns"])
        rows = []
        for first, live in known.overlapping(pid, start, end, now):
            last = first + int(live["size_bytes"])
            cut_start, cut_end = max(first, start), min(last, end)
            row = self._piece(record, live, cut_start, cut_end - cut_start, "free", now)
            row["result"] = int(cut_start > first or cut_end < last)  # a part: the mapping lives on
            rows.append(row)
            known.replace(pid, first, [(first, cut_start), (cut_end, last)], live)
        if not rows and record["function"] == records.MAP_MUNMAP:
            self.unmatched_frees += 1
        return rows

    def _overlaid(self, ended: np.void, batch: np.ndarray, known: _KnownRanges) -> list[np.void]:
        """A fixed mapping replaced the head of a longer one: what is left of the old one lives on."""
        same = batch[
            (batch["type"] == records.CALL_MAP) & (batch["addr"] == ended["addr"]) & (batch["pid"] == ended["pid"])
        ]
        same = same[same["exit_ns"] == ended["exit_ns"]]
        if not len(same) or same[0]["size_bytes"] >= ended["size_bytes"]:
            return []
        live = np.zeros(1, records.LIVE_RANGE)[0]
        for name in ("size_bytes", "requested_bytes", "caller", "context", "user_stack", "function"):
            live[name] = ended[name]
        live["ts_ns"] = ended["exit_ns"]
        start = int(ended["addr"]) + int(same[0]["size_bytes"])
        end = int(ended["addr"]) + int(ended["size_bytes"])
        known.add(int(ended["pid"]), start, end, live)
        return [self._piece(ended, live, start, end - start, "alloc", int(ended["exit_ns"]))]

    def _moved_break(self, record: np.void) -> list[np.void]:
        """The break moved from `addr` to `arg0`: growth is an allocation, shrinking frees the newest growth first."""
        pid, before, after = int(record["pid"]), int(record["addr"]), int(record["arg0"])
        pieces = self._break_pieces.setdefault(pid, [])
        now = int(record["exit_ns"])
        if after > before:
            live = np.zeros(1, records.LIVE_RANGE)[0]
            live["caller"], live["user_stack"] = record["caller"], record["user_stack"]
            live["function"], live["ts_ns"] = records.MAP_BRK, now
            live["context"] = records.MAP_IN_HEAP if record["flags"] & records.CALL_IN_HEAP else 0
            row = self._piece(record, live, before, after - before, "alloc", now)
            pieces.append(row.copy())
            return [row]
        rows = []
        while pieces and before > after:
            newest = pieces[-1]
            start = max(int(newest["addr"]), after)
            size = int(newest["addr"]) + int(newest["size_bytes"]) - start
            if size <= 0:
                break
            row = newest.copy()
            row["ts_ns"], row["tid"], row["op"], row["addr"], row["size_bytes"] = (
                now,
                record["tid"],
                OP_CODES["free"],
                start,
                size,
            )
            row["requested_bytes"], row["alloc_ts_ns"] = size, newest["ts_ns"]
            newest["size_bytes"] -= size
            row["result"] = int(newest["size_bytes"] > 0)
            rows.append(row)
            if newest["size_bytes"] == 0:
                pieces.pop()
            before = start
        return rows

    def break_pieces(self, pid: int) -> list[np.void]:
        """Live growth of the break of a process that ended, which is forgotten."""
        return self._break_pieces.pop(pid, [])

    def _piece(self, record: np.void, live: np.void, addr: int, size: int, op: str, now: int) -> np.void:
        row = np.zeros(1, ROW)[0]
        context = np.array([live["context"]], np.uint64)
        row["kind"] = kinds(context & np.uint64(0xFFFFFFFF), context >> np.uint64(32))[0]
        if live["function"] == records.MAP_BRK and row["kind"] != KIND_CODES["heap_backing"]:
            row["kind"] = KIND_CODES["brk"]
        row["ts_ns"], row["pid"], row["tid"], row["cpu"] = now, record["pid"], record["tid"], record["cpu"]
        row["op"], row["cause"], row["function"] = OP_CODES[op], CAUSE_CODES["call"], live["function"]
        row["addr"], row["size_bytes"], row["requested_bytes"] = addr, size, size
        row["raw_stack"], row["caller"] = live["user_stack"], live["caller"]
        row["alloc_ts_ns"] = live["ts_ns"] if op == "free" else 0
        return row

    def table(self, rows: np.ndarray, user_stacks: np.ndarray) -> pa.Table:
        """`mem_events` of ROW arrays whose stacks were resolved."""
        apis = np.array([self._columns.apis.code(API_NAMES[i]) for i in sorted(API_NAMES)], np.int16)
        columns = {name: rows[name] for name in ROW.names or () if name not in ("function", "raw_stack", "caller")}
        return self._columns.table(
            len(rows),
            layer=LAYER_CODES["host"],
            api=apis[rows["function"]],
            user_stack=user_stacks,
            weight=1,
            **columns,
        )


class _KnownRanges:
    """The live mappings of processes at the time of a batch, kept in step with the kernel's map."""

    def __init__(self, live: Map) -> None:
        self._map = live
        keys, values = live.read_all()
        self._by_pid: dict[int, dict[int, np.void]] = {}
        all_keys, all_values = keys.view(records.RANGE_KEY).reshape(-1), values.view(records.LIVE_RANGE).reshape(-1)
        mine = all_keys["space"] == records.SPACE_MAP_CALLS
        for key, value in zip(all_keys[mine], all_values[mine], strict=True):
            self._by_pid.setdefault(int(key["pid"]), {})[int(key["addr"])] = value

    def overlapping(self, pid: int, start: int, end: int, before_ns: int) -> list[tuple[int, np.void]]:
        """Mappings older than a time that overlap [start, end), by address."""
        return sorted(
            (
                (addr, live)
                for addr, live in self._by_pid.get(pid, {}).items()
                if addr < end and addr + int(live["size_bytes"]) > start and live["ts_ns"] < before_ns
            ),
            key=lambda pair: pair[0],
        )

    def replace(self, pid: int, addr: int, parts: Iterable[tuple[int, int]], live: np.void) -> None:
        """Put the non-empty `parts` (start, end) in the place of one mapping."""
        self._by_pid[pid].pop(addr, None)
        key = np.array([(addr, pid, records.SPACE_MAP_CALLS)], records.RANGE_KEY).tobytes()
        current = self._map.lookup(key)
        if current is not None and np.frombuffer(current, records.LIVE_RANGE)[0]["ts_ns"] == live["ts_ns"]:
            self._map.delete(key)
        for start, end in parts:
            if end > start:
                self.add(pid, start, end, live)

    def add(self, pid: int, start: int, end: int, live: np.void) -> None:
        """Add a mapping with the identity of `live`."""
        part = live.copy()
        part["size_bytes"] = part["requested_bytes"] = end - start
        self._by_pid.setdefault(pid, {})[start] = part
        key = np.array([(start, pid, records.SPACE_MAP_CALLS)], records.RANGE_KEY).tobytes()
        if self._map.lookup(key) is None:  # else the address was mapped anew meanwhile
            self._map.update(key, part.tobytes())

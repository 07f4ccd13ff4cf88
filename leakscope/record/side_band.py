"""The kernel's side-band: exec, fork, exit, names and executable mappings of every process, as they happen.

Read from one perf ring a CPU (include/uapi/linux/perf_event.h). It makes stacks of processes that live for
milliseconds resolvable: their mappings are known although /proc/PID/maps is gone when the stack is read.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_right
from dataclasses import dataclass

from leakscope.model.recording import Loss
from leakscope.record.clocks import monotonic_ns
from leakscope.record.kernel import perf

_RECORD_LOST, _RECORD_COMM, _RECORD_EXIT, _RECORD_FORK, _RECORD_MMAP2 = 2, 3, 4, 7, 10
_MISC_MMAP_BUILD_ID = 1 << 14
_MISC_COMM_EXEC = 1 << 13
_PROT_EXEC = 4
_HEADER = struct.Struct("=IHH")  # struct perf_event_header
_HEAD_OFFSET, _TAIL_OFFSET = 1024, 1032  # data_head and data_tail in struct perf_event_mmap_page
_SAMPLE_ID_BYTES = 16  # pid, tid, time: PERF_SAMPLE_TID | PERF_SAMPLE_TIME


@dataclass(frozen=True)
class SideBandEvent:
    """One event, `ts_ns` in CLOCK_MONOTONIC. `kind` is exec, comm, fork, exit, or map; `other` a fork's parent."""

    ts_ns: int
    kind: str
    pid: int
    tid: int = 0
    other: int = 0
    start: int = 0
    end: int = 0
    file_offset: int = 0
    text: str = ""  # command name or path
    build_id: str = ""


class SideBand:
    """Opens one ring a CPU; `read()` gives what arrived since, in time order. Raises OSError if refused."""

    def __init__(self, pages: int = 256) -> None:
        self.lost = 0
        self._held: list[SideBandEvent] = []
        self._bytes = pages * mmap.PAGESIZE
        self._rings: list[tuple[int, mmap.mmap]] = []
        build_id = True
        for cpu in _online_cpus():
            try:
                fd = perf.open_side_band(cpu, build_id=build_id)
            except OSError as error:
                if error.errno != 22 or not build_id:
                    raise
                build_id = False
                fd = perf.open_side_band(cpu, build_id=False)
            self._rings.append((fd, mmap.mmap(fd, mmap.PAGESIZE + self._bytes)))

    def losses(self) -> list[Loss]:
        """What the kernel says it lost."""
        return [Loss("side-band", "sideband_lost", self.lost, "mappings or forks not seen")] if self.lost else []

    def read(self) -> list[SideBandEvent]:
        """Everything up to now, oldest first.

        What comes while the rings are read waits for the next time: a ring that was read already may hold what was
        before it. (A thread that moves to another CPU within an exec maps its program there: told before its exec, the
        mapping would be dropped with those of the old program.)
        """
        now_ns = monotonic_ns()
        events, self._held = self._held, []
        for _, ring in self._rings:
            head = struct.unpack_from("=Q", ring, _HEAD_OFFSET)[0]
            tail = struct.unpack_from("=Q", ring, _TAIL_OFFSET)[0]
            data, place = self._at(ring, tail, head - tail), 0
            while place < len(data):
                kind, misc, size = _HEADER.unpack_from(data, place)
                event = self._decode(kind, misc, data[place + _HEADER.size : place + size])
                if event is not None:
                    events.append(event)
                place += size
            struct.pack_into("=Q", ring, _TAIL_OFFSET, head)
        events.sort(key=lambda event: event.ts_ns)
        ready = bisect_right(events, now_ns, key=lambda event: event.ts_ns)
        self._held = events[ready:]
        return events[:ready]

    def _at(self, ring: mmap.mmap, position: int, size: int) -> bytes:
        start = position % self._bytes
        first = ring[mmap.PAGESIZE + start : mmap.PAGESIZE + min(start + size, self._bytes)]
        return first if len(first) == size else first + ring[mmap.PAGESIZE : mmap.PAGESIZE + size - len(first)]

    def _decode(self, kind: int, misc: int, body: bytes) -> SideBandEvent | None:
        if kind == _RECORD_LOST:
            self.lost += struct.unpack_from("=QQ", body)[1]
            return None
        ts_ns = struct.unpack_from("=Q", body, len(body) - 8)[0]
        payload = body[:-_SAMPLE_ID_BYTES]
        if kind == _RECORD_COMM:
            pid, tid = struct.unpack_from("=II", payload)
            name = payload[8:].split(b"\0", 1)[0].decode(errors="replace")
            return SideBandEvent(ts_ns, "exec" if misc & _MISC_COMM_EXEC else "comm", pid, tid, text=name)
        if kind in (_RECORD_FORK, _RECORD_EXIT):
            pid, parent, tid, _ = struct.unpack_from("=IIII", payload)
            return SideBandEvent(ts_ns, "fork" if kind == _RECORD_FORK else "exit", pid, tid, other=parent)
        if kind == _RECORD_MMAP2:
            pid, tid, start, length, file_offset = struct.unpack_from("=IIQQQ", payload)
            protection = struct.unpack_from("=I", payload, 56)[0]
            if not protection & _PROT_EXEC:
                return None
            build_id = ""
            if misc & _MISC_MMAP_BUILD_ID:
                build_id = payload[36 : 36 + min(payload[32], 20)].hex()
            path = os.fsdecode(payload[64:].split(b"\0", 1)[0])
            return SideBandEvent(ts_ns, "map", pid, tid, 0, start, start + length, file_offset, path, build_id)
        return None

    def close(self) -> None:
        """Close all rings."""
        for fd, ring in self._rings:
            ring.close()
            os.close(fd)
        self._rings.clear()


def _online_cpus() -> list[int]:
    cpus: list[int] = []
    with open("/sys/devices/system/cpu/online") as file:
        for part in file.read().strip().split(","):
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus

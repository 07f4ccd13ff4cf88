"""The kernel's side-band, read from rings that a test fills while they are read."""

from __future__ import annotations

import mmap
import struct

import pytest

from leakscope.record import side_band
from leakscope.record.side_band import SideBand

PID, EXEC_NS, MAP_NS = 4242, 1_000, 2_000


class Ring:
    """A ring as the kernel maps it; records are put as perf writes them, with pid, tid and time at their end."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)

    def put(self, kind: int, misc: int, body: bytes, ts_ns: int) -> None:
        head = struct.unpack_from("=Q", self.memory, 1024)[0]
        body += struct.pack("=IIQ", PID, PID, ts_ns)
        record = struct.pack("=IHH", kind, misc, 8 + len(body)) + body
        self.memory[mmap.PAGESIZE + head : mmap.PAGESIZE + head + len(record)] = record
        struct.pack_into("=Q", self.memory, 1024, head + len(record))

    def put_exec(self, name: bytes, ts_ns: int) -> None:
        self.put(3, 1 << 13, struct.pack("=II", PID, PID) + name.ljust(16, b"\0"), ts_ns)

    def put_map(self, path: bytes, ts_ns: int) -> None:
        place = struct.pack("=IIQQQ", PID, PID, 0x1000, 0x2000, 0) + bytes(24) + struct.pack("=II", 4, 0)
        self.put(10, 0, place + path.ljust(16, b"\0"), ts_ns)


def test_an_exec_comes_before_the_mappings_that_follow_it_on_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a thread that moves to the second CPU within its exec, just while the rings are read: the first was read
    first, second = Ring(), Ring()
    band = object.__new__(SideBand)
    band.lost, band._held, band._bytes = 0, [], mmap.PAGESIZE

    class Late:
        """The second ring, in which something happens when it is its turn."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            yield 0, first.memory
            if not done:
                done.append(True)
                first.put_exec(b"server", EXEC_NS)
                second.put_map(b"/usr/bin/server", MAP_NS)
            yield 0, second.memory

    done: list[bool] = []
    band._rings = Late()  # type: ignore[assignment]
    now = iter((EXEC_NS - 1, MAP_NS))
    monkeypatch.setattr(side_band, "monotonic_ns", lambda: next(now))
    # then neither is told at once, and next time both are, in their order
    assert band.read() == []
    assert [(event.kind, event.text) for event in band.read()] == [("exec", "server"), ("map", "/usr/bin/server")]

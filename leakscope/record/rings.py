"""The ring buffers that the probes write, as a recording reads them."""

from __future__ import annotations

import select

import numpy as np

from leakscope.record import records
from leakscope.record.loader import LoadedPrograms
from leakscope.record.loader.base import ProgramConfig
from leakscope.record.ring import RecordRing, Ring


class Rings:
    """One ring a kind of record. In which order they are read decides what is known before what (Session.drain)."""

    def __init__(self, programs: LoadedPrograms, config: ProgramConfig) -> None:
        def ring(name: str, dtype: np.dtype, size_bytes: int | None = None) -> Ring:
            of = programs.map(name)
            return Ring(of.fd, size_bytes or of.entries, dtype)

        self.objects = ring("mem_ring", records.MEM_RECORD, config.mem_ring_bytes)
        self.calls = ring("call_ring", records.CALL_RECORD, config.call_ring_bytes)
        self.dumps = ring("dump_ring", records.DUMP_RECORD)
        self.marks = ring("mark_ring", records.MARK_RECORD)
        stacks = programs.map("stack_ring")
        self.stacks = RecordRing(stacks.fd, stacks.entries)
        self.python = ring("python_ring", records.PYTHON_RECORD)
        self._poll = select.poll()
        self._poll.register(programs.map("python_ring").fd, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until a Python stack comes: its code objects may be freed soon."""
        self._poll.poll(seconds * 1000)

    def submitted(self) -> int:
        """Events that the probes have put into the rings."""
        return sum(ring.submitted() for ring in (self.objects, self.calls))

    def fill_share(self) -> float:
        """How full the fuller of the events' rings is."""
        return max(self.objects.fill_share(), self.calls.fill_share())

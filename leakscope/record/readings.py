"""Readings of a recording: what the samplers say, the peaks of resident sets, and what a census has counted by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from leakscope.model.manifest import Source
from leakscope.model.recording import Loss
from leakscope.record.census import Counts, Live, Readouts
from leakscope.record.clocks import monotonic_ns
from leakscope.record.gathering import Gathering
from leakscope.record.kernel.bpf import Map
from leakscope.record.members import Members
from leakscope.record.processes import Process, Processes
from leakscope.record.sampler_thread import SamplerThread
from leakscope.record.samplers import SamplerSet
from leakscope.record.samplers.rss_peaks import rss_peaks

if TYPE_CHECKING:
    import pyarrow as pa


class Sampled(NamedTuple):
    """One reading of all samplers: rows of `samples` of `source`, and the processes of the recording so far."""

    source: Source
    rows: pa.Table
    processes: list[Process]


class Readings:
    """Takes readings in a thread of their own, and hands their rows to `gathering`."""

    def __init__(
        self,
        source: Source,
        processes: Processes,
        members: Members,
        samplers: SamplerSet,
        rss: Map,
        gathering: Gathering,
        readouts: Readouts | None,
        on_samples: Callable[[Sampled], None] | None,
    ) -> None:
        self._source = source
        self._processes = processes
        self._members = members
        self._samplers = samplers
        self._rss = rss
        self._gathering = gathering
        self._readouts = readouts
        self._on_samples = on_samples
        # What a census does not read out in time is not known by time.
        self._thread = SamplerThread(self._read, preferred=readouts is not None)

    def request(self) -> None:
        """Ask for one reading. While the thread is behind, what a census has counted is read here: the samplers make
        many short system calls, each of which may wait for another thread."""
        if not self._thread.busy:
            self._thread.request()
        elif self._readouts:
            self._readouts.read_counts()

    def readouts(self) -> list[Counts | Live]:
        """What a census has read out since the last call."""
        return self._readouts.take() if self._readouts else []

    def _read(self, everything: bool) -> None:
        ts_ns = self._readouts.read_counts() if self._readouts else monotonic_ns()
        self._members.look_into_cgroup()
        tables = [
            self._samplers.read(ts_ns, everything=everything),
            rss_peaks(self._rss, self._processes.alive(), ts_ns, self._source.id),
        ]
        self._gathering.add_samples(tables)
        if self._on_samples:
            self._on_samples(Sampled(self._source, tables[0], self._processes.lives()))
        if self._readouts:
            self._readouts.read_live()

    def stop(self) -> None:
        """No more readings in the thread; safe to call twice."""
        self._thread.stop()

    def read_last(self) -> None:
        """One more reading, of everything."""
        self._thread.read_now(everything=True)

    def read_out(self) -> None:
        """What a census has counted when the probes are gone."""
        if self._readouts:
            self._readouts.read_counts()
            self._readouts.read_live()

    def losses(self) -> list[Loss]:
        """Samplers and readings that failed."""
        return [Loss(*row) for row in self._samplers.losses()] + self._thread.losses()

    def close(self) -> None:
        """Stop, and give everything back."""
        self.stop()
        self._samplers.close()

"""What a census has read out and not handed on yet: by the sampler thread, or by who drains while that is behind."""

from __future__ import annotations

import threading

from leakscope.record.census.reader import CensusReader, Counts, Live
from leakscope.record.clocks import monotonic_ns


class Readouts:
    """Reads counts and what is live, in the order of their times. Thread-safe."""

    def __init__(self, reader: CensusReader) -> None:
        self._reader = reader
        self._counting = threading.Lock()
        self._lock = threading.Lock()
        self._done: list[Counts | Live] = []

    def read_counts(self) -> int:
        """Take what has been counted; the time of it. Counts are handed on in the order of their times."""
        with self._counting:
            ts_ns = monotonic_ns()
            counts = self._reader.counts(ts_ns)
            with self._lock:
                self._done.append(counts)
        return ts_ns

    def read_live(self) -> None:
        """Take what is live."""
        live = self._reader.live(monotonic_ns())
        with self._lock:
            self._done.append(live)

    def take(self) -> list[Counts | Live]:
        """What was read since the last time."""
        with self._lock:
            done, self._done = self._done, []
        return done

"""What was drained and sampled since the last batch went to the sink."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from leakscope.record.census import Counts, Live
from leakscope.record.clocks import monotonic_ns
from leakscope.record.gpu.images import Image
from leakscope.record.side_band import SideBandEvent
from leakscope.record.sink import Batch, Sink

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 150_000
MOST_S = 1.0
"""Batches go at least so often: a census is decoded as often as a stream, while stacks resolve."""


class Gathering:
    """Makes batches of what is drained, for one thread; samples come from another."""

    def __init__(self, sink: Sink, flush_s: float) -> None:
        self._sink = sink
        self._every_s = min(flush_s, MOST_S)
        self._lock = threading.Lock()
        self._batch = Batch(monotonic_ns())
        self._rows = 0
        self._flushed_at = time.monotonic()

    def add(
        self,
        *,
        objects: np.ndarray,
        calls: np.ndarray,
        marks: np.ndarray,
        stacks: list[bytes],
        dumps: np.ndarray,
        launches: list[np.ndarray],
        kernels: list[tuple[np.ndarray, list[Image | str | None]]],
        side_band: list[SideBandEvent],
        readouts: list[Counts | Live],
    ) -> None:
        """Take in what one round over the rings gave, and hand a batch to the sink when it is due."""
        with self._lock:
            batch = self._batch
            for records, kept in ((objects, batch.objects), (calls, batch.calls), (marks, batch.marks)):
                if len(records):
                    kept.append(records)
                    self._rows += len(records)
            batch.side_band += side_band
            batch.stacks += stacks
            batch.kernels += kernels
            batch.launches += launches
            batch.readouts += readouts
            if len(dumps):
                if not batch.dumps and self._sink.put_dumps(batch.side_band, batch.stacks, dumps):
                    batch.side_band, batch.stacks = [], []
                else:
                    batch.dumps.append(dumps)
            due = time.monotonic() - self._flushed_at >= self._every_s
            if self._rows < BATCH_ROWS and not due and not readouts:
                return
        self.flush()

    def add_samples(self, tables: list[pa.Table]) -> None:
        """Take in rows of `samples`, from another thread."""
        with self._lock:
            self._batch.samples += [table for table in tables if table.num_rows]

    def flush(self) -> None:
        """Hand over what there is; waits while the sink is behind."""
        with self._lock:
            batch, self._batch = self._batch, Batch(monotonic_ns())
            self._rows = 0
        batch.ts_ns = monotonic_ns()
        self._flushed_at = time.monotonic()
        self._sink.put(batch)

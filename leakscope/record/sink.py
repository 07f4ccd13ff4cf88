"""From drained batches to parts on disk, in a thread of its own.

Order matters: the side-band first (where files are mapped), then calls (which processes ended), then kernel objects
(whose frees after an exit are marked), and on disk frames and stacks before the events that name them, so
that a capture cut off at any moment resolves.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from leakscope.capture import CaptureWriter
from leakscope.record.decode.calls import Calls
from leakscope.record.decode.kernel_objects import KernelObjects
from leakscope.record.decode.marks import Marks
from leakscope.record.gpu.arguments import LaunchArguments
from leakscope.record.gpu.images import Image
from leakscope.record.processes import Processes
from leakscope.record.records import CALL_RECORD
from leakscope.record.ring import joined
from leakscope.record.side_band import SideBandEvent
from leakscope.record.symbols.address_space import AddressSpaces
from leakscope.record.symbols.interner import Interner

MANIFEST_EVERY_NS = 5_000_000_000
"""How often the manifest is brought up to date, so that a power loss costs no more checksums than that."""

FORGET_AFTER_NS = 10_000_000_000
"""How long an ended process's mappings are kept for events that are still on their way."""


@dataclass
class Batch:
    """What was drained since the last batch. `ts_ns` is the time of the drain."""

    ts_ns: int
    side_band: list[SideBandEvent] = field(default_factory=list)
    calls: list[np.ndarray] = field(default_factory=list)
    objects: list[np.ndarray] = field(default_factory=list)
    marks: list[np.ndarray] = field(default_factory=list)
    samples: list[pa.Table] = field(default_factory=list)
    kernels: list[tuple[np.ndarray, list[Image | str | None]]] = field(default_factory=list)
    launches: list[np.ndarray] = field(default_factory=list)


class Sink:
    """Decodes and writes batches. A failure is kept in `error` and ends the recording; queued batches are dropped."""

    def __init__(
        self,
        writer: CaptureWriter,
        *,
        spaces: AddressSpaces,
        processes: Processes,
        interner: Interner,
        calls: Calls,
        objects: KernelObjects,
        marks: Marks,
        arguments: LaunchArguments | None = None,
    ) -> None:
        self._writer = writer
        self._spaces = spaces
        self._processes = processes
        self._interner = interner
        self._calls = calls
        self._objects = objects
        self._marks = marks
        self._arguments = arguments
        self._queue: queue.Queue[Batch | None] = queue.Queue(maxsize=8)
        self._ended: dict[int, int] = {}
        self._manifest_saved_ns = 0
        self.rows: dict[str, int] = defaultdict(int)
        """Rows written so far, by table."""
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="leakscope-sink", daemon=True)
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Hand over a batch; waits while the disk is behind (the ring buffers meanwhile, then counts drops)."""
        while self.error is None:
            try:
                self._queue.put(batch, timeout=0.2)
                return
            except queue.Full:
                continue

    def close(self) -> None:
        """Write what is queued and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._guarded(self._process, batch)
        self._guarded(lambda: self._write("marks", self._marks.open_rows()))

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        if self.error is None:
            try:
                work(*arguments)
            except Exception as error:  # whatever it is, it must end the recording and be told
                self.error = error

    def follow(self, events: list[SideBandEvent]) -> None:
        """Apply side-band events to processes and address spaces."""
        for event in events:
            if event.kind == "fork":
                if event.pid != event.other and self._processes.belongs(event.other):
                    self._processes.forked(event.other, event.pid, event.ts_ns)
                    self._spaces.fork(event.other, event.pid, event.ts_ns)
                    if self._arguments:
                        self._arguments.kernels.forked(event.other, event.pid)
            elif not self._processes.belongs(event.pid):
                continue
            elif event.kind == "map":
                self._spaces.map(
                    event.pid, event.ts_ns, event.start, event.end, event.file_offset, event.text, event.build_id
                )
            elif event.kind == "exec":
                self._spaces.start(event.pid, event.ts_ns)
                self._processes.named(event.pid, event.text)
                if self._arguments:
                    self._arguments.kernels.forget(event.pid)
            elif event.kind == "comm" and event.pid == event.tid:
                self._processes.named(event.pid, event.text)

    def _process(self, batch: Batch) -> None:
        self.follow(batch.side_band)
        tables: list[tuple[str, pa.Table]] = []
        for records, images in batch.kernels if self._arguments else ():
            self._arguments.kernels.follow(records, images)  # type: ignore[union-attr]
        if batch.calls or batch.launches:
            called = np.concatenate(batch.calls) if batch.calls else np.empty(0, CALL_RECORD)
            decoded = self._calls.decode(called)
            for pid, ts_ns in decoded.exits.items():
                self._processes.ended(pid, ts_ns)
                self._ended[pid] = ts_ns
            tables += [("mem_events", table) for table in decoded.mem_events]
            tables += [("calls", decoded.calls), ("launches", decoded.launches), ("device_maps", decoded.device_maps)]
            if self._arguments:
                arguments = self._arguments.table(batch.launches, decoded.mem_events, called)
                tables.append(("launch_arguments", arguments))
        if batch.objects:
            tables.append(("mem_events", self._objects.table(_in_order(batch.objects))))
        tables += [("samples", table) for table in batch.samples]
        if batch.marks:
            self._write("marks", self._marks.rows(np.concatenate(batch.marks)))
        frames, stacks = self._interner.take_new_rows()
        self._write("frames", frames)
        self._write("stacks", stacks)
        events = [table for name, table in tables if name == "mem_events"]
        if events:
            merged = _concatenate(events)
            self._write("mem_events", merged)
        for name in ("calls", "device_maps", "launches", "launch_arguments", "samples"):
            parts = [table for kind, table in tables if kind == name and table is not None and table.num_rows]
            if parts:
                self._write(name, _concatenate(parts))
        if batch.ts_ns - self._manifest_saved_ns > MANIFEST_EVERY_NS:
            self._manifest_saved_ns = batch.ts_ns
            self._writer.save_manifest()
        for pid in [pid for pid, ts_ns in self._ended.items() if ts_ns + FORGET_AFTER_NS < batch.ts_ns]:
            del self._ended[pid]
            self._spaces.forget(pid)
            if self._arguments:
                self._arguments.kernels.forget(pid)

    def _write(self, table: str, rows: pa.Table) -> None:
        if rows.num_rows:
            self._writer.write(table, rows)
            self.rows[table] += rows.num_rows


def _concatenate(tables: list[pa.Table]) -> pa.Table:
    """One table; dictionaries of text columns are unified."""
    return pa.concat_tables(tables).unify_dictionaries() if len(tables) > 1 else tables[0]


def _in_order(batches: list[np.ndarray]) -> np.ndarray:
    """Batches of MEM_RECORD as one, by time. Nearly in order already, so sorting here is cheap; columns later are not.

    Moved as rows of 64-bit words, as in :func:`joined`.
    """
    records = joined(batches)
    times = records["ts_ns"]
    if (times[1:] < times[:-1]).any():
        rows = records.view(np.uint64).reshape(len(records), -1)
        records = rows[np.argsort(times, kind="stable")].reshape(-1).view(records.dtype)
    return records

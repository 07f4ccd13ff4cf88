"""From drained batches to parts on disk, in a thread of its own.

Order matters: the side-band first (where files are mapped), then stacks and the dumps that name them, then calls (which
processes ended), then kernel objects (whose frees after an exit are marked), and on disk frames and stacks before the
events that name them, so that a capture cut off at any moment resolves.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from leakscope.capture import CaptureWriter
from leakscope.record.census import Census, Counts, Live, Schedule
from leakscope.record.decode.calls import Calls
from leakscope.record.decode.kernel_objects import KernelObjects
from leakscope.record.decode.marks import Marks
from leakscope.record.gpu.arguments import LaunchArguments
from leakscope.record.gpu.images import Image
from leakscope.record.priority import prefer_this_thread
from leakscope.record.processes import Processes
from leakscope.record.records import CALL_RECORD
from leakscope.record.ring import joined
from leakscope.record.settled_sites import SettledSites
from leakscope.record.side_band import SideBandEvent
from leakscope.record.symbols.address_space import AddressSpaces
from leakscope.record.symbols.interner import Interner
from leakscope.record.symbols.stack_numbers import StackNumbers
from leakscope.record.unwind.stacks import UnwoundStacks

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
    stacks: list[bytes] = field(default_factory=list)
    dumps: list[np.ndarray] = field(default_factory=list)
    samples: list[pa.Table] = field(default_factory=list)
    kernels: list[tuple[np.ndarray, list[Image | str | None]]] = field(default_factory=list)
    launches: list[np.ndarray] = field(default_factory=list)
    readouts: list[Counts | Live] = field(default_factory=list)


_TABLES = (
    *("census_sites", "census_totals", "census", "calls", "device_maps", "launches", "launch_arguments", "samples"),
)
"""What a batch may have beside mem_events, in the order of writing: what others name comes first."""


class Sink:
    """Decodes and writes batches. A failure is kept in `error` and ends the recording; queued batches are dropped."""

    def __init__(
        self,
        writer: CaptureWriter,
        *,
        spaces: AddressSpaces,
        processes: Processes,
        interner: Interner,
        numbers: StackNumbers,
        calls: Calls,
        objects: KernelObjects,
        marks: Marks,
        arguments: LaunchArguments | None = None,
        census: Census | None = None,
        schedule: Schedule | None = None,
        unwound: UnwoundStacks | None = None,
        settled: SettledSites | None = None,
    ) -> None:
        """With a `schedule` rows are gathered and written when it says so; without, at each batch."""
        self._writer = writer
        self._census = census
        self._schedule = schedule
        self._gathered: dict[str, list[pa.Table]] = {}
        self._began_ns = self._wrote_ns = time.monotonic_ns()
        self._spaces = spaces
        self._processes = processes
        self._interner = interner
        self._numbers = numbers
        self._calls = calls
        self._objects = objects
        self._marks = marks
        self._arguments = arguments
        self._unwound = unwound
        self._settled = settled
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

    def put_dumps(self, side_band: list[SideBandEvent], stacks: list[bytes], dumps: np.ndarray) -> bool:
        """Hand over stack dumps ahead of the events that name them, with all side-band events and stacks before; never
        waits.

        The sooner their paths are known, the fewer are sent. False: not taken, the sink is behind.
        """
        try:
            self._queue.put_nowait(Batch(0, side_band, stacks=stacks, dumps=[dumps]))
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Write what is queued and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        if self._census:
            prefer_this_thread()  # it holds the interpreter's lock while others must read out in time
        while (batch := self._queue.get()) is not None:
            self._attempt(partial(self._process, batch))
        self._attempt(lambda: self._write("marks", self._marks.open_rows()))
        self._attempt(self._write_gathered)

    def _attempt(self, work: Callable[[], None]) -> None:
        if self.error is None:
            try:
                work()
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
        self._numbers.take(batch.stacks)
        tables: list[tuple[str, pa.Table]] = []
        if self._unwound is not None and batch.dumps:
            self._unwound.resolve(np.concatenate(batch.dumps))
            if not batch.ts_ns:  # ahead of their events, with which the frames are written
                return
        if self._arguments:
            for records, images in batch.kernels:
                self._arguments.kernels.follow(records, images)
        if batch.calls or batch.launches:
            called = np.concatenate(batch.calls) if batch.calls else np.empty(0, CALL_RECORD)
            decoded = self._calls.decode(called)
            for pid, ts_ns in decoded.exits.items():
                self._processes.ended(pid, ts_ns)
                self._ended[pid] = ts_ns
            if self._census:
                self._census.ended(decoded.exits)
            tables += [("mem_events", table) for table in decoded.mem_events]
            tables += [("calls", decoded.calls), ("launches", decoded.launches), ("device_maps", decoded.device_maps)]
            if self._arguments:
                arguments = self._arguments.table(batch.launches, decoded.mem_events, called)
                tables.append(("launch_arguments", arguments))
        if batch.objects:
            objects = _in_order(batch.objects)
            if self._settled:
                self._settled.follow(objects, batch.ts_ns)
            tables.append(("mem_events", self._objects.table(objects)))
        if self._census:
            tables = self._census.tables(tables, batch.readouts)
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
        for name in _TABLES:
            parts = [table for kind, table in tables if kind == name and table is not None and table.num_rows]
            if parts:
                self._write(name, _concatenate(parts))
        elapsed_s = (batch.ts_ns - self._began_ns) / 1e9
        if self._schedule and batch.ts_ns - self._wrote_ns >= self._schedule.write_gap_s(elapsed_s) * 1e9:
            self._wrote_ns = batch.ts_ns
            self._write_gathered()
        if batch.ts_ns - self._manifest_saved_ns > MANIFEST_EVERY_NS and not self._gathered:
            self._manifest_saved_ns = batch.ts_ns
            self._writer.save_manifest()
        # A census asks for the stacks of a process at the readout after its end.
        needed_ns = min(batch.ts_ns, self._census.read_ns) if self._census else batch.ts_ns
        for pid in [pid for pid, ts_ns in self._ended.items() if ts_ns + FORGET_AFTER_NS < needed_ns]:
            del self._ended[pid]
            self._spaces.forget(pid)
            if self._arguments:
                self._arguments.kernels.forget(pid)
        self._numbers.forget(needed_ns - FORGET_AFTER_NS)

    def _write(self, table: str, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self.rows[table] += rows.num_rows
        if self._schedule:
            self._gathered.setdefault(table, []).append(rows)
        else:
            self._writer.write(table, rows)

    def _write_gathered(self) -> None:
        """What others name comes first."""
        gathered, self._gathered = self._gathered, {}
        for table in sorted(gathered, key=lambda name: name not in ("frames", "stacks", "census_sites")):
            self._writer.write(table, _concatenate(gathered[table]))


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

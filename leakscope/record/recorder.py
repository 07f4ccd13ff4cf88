"""A live recording from the first probe to the finished manifest."""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa

from leakscope.capture import CaptureWriter
from leakscope.errors import BadInputError, LeakscopeError, OutputIncompleteError
from leakscope.model.manifest import Manifest, Source
from leakscope.model.tables import MODULES, SAMPLES
from leakscope.record import records, scope
from leakscope.record.child import Command
from leakscope.record.clocks import monotonic_ns, read_anchor
from leakscope.record.decode.calls import Calls
from leakscope.record.decode.columns import EventColumns
from leakscope.record.decode.kernel_objects import KernelObjects
from leakscope.record.decode.sites import Sites
from leakscope.record.kernel.btf import KernelTypes
from leakscope.record.kernel.objects import SlabCacheOfAddress
from leakscope.record.loader import ProgramConfig, load
from leakscope.record.losses import Counters, Loss, losses_table, recursion_losses
from leakscope.record.options import RecordOptions
from leakscope.record.probes import tracepoints
from leakscope.record.probes.libraries import FunctionProbes, libraries_before_start, mapped_libraries
from leakscope.record.processes import Processes, process_exists
from leakscope.record.ring import Ring
from leakscope.record.samplers import SamplerSet
from leakscope.record.side_band import SideBand, SideBandEvent
from leakscope.record.sink import Batch, Sink
from leakscope.record.symbols.address_space import AddressSpaces
from leakscope.record.symbols.interner import Interner
from leakscope.record.symbols.kernel import KernelSymbols

DRAIN_INTERVAL_S = 0.01
LINGER_S = 0.4
"""How long frees are awaited after the last target's exit began: RCU and work queues finish after it."""
BATCH_ROWS = 150_000
CALL_RING_BYTES = 8 << 20
LOCK_PATH = Path("/run/leakscope.lock")
SOURCE_ID = 0
_RSS_MEMBERS = ("rss_file_peak", "rss_anon_peak", "swap_peak", "rss_shmem_peak")  # MM_FILEPAGES … MM_SHMEMPAGES


@dataclass
class Progress:
    """What the status line shows."""

    elapsed_s: float
    events: int
    events_per_s: float
    live_bytes: dict[str, int]
    dropped: int
    ring_fill: float


@dataclass
class Summary:
    """What a recording ended with. `ended_by`: target, duration, signal, or error."""

    output: Path
    ended_by: str
    seconds: float
    rows: dict[str, int]
    live_bytes: dict[str, int]
    losses: list[Loss]
    exit_status: int | None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Recorder:
    """One recording. Construct, :meth:`run` once. Foreseen errors are LeakscopeErrors; what was written stays."""

    def __init__(self, options: RecordOptions, on_progress: Callable[[Progress], None] | None = None) -> None:
        self._options = options
        self._on_progress = on_progress or (lambda progress: None)
        self._stop_signal: int | None = None
        self._wake = threading.Event()
        self._warnings: list[str] = []
        self._read_events = 0

    def run(self) -> Summary:
        """Record until the duration, the targets' end, SIGINT or SIGTERM.

        Raises BadInputError (unknown PID, existing output, no such program), NotCapableError (privileges, kernel) and
        OutputIncompleteError (disk full: the capture reads up to there).
        """
        options = self._options
        for pid in options.pids:
            if not process_exists(pid):
                raise BadInputError(f"no process {pid}; list the candidates with: pgrep -a PROGRAM")
        if options.cgroup:
            options.cgroup = scope.find_cgroup(options.cgroup)
        # Forked first, while this process has no threads and no probes.
        command = Command(options.command) if options.command else None
        try:
            return self._record(command)
        finally:
            if command is not None and command.status is None:
                if self._released:
                    command.stop()
                else:
                    command.abandon()

    _released = False

    def _record(self, command: Command | None) -> Summary:
        options = self._options
        lock = self._lock()
        source = self._describe_source(command)
        writer = CaptureWriter.create(options.output, Manifest(sources=[source]), force=options.force)
        try:
            session = _Session(options, writer, source, command)
        except LeakscopeError as error:
            writer.finish(complete=False, reason=str(error))
            _remove_empty(options.output)
            raise
        previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            if command is not None:
                self._released = True
                command.release()
            return self._loop(session, command)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            session.close()
            if lock is not None:
                os.close(lock)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = number
        self._wake.set()

    def _lock(self) -> int | None:
        """Mark this host as being recorded; a second recorder is allowed and warned."""
        try:
            fd = os.open(LOCK_PATH, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except OSError:
            other = os.pread(fd, 32, 0).decode(errors="replace").strip()
            self._warnings.append(
                f"another recorder (PID {other}) runs on this host; both see each other's cost, and their "
                "slow-downs add up"
            )
        return fd

    def _describe_source(self, command: Command | None) -> Source:
        options = self._options
        described: dict[str, Any] = {"host_wide": options.everyone, "pids": options.pids}
        if options.cgroup:
            described["cgroup"] = str(options.cgroup)
        if command:
            described["command_pid"] = command.pid
        return Source(
            id=SOURCE_ID,
            kind="recording",
            name=options.output.name,
            clock="monotonic",
            host=socket.gethostname(),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            time_zone=time.strftime("%Z %z"),
            command=list(options.command),
            scope=described,
            options={
                "stacks": options.stacks, "launches": options.launches, "malloc": options.malloc,
                "interval_s": options.interval_s, "flush_s": options.flush_s, "ring_bytes": options.ring_bytes,
                "live_entries": options.live_entries,
            },  # fmt: skip
            facts={"kernel": platform.release(), "machine": platform.machine(), "cpus": os.cpu_count()},
        )

    def _loop(self, session: _Session, command: Command | None) -> Summary:
        options = self._options
        began = time.monotonic()
        deadline = began + options.duration_s if options.duration_s else None
        next_sample, next_status, last_events = began, began + 1.0, 0
        ended_by, linger_until = "", 0.0
        while True:
            session.drain()
            now = time.monotonic()
            if session.sink.error is not None:
                ended_by = "error"
                break
            if now >= next_sample:
                next_sample = max(next_sample + options.interval_s, now)
                session.request_sample()
            if now >= next_status:
                events = session.read_events
                self._on_progress(session.progress(now - began, (events - last_events) / (now - next_status + 1.0)))
                last_events, next_status = events, now + 1.0
            if linger_until:
                if now >= linger_until:
                    break
            elif self._stop_signal is not None:
                ended_by = "signal"
                if command is not None:
                    command.stop()
                linger_until = now + (LINGER_S if command is not None else 0)
            elif deadline is not None and now >= deadline:
                ended_by = "duration"
                if command is not None and command.poll() is None:
                    session.request_sample()
                    break
            elif session.targets_ended():
                ended_by = "target"
                linger_until = now + LINGER_S
            if ended_by == "duration":
                break
            self._wake.wait(DRAIN_INTERVAL_S)
            self._wake.clear()
        if command is not None and ended_by == "duration":
            session.detach()
            command.stop()
        losses = session.finish(ended_by)
        self._read_events = session.read_events
        error = session.sink.error
        if isinstance(error, OutputIncompleteError):
            raise error
        if error is not None:
            raise OutputIncompleteError(
                f"{options.output}: recording stopped by an internal error: {type(error).__name__}: {error}; "
                "the capture reads up to there"
            ) from error
        return Summary(
            output=options.output,
            ended_by=ended_by,
            seconds=time.monotonic() - began,
            rows=dict(session.sink.totals.rows),
            live_bytes=dict(session.sink.totals.live_bytes),
            losses=losses,
            exit_status=command.status if command else None,
            warnings=self._warnings + session.warnings,
            notes=session.notes,
        )


class _Session:
    """Probes, rings, samplers and the sink of one recording."""

    def __init__(
        self, options: RecordOptions, writer: CaptureWriter, source: Source, command: Command | None
    ) -> None:
        self._options = options
        self._writer = writer
        self._source = source
        self._command = command
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.read_events = 0
        self._closed = False
        self._lock = threading.Lock()

        config = ProgramConfig(
            stacks=options.stacks,
            mem_ring_bytes=options.ring_bytes,
            call_ring_bytes=CALL_RING_BYTES,
            live_entries=options.live_entries,
            with_functions=True,
        )
        scope.configure(options, config)
        self._programs = load(config)
        source.loader = self._programs.name
        self._attachments = tracepoints.Attachments()
        self.exits: dict[int, int] = {}

        self._roots = [*options.pids, *([command.pid] if command else [])]
        members = scope.cgroup_members(options.cgroup) if options.cgroup else []
        self.processes = Processes(options.everyone)
        self._targets = self._programs.map("targets")
        self._spaces = AddressSpaces()
        self._side_band = SideBand()
        for pid in [*self._roots, *members]:
            self._add_member(pid, "root")

        types = KernelTypes()
        kernel = KernelSymbols()
        if not kernel.available:
            self.warnings.append("kernel addresses are hidden (kptr_restrict), so kernel functions have no names")
        self._cache_of = SlabCacheOfAddress(types)
        stacks, overflow = self._programs.map("stacks"), self._programs.map("stacks_overflow")

        def raw_stack(map_id: int) -> bytes | None:
            chosen = overflow if map_id & records.STACK_OVERFLOW_BIT else stacks
            return chosen.lookup((map_id & ~records.STACK_OVERFLOW_BIT).to_bytes(4, "little"))

        self._interner = Interner(kernel, self._spaces, raw_stack)
        columns = EventColumns(SOURCE_ID)
        self._sites = Sites(self._programs.map("sites"), self._interner, columns, self._cache_of, lambda: types.enum_bit("___GFP_ACCOUNT_BIT"))
        calls = Calls(columns, self._interner, self._programs.map("live_ranges"), self.exits)
        self._counters = Counters(self._programs.map("counters"))
        self._rss = self._programs.map("rss")
        self._mem_ring = Ring(self._programs.map("mem_ring").fd, config.mem_ring_bytes, records.MEM_RECORD)
        self._call_ring = Ring(self._programs.map("call_ring").fd, config.call_ring_bytes, records.CALL_RECORD)
        self._batch = Batch(monotonic_ns())
        self._batch_rows = 0
        self._flushed_at = time.monotonic()

        self._samplers = SamplerSet(self.processes.alive, lambda: [options.cgroup] if options.cgroup else [])
        source.facts.update(self._samplers.facts())
        groups = ["memory", *(["launch"] if options.launches else []), *(["heap"] if options.malloc else [])]
        self._functions = FunctionProbes(
            self._programs, self._attachments, self._programs.map("functions"), groups
        )
        self.sink = Sink(
            writer,
            spaces=self._spaces,
            processes=self.processes,
            interner=self._interner,
            calls=calls,
            objects=KernelObjects(columns, self._sites, self._interner, self.exits),
            on_map=self._on_map,
        )
        self._attach(members)
        self._sample_requested = threading.Event()
        self._sampler_thread = threading.Thread(target=self._sample_loop, name="leakscope-sampler", daemon=True)
        self._sampler_thread.start()
        source.start_ns = monotonic_ns()
        source.anchors.append(read_anchor())
        source.probes = list(self._attachments.names)
        writer.save_manifest()

    def _add_member(self, pid: int, role: str) -> None:
        scope.add_target(self._targets, pid)
        self.processes.seed(pid, role)
        self._spaces.seed(pid)

    def _attach(self, members: list[int]) -> None:
        """Attach frees before allocations are seen as late as possible: libraries, processes, maps, objects."""
        for library in self._options.libraries:
            if not self._functions.attach(str(library), any_name=True):
                raise BadInputError(f"{library}: no CUDA function to probe in this file")
        if self._command is not None:
            for path in libraries_before_start(self._command.arguments, dict(os.environ)):
                if self._functions.wants(path):
                    self._functions.attach(path)
        pids = self._roots + members
        if self._options.everyone:
            pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and int(p.name) != os.getpid()]
        for pid in pids:
            if self._command is not None and pid == self._command.pid:
                continue
            for path in mapped_libraries(pid):
                if self._functions.wants(path):
                    self._functions.attach(path)
        available = tracepoints.KERNEL_OBJECTS
        tracepoints.attach_classic(self._programs, self._attachments, tracepoints.PROCESS_LIVES)
        tracepoints.attach_classic(self._programs, self._attachments, tracepoints.MAP_CALLS)
        tracepoints.attach_raw(self._programs, self._attachments, available)

    def _on_map(self, event: SideBandEvent) -> None:
        """A library appeared in a process of the recording while it runs: attach to it."""
        if self._functions.wants(event.text):
            for path in (f"/proc/{event.pid}/root{event.text}", event.text):
                if os.path.exists(path):
                    count = self._functions.attach(path)
                    if count:
                        late = (monotonic_ns() - event.ts_ns) / 1e6
                        self.notes.append(f"attached to {event.text} {late:.0f} ms after process {event.pid} mapped it")
                    return

    def drain(self) -> None:
        """Read all rings once and hand a batch to the sink when it is due."""
        objects = self._mem_ring.read()
        # After the objects: whatever ended before these frees is then in the calls already.
        calls = self._call_ring.read()
        side_band = self._side_band.read()
        self.read_events += len(objects) + len(calls)
        with self._lock:
            batch = self._batch
            if len(objects):
                batch.objects.append(objects)
            if len(calls):
                batch.calls.append(calls)
            batch.side_band += side_band
            self._batch_rows += len(objects) + len(calls)
            due = time.monotonic() - self._flushed_at >= self._options.flush_s
            if self._batch_rows < BATCH_ROWS and not due:
                return
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            batch, self._batch = self._batch, Batch(monotonic_ns())
            self._batch_rows = 0
        batch.ts_ns = monotonic_ns()
        self._flushed_at = time.monotonic()
        self.sink.put(batch)

    def request_sample(self) -> None:
        """Ask the sampler thread for one reading."""
        self._sample_requested.set()

    def _sample_loop(self) -> None:
        while True:
            self._sample_requested.wait()
            self._sample_requested.clear()
            if self._closed:
                return
            self._sample()

    def _sample(self, *, everything: bool = False) -> None:
        ts_ns = monotonic_ns()
        if self._options.cgroup:
            for pid in scope.cgroup_members(self._options.cgroup):
                if not self.processes.belongs(pid):
                    self._add_member(pid, "root")
        tables = [self._samplers.read(ts_ns, everything=everything), self._rss_samples(ts_ns)]
        with self._lock:
            self._batch.samples += [table for table in tables if table.num_rows]

    def _rss_samples(self, ts_ns: int) -> pa.Table:
        """Highest resident-set figures since the start, exact, from the rss_stat tracepoint."""
        raw_keys, raw_values = self._rss.read_all()
        keys, values = raw_keys.view(records.RSS_KEY).reshape(-1), raw_values.view(records.RSS_VALUE).reshape(-1)
        wanted = np.isin(keys["pid"], np.array(self.processes.alive(), np.uint32)) & (keys["member"] < 4)
        rows = [
            {
                "source_id": SOURCE_ID, "ts_ns": ts_ns, "scope": "process", "scope_id": str(key["pid"]),
                "counter": _RSS_MEMBERS[key["member"]], "value": float(value["peak_bytes"]),
            }
            for key, value in zip(keys[wanted], values[wanted], strict=True)
        ]  # fmt: skip
        return pa.Table.from_pylist(rows, schema=SAMPLES)

    def targets_ended(self) -> bool:
        """Whether every process that was named has ended (never, for a cgroup or the whole host)."""
        if self._command is not None:
            return self._command.poll() is not None
        return bool(self._roots) and not any(process_exists(pid) for pid in self._roots)

    def progress(self, elapsed_s: float, events_per_s: float) -> Progress:
        """Figures for the status line."""
        return Progress(
            elapsed_s,
            self.read_events,
            events_per_s,
            dict(self.sink.totals.live_bytes),
            self._counters.total("mem_dropped") + self._counters.total("call_dropped"),
            max(self._mem_ring.fill_share(), self._call_ring.fill_share()),
        )

    def detach(self) -> None:
        """Stop all probes. Counters stay readable."""
        self._recursion = recursion_losses(self._attachments.programs)
        self._attachments.close()

    _recursion: list[Loss] | None = None

    def finish(self, ended_by: str) -> list[Loss]:
        """Stop probes, write everything that is left and the final manifest; the losses of the recording."""
        ended_ns = monotonic_ns()
        self._stop_sampler()
        if self.sink.error is None:
            self._sample(everything=True)
        if self._recursion is None:
            self.detach()
        for _ in range(64):
            before = self.read_events
            self.drain()
            if self.read_events == before:
                break
        self._flush()
        self.sink.close()
        source = self._source
        source.end_ns = ended_ns
        source.anchors.append(read_anchor())
        source.exit_status = self._command.status if self._command else None
        source.probes = list(self._attachments.names)
        source.facts.update(self._facts())
        losses = self._losses()
        try:
            if self.sink.error is None:
                pids = {pid for pid in self.sink.seen_pids if pid != os.getpid()}
                self._writer.write("processes", self.processes.table(SOURCE_ID, pids))
                self._writer.write("modules", self._modules())
                self._writer.write("losses", losses_table(SOURCE_ID, ended_ns, losses))
            reason = str(self.sink.error) if self.sink.error else ""
            self._writer.finish(complete=self.sink.error is None, reason=reason)
        except OutputIncompleteError as error:
            if self.sink.error is None:
                self.sink.error = error
        return losses

    def _stop_sampler(self) -> None:
        self._closed = True
        self._sample_requested.set()
        self._sampler_thread.join()

    def _facts(self) -> dict[str, Any]:
        return {
            "events_produced": self._counters.total("mem_produced") + self._counters.total("call_produced"),
            "events_read": self.read_events,
            "kmalloc_caches_by_size_and_flags": self._sites.caches_by_size_and_flags,
            "slab_cache_question": self._cache_of.reason or "bpf_get_kmem_cache",
            "functions_attached": self._functions.attached,
            "notes": self.notes,
        }

    def _losses(self) -> list[Loss]:
        losses = self._counters.losses() + (self._recursion or [])
        losses += [Loss(probe, what, count, detail) for probe, what, count, detail in self._samplers.losses()]
        losses += [Loss(probe, "attach_failed", 1, reason) for probe, reason in self._attachments.failed]
        if self._side_band.lost:
            losses.append(Loss("side-band", "sideband_lost", self._side_band.lost, "mappings or forks not seen"))
        if self._interner.unresolved_frames:
            losses.append(Loss("symbols", "symbol_unresolved", self._interner.unresolved_frames, "frames without a name"))
        if self._interner.missing_stacks:
            losses.append(Loss("stack maps", "stack_miss", self._interner.missing_stacks, "stacks gone when read"))
        return losses

    def _modules(self) -> pa.Table:
        rows = [
            {
                "source_id": SOURCE_ID, "pid": pid, "ts_ns": from_ns, "start": mapping.start, "end": mapping.end,
                "file_offset": mapping.file_offset, "path": mapping.module.path, "build_id": mapping.module.known_build_id,
            }
            for pid, from_ns, mapping in self._spaces.rows()
        ]  # fmt: skip
        return pa.Table.from_pylist(rows, schema=MODULES)

    def close(self) -> None:
        """Give everything back; safe to call twice and after an error."""
        if not self._closed:
            self._stop_sampler()
        self._attachments.close()
        if self.sink.error is None:
            self.sink.close()
        self._samplers.close()
        self._side_band.close()
        self._cache_of.close()
        self._programs.close()


def _remove_empty(output: Path) -> None:
    """Take back a capture into which nothing was recorded."""
    for name in ("manifest.json",):
        (output / name).unlink(missing_ok=True)
    try:
        output.rmdir()
    except OSError:
        pass

"""Probes, rings, samplers and the sink of one recording, from attaching to the final manifest."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from leakscope.capture import CaptureWriter
from leakscope.errors import OutputIncompleteError
from leakscope.model.manifest import Source
from leakscope.model.recording import Loss
from leakscope.record import sampling, scope
from leakscope.record.census import Census, CensusReader, Readouts, Schedule
from leakscope.record.child import Command
from leakscope.record.clocks import monotonic_ns, read_anchor
from leakscope.record.decode.calls import Calls
from leakscope.record.decode.columns import EventColumns
from leakscope.record.decode.exits import Exits
from leakscope.record.decode.kernel_objects import KernelObjects
from leakscope.record.decode.marks import Marks
from leakscope.record.decode.sites import Sites
from leakscope.record.gathering import Gathering
from leakscope.record.gpu.session import LaunchRecording
from leakscope.record.kernel.btf import KernelTypes
from leakscope.record.kernel.objects import SlabCacheOfAddress
from leakscope.record.live import LiveReadings
from leakscope.record.live.sites import SiteTable
from leakscope.record.loader import Loading
from leakscope.record.losses import Counters, losses_table, recursion_losses
from leakscope.record.mapped import mapped_files
from leakscope.record.members import Members, roots
from leakscope.record.memory import give_large_blocks_back
from leakscope.record.options import RecordOptions
from leakscope.record.probes import tracepoints
from leakscope.record.probes.attaching import Libraries
from leakscope.record.probes.heap import HeapProbes, wants_single_processes
from leakscope.record.probes.libraries import FunctionProbes, libraries_before_start
from leakscope.record.probes.nvtx import MarkProbes
from leakscope.record.processes import Processes
from leakscope.record.python.stacks import PythonStacks
from leakscope.record.readings import Readings, Sampled
from leakscope.record.rings import Rings
from leakscope.record.samplers import SamplerSet
from leakscope.record.settled_sites import SettledSites
from leakscope.record.side_band import SideBand
from leakscope.record.sink import Sink
from leakscope.record.symbols.address_space import AddressSpaces
from leakscope.record.symbols.interner import Interner
from leakscope.record.symbols.kernel import KernelSymbols
from leakscope.record.symbols.lines import (
    MAX_SECONDS,
    SECONDS_AFTER_SIGNAL,
    Lines,
    allow_many_files,
    segments_of,
)
from leakscope.record.symbols.stack_numbers import StackNumbers
from leakscope.record.unwind.stacks import UnwoundStacks, unwind_losses

if TYPE_CHECKING:
    pass

SOURCE_ID = 0


class Session:
    """Probes, rings, samplers and the sink of one recording."""

    def __init__(
        self,
        options: RecordOptions,
        writer: CaptureWriter,
        source: Source,
        command: Command | None,
        loading: Loading,
        notes: list[str],
        on_samples: Callable[[Sampled], None] | None = None,
        watched: bool = False,
    ) -> None:
        """Attach. `watched`: keep :attr:`live` up to date.

        Raises what loading raised, BadInputError for a library without functions to probe."""
        self._options = options
        self._writer = writer
        self._source = source
        self._command = command
        self.warnings: list[str] = []
        self.read_events = 0

        config = loading.config
        self.notes = [*notes, *source.limits]
        # Found while the programs still load. After the side-band is opened: what is mapped later it tells.
        before_start = libraries_before_start(command.arguments, dict(os.environ)) if command is not None else []
        self._side_band = SideBand()
        self._python = PythonStacks(lambda pid: self.members.in_scope(pid), self.notes.append)
        first = [*roots(options, command), *(scope.cgroup_members(options.cgroup) if options.cgroup else [])]
        known = scope.others_of_host() if options.everyone else first
        running = {pid: mapped_files(pid) for pid in known if command is None or pid != command.pid}
        for pid, files in running.items():
            self._python.seed(pid, files)
        self._programs = loading.result()
        if options.sample_bytes:
            sampling.fill_gaps(self._programs.map("sample_gaps"), options.sample_bytes)
        source.loader = self._programs.name
        self._attachments = tracepoints.Attachments()
        self._exits = Exits()

        self.processes = Processes(options.everyone)
        allow_many_files()
        self._spaces = AddressSpaces()
        self.members = Members(
            options, command, self._programs, config.scope, self.processes, self._spaces, self._python
        )
        for pid in first:
            self.members.add(pid)
        self._python.connect(self._programs.map("python_processes"))

        types = self._types = KernelTypes()
        kernel = KernelSymbols()
        if not kernel.available:
            self.warnings.append("kernel addresses are hidden (kptr_restrict), so kernel functions have no names")
        self._cache_of = SlabCacheOfAddress(types)
        self._interner = Interner(kernel, self._spaces, self._python.take)
        self._numbers = StackNumbers(self._interner, self._spaces)
        columns = EventColumns(SOURCE_ID)
        self.totals = columns.totals
        self._sites = Sites(
            self._programs.map("sites"),
            self._interner,
            columns,
            self._cache_of,
            lambda: types.enum_bit("___GFP_ACCOUNT_BIT"),
        )
        self._launches = LaunchRecording(options, self._programs, self._spaces, SOURCE_ID) if options.launches else None
        names = self._launches.arguments.names if self._launches else None
        live_ranges = self._programs.map("live_ranges")
        calls = Calls(columns, self._numbers, live_ranges, self._exits, names, options.min_size)
        self._small = calls.mappings
        self._counters = Counters(self._programs.map("counters"))
        self._rings = Rings(self._programs, config)
        self._unwound = UnwoundStacks(self._interner, self._numbers, self._spaces, self._programs.map("unwound_paths"))

        samplers = SamplerSet(self.processes.alive, lambda: [options.cgroup] if options.cgroup else [])
        source.facts.update(samplers.facts())
        if absent := source.facts.get("cgroup_memory_absent"):
            self.notes.append(absent)
        groups = ["memory", *(["launch", "kernel"] if options.launches else []), *(["heap"] if options.malloc else [])]
        self._functions = FunctionProbes(
            self._programs, self._attachments, self._programs.map("functions"), groups, self.warnings.append
        )
        by_process = wants_single_processes(options) and self._functions.filters_by_process
        self.heap = HeapProbes(self._functions, self.members.roots) if by_process else None
        self._libraries = Libraries(
            options,
            self._functions,
            MarkProbes(self._functions, config.nvtx),
            self.notes.append,
            command.pid if command is not None else None,
            self.heap,
        )
        self._mark_rows = Marks(SOURCE_ID)
        objects = KernelObjects(columns, self._sites, self._interner, self._numbers, self._exits)
        census = self._begin_census(columns, objects) if options.mode == "census" else None
        self.live: LiveReadings | None = None
        if watched:
            self.live = LiveReadings(
                options,
                writer,
                columns,
                self._interner,
                self._mark_rows,
                self._rings,
                partial(self._losses_so_far, Counters(self._programs.map("counters"))),
                lambda: self.read_events,
            )
            self._mark_rows.remember = True
            if isinstance(self.live.sums, SiteTable):
                columns.sites = self.live.sums
            elif census is not None:
                census.sums = self.live.sums
        self.sink = Sink(
            writer,
            spaces=self._spaces,
            processes=self.processes,
            interner=self._interner,
            numbers=self._numbers,
            calls=calls,
            objects=objects,
            marks=self._mark_rows,
            arguments=self._launches.arguments if self._launches else None,
            census=census,
            schedule=Schedule(options.interval_s, options.flush_s, options.steady) if census else None,
            unwound=self._unwound,
            settled=SettledSites(self._programs.map("settled_sites")) if options.stacks == "sampled" else None,
        )
        self._gathering = Gathering(self.sink, options.flush_s)
        began = time.perf_counter()
        self._libraries.attach_known(before_start, running)
        tracepoints.attach_all(self._programs, self._attachments)
        attach_ms = (time.perf_counter() - began) * 1e3
        source.facts.update(load_ms=round(loading.milliseconds, 1), attach_ms=round(attach_ms, 1))
        self.readings = Readings(
            source,
            self.processes,
            self.members,
            samplers,
            self._programs.map("rss"),
            self._gathering,
            self._readouts,
            on_samples,
        )
        source.start_ns = monotonic_ns()
        source.anchors.append(read_anchor())
        source.probes = list(self._attachments.names)
        writer.save_manifest()

    _readouts: Readouts | None = None

    def _begin_census(self, columns: EventColumns, objects: KernelObjects) -> Census:
        give_large_blocks_back()
        began_ns, interval_ns = monotonic_ns(), int(self._options.interval_s * 1e9)
        reader = CensusReader(self._programs, began_ns, interval_ns)
        self._readouts = Readouts(reader)
        return Census(
            reader,
            columns,
            objects,
            self._numbers,
            self.processes,
            self._exits,
            origin_ns=began_ns,
            interval_ns=interval_ns,
            sampled=self._options.sample_bytes > 0,
        )

    @property
    def functions_attached(self) -> int:
        """Functions of libraries that are probed."""
        return sum(self._functions.attached.values())

    def drain(self) -> None:
        """Read all rings once and hand a batch to the sink when it is due."""
        launches = self._launches.read_launches() if self._launches else []
        # Before the rings: they then hold all that was before these readouts.
        readouts = self.readings.readouts()
        objects = self._rings.objects.read()
        # After the objects: whatever ended before these frees is then in the calls already.
        calls = self._rings.calls.read()
        marks = self._rings.marks.read()
        kernels = self._launches.read_kernels() if self._launches else []
        # After the events that name them, and before the mappings that they need.
        dumps = self._rings.dumps.read(at_most=1024)
        stacks = self._rings.stacks.read(wait_s=0.1)
        side_band = self._side_band.read()
        # Before its stacks: a process is known by its mapping. After all events: a stack is sent before what names it.
        self._python.follow(side_band)
        for event in side_band:
            if event.kind == "map":
                self._libraries.on_map(event)
            elif self.heap is not None:
                self.heap.follow(event)
        self._python.resolve(self._rings.python.read())
        self.read_events += len(objects) + len(calls)
        self._gathering.add(
            objects=objects,
            calls=calls,
            marks=marks,
            stacks=stacks,
            dumps=dumps,
            launches=launches,
            kernels=kernels,
            side_band=side_band,
            readouts=readouts,
        )

    def wait(self, seconds: float) -> None:
        """Sleep until the next drain is due: at once for a Python stack."""
        self._rings.wait(seconds)

    def expect_end(self) -> None:
        """The recording ends soon: what its end needs gets ready meanwhile, unless it would be recorded itself."""
        if self._lines is None and not self._options.everyone:
            self._lines = Lines(self._writer, self._spaces)

    _lines: Lines | None = None

    def detach(self) -> None:
        """Stop all probes. Counters stay readable."""
        self._recursion = recursion_losses(self._attachments.programs)
        if self.heap is not None:
            self.heap.close()
        self._attachments.detach()

    _recursion: list[Loss] | None = None

    def finish(self, ended_by: str) -> list[Loss]:
        """Stop probes, write everything that is left and the final manifest; the losses of the recording."""
        ended_ns = monotonic_ns()
        lines = self._lines = self._lines or Lines(self._writer, self._spaces)
        self.readings.stop()
        if self.sink.error is None:
            self.readings.read_last()
        if self._recursion is None:
            self.detach()
        if self.sink.error is None:
            self.readings.read_out()
        for _ in range(64):
            before = self.read_events
            self.drain()
            if self.read_events == before:
                break
        self._gathering.flush()
        self.sink.close()
        lines.look_up(SECONDS_AFTER_SIGNAL if ended_by == "signal" else MAX_SECONDS)
        source = self._source
        source.end_ns = ended_ns
        source.anchors.append(read_anchor())
        source.exit_status = self._command.status if self._command else None
        source.probes = list(self._attachments.names)
        source.facts.update(self._facts())
        losses = self._losses(lines)
        pids = self.totals.pids - {os.getpid()}
        if self.sink.error is not None:  # on a full disk the reason has the first claim on what room is left
            with contextlib.suppress(OutputIncompleteError):
                self._writer.finish(complete=False, reason=str(self.sink.error))
        # After an error too: what is small may still find room, and says what is missing.
        for name, rows in (
            ("losses", losses_table(SOURCE_ID, ended_ns, losses)),
            ("processes", self.processes.table(SOURCE_ID, pids)),
            ("modules", self._spaces.table(SOURCE_ID)),
        ):
            try:
                self._writer.write(name, rows)
            except OutputIncompleteError as error:
                self.sink.error = self.sink.error or error
        try:
            reason = str(self.sink.error) if self.sink.error else ""
            self._writer.finish(complete=self.sink.error is None, reason=reason)
        except OutputIncompleteError as error:
            self.sink.error = self.sink.error or error
        if self.sink.error is None:
            self.notes += lines.put_in_place()
        return losses

    def _facts(self) -> dict[str, Any]:
        return {
            "events_produced": self._rings.submitted()
            + sum(self._counters.total(name) for name in ("mem_dropped", "call_dropped")),
            "events_read": self.read_events,
            "kmalloc_caches_by_size_and_flags": self._sites.caches_by_size_and_flags,
            "stacks_dumped": self._unwound.dumps,
            "stacks_unwound": self._unwound.unwound,
            "slab_cache_question": self._cache_of.reason or "bpf_get_kmem_cache",
            "functions_attached": self._functions.attached,
            "functions_single_stepped": self._functions.stepped,
            "segments": segments_of(self._spaces),
            "notes": self.notes,
        }

    def _losses_so_far(self, counters: Counters) -> list[Loss]:
        """From another thread, which has `counters` for itself: a map serves one thread."""
        of_probes = counters.losses() + recursion_losses(dict(self._attachments.programs))
        return of_probes + self._interner.losses() + self._numbers.losses()

    def _losses(self, lines: Lines) -> list[Loss]:
        losses = self._counters.losses() + self._counters.left_out() + (self._recursion or []) + self._small.losses()
        losses += self.readings.losses() + self._attachments.losses()
        losses += self.heap.losses() if self.heap is not None else []
        losses += self._launches.losses() if self._launches else []
        losses += self._side_band.losses() + self._interner.losses(named_since=lines.named) + lines.losses()
        losses += self._numbers.losses()
        losses += self._python.losses() + self._mark_rows.losses()
        return losses + unwind_losses(self._options.unwind, self._unwound)

    def close(self) -> None:
        """Give everything back; safe to call twice and after an error."""
        self.readings.stop()
        if self._lines is not None:
            self._lines.close()
        if self.heap is not None:
            self.heap.close()
        self._attachments.close()
        if self.sink.error is None:
            self.sink.close()
        if self._launches:
            self._launches.close()
        self.readings.close()
        self._unwound.close()
        self._side_band.close()
        self._cache_of.close()
        self._programs.close()

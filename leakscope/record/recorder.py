"""A live recording from the first probe to the finished manifest."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from leakscope.errors import BadInputError, OutputIncompleteError
from leakscope.model.recording import Summary
from leakscope.record import scope
from leakscope.record.census.schedule import Schedule
from leakscope.record.child import Command
from leakscope.record.configuration import program_config
from leakscope.record.loader import Loading
from leakscope.record.options import RecordOptions
from leakscope.record.price import price
from leakscope.record.priority import prefer_this_thread
from leakscope.record.probes.nvtx import command_environment
from leakscope.record.processes import process_exists

if TYPE_CHECKING:  # imported where they are used: while the programs load
    from leakscope.model.manifest import Source
    from leakscope.record.live import Observer
    from leakscope.record.readings import Sampled
    from leakscope.record.session import Session

DRAIN_INTERVAL_S = 0.02
LINGER_S = 0.4
"""How long frees are awaited after the last target's exit began: RCU and work queues finish after it."""
LOCK_PATH = Path("/run/leakscope.lock")


class Recorder:
    """One recording. Construct, :meth:`run` once. Foreseen errors are LeakscopeErrors; what was written stays."""

    def __init__(
        self,
        options: RecordOptions,
        on_ready: Callable[[str], None] | None = None,
        on_samples: Callable[[Sampled], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """:param on_ready: called with the price in one line once all is attached, before a command starts.
        :param on_samples: called with each reading of the samplers, in a thread of its own.
        :param observer: told when there is something to see, and when no more.
        """
        self._options = options
        self._on_ready = on_ready or (lambda price: None)
        self._on_samples = on_samples
        self._observer = observer
        self._quit = False
        self._held = contextlib.ExitStack()
        self._stop_signal: int | None = None
        self._warnings: list[str] = []
        self._limits: list[str] = []
        self._notes: list[str] = []
        self._read_events = 0

    def stop(self) -> None:
        """End the recording as if its duration were over. From any thread."""
        self._quit = True

    def run(self) -> Summary:
        """Record until the duration, the targets' end, :meth:`stop`, SIGINT or SIGTERM.

        Raises BadInputError (unknown PID, existing output, no such program), NotCapableError (privileges, kernel) and
        OutputIncompleteError (disk full: the capture reads up to there).
        """
        options = self._options
        for pid in options.pids:
            if not process_exists(pid):
                raise BadInputError(f"no process {pid}; list the candidates with: pgrep -a PROGRAM")
        if options.cgroup:
            options.cgroup = scope.find_cgroup(options.cgroup)
        self._refuse_existing()
        config = program_config(options, self._limits, self._notes)
        # Forked first, while this process has no threads and no probes.
        environment, self._nvtx_limit = command_environment(os.environ, options.nvtx)
        command = Command(options.command, environment) if options.command else None
        loading = None
        try:
            # Threads here mix many short system calls with long numpy runs: at Python's 5 ms each call would wait as
            # long.
            sys.setswitchinterval(0.0005)
            loading = Loading(config, options.loader)
            return self._record(command, loading)
        finally:
            if loading is not None:
                loading.close()
            if command is not None and command.status is None:
                if self._released:
                    command.stop()
                else:
                    command.abandon()

    _released = False
    _nvtx_limit = ""

    def _refuse_existing(self) -> None:
        if os.path.lexists(self._options.output) and not self._options.resume:
            from leakscope.capture.place import refuse_existing

            refuse_existing(self._options.output, self._options.force)

    def _record(self, command: Command | None, loading: Loading) -> Summary:
        lock = self._lock()
        # Never raises: an exception would be lost where a library calls back from C.
        previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        session = None
        try:
            session = self._start(command, loading)
            return self._loop(session, command)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if self._observer is not None:
                self._observer.end()
            if session is not None:
                session.close()
            self._held.close()
            if lock is not None:
                os.close(lock)

    def _start(self, command: Command | None, loading: Loading) -> Session:
        """Attach all probes, then let the command run. Whatever fails or interrupts leaves no capture behind.

        A capture that is to be replaced stays until then; the new one is made beside it.
        """
        from leakscope.capture import CaptureWriter
        from leakscope.capture.continuation import ContinuingWriter, sole_recorder
        from leakscope.capture.place import aside_of, put_in_place
        from leakscope.model.manifest import Manifest
        from leakscope.record.session import Session

        output, force = self._options.output, self._options.force
        self._refuse_existing()
        resumed = self._options.resume and output.exists()
        place = output if resumed or not output.exists() else aside_of(output)
        source = self._describe_source(command)
        writer: CaptureWriter
        if resumed:
            self._held.enter_context(sole_recorder(output))
            writer = ContinuingWriter.open(output, source)
        else:
            writer = CaptureWriter.create(place, Manifest(sources=[source]))
            if self._options.resume:
                self._held.enter_context(sole_recorder(output))
        session = None
        try:
            watched = self._observer is not None
            session = Session(self._options, writer, source, command, loading, self._notes, self._on_samples, watched)
            if self._stop_signal is not None:
                raise KeyboardInterrupt
            self._on_ready(price(self._options, session.functions_attached, heap_by_process=session.heap is not None))
            if command is not None:
                self._released = True
                command.release()
            if place != output:
                put_in_place(place, output, force)
                writer.path = output  # nothing writes before the first drain
        except BaseException:
            if session is not None:
                session.close()
            if resumed:
                writer.manifest.sources.pop()
                writer.finish()
            else:
                _remove_empty(place)
            raise
        return session

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = number

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
        from leakscope.model.manifest import Source
        from leakscope.record.session import SOURCE_ID

        options = self._options
        described: dict[str, Any] = {"host_wide": options.everyone, "pids": options.pids}
        if options.cgroup:
            described["cgroup"] = str(options.cgroup)
        if command:
            described["command_pid"] = command.pid
        limits = [*([self._nvtx_limit] if command and self._nvtx_limit else []), *self._limits]
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
            limits=limits,
            options={
                "mode": options.mode,
                "stacks": options.stacks,
                "min_size": options.min_size,
                "sample_bytes": options.sample_bytes,
                "unwind": options.unwind,
                "launches": options.launches,
                "launch_args": options.launch_args if options.launches else 0,
                "malloc": options.malloc,
                "interval_s": options.interval_s,
                "steady": options.steady,
                "flush_s": options.flush_s,
                "ring_bytes": options.ring_bytes,
                "live_entries": options.live_entries,
                "nvtx": options.nvtx,
            },
            facts={"kernel": platform.release(), "machine": platform.machine(), "cpus": os.cpu_count()},
        )

    def _loop(self, session: Session, command: Command | None) -> Summary:
        options = self._options
        if self._observer is not None and session.live is not None:
            self._observer.begin(session.live)
        # This thread drains the rings: some 5 % of a CPU, but in time. The other threads run by now, so none of them
        # inherits this.
        prefer_this_thread()
        began = time.monotonic()
        deadline = began + options.duration_s if options.duration_s else None
        next_sample, next_look = began, began + 1.0
        schedule = Schedule(options.interval_s, options.flush_s, options.steady)
        ended_by, linger_until = "", 0.0
        while True:
            session.drain()
            now = time.monotonic()
            if session.sink.error is not None:
                ended_by = "error"
                break
            if now >= next_sample and options.mode == "census":
                next_sample = now + schedule.readout_gap_s(now - began)
                session.readings.request()
            elif now >= next_sample:
                # Denser at first, so that a target of a second has samples at all.
                early = now - began < options.interval_s
                next_sample = max(next_sample + options.interval_s / (10 if early else 1), now)
                session.readings.request()
            if options.follow and now >= next_look:
                next_look = now + 1.0
                if not session.members.take_in_successors():
                    ended_by = "replaced"
                    break
            if linger_until:
                if now >= linger_until:
                    break
            elif self._stop_signal is not None:
                ended_by = "signal"
                if command is not None:
                    command.stop()
                session.expect_end()
                linger_until = now + (LINGER_S if command is not None else 0)
            elif self._quit or (deadline is not None and now >= deadline):
                ended_by = "quit" if self._quit else "duration"
                if command is not None and command.poll() is None:
                    session.readings.request()
                    break
            elif session.members.have_ended():
                ended_by = "target"
                session.expect_end()
                linger_until = now + LINGER_S
            if ended_by in ("duration", "quit"):
                break
            session.wait(DRAIN_INTERVAL_S)
        if self._observer is not None:
            self._observer.end()
        if command is not None and ended_by in ("duration", "quit"):
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
            rows=dict(session.sink.rows),
            live_bytes=dict(session.totals.live_bytes),
            losses=losses,
            exit_status=command.status if command else None,
            warnings=self._warnings + session.warnings,
            notes=session.notes,
        )


def _remove_empty(output: Path) -> None:
    """Take back a capture into which nothing was recorded."""
    (output / "manifest.json").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        output.rmdir()

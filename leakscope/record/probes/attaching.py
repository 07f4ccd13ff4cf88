"""Which libraries are attached to, and when: before the start, in processes that run, and as they are mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from leakscope.errors import BadInputError
from leakscope.record.clocks import monotonic_ns
from leakscope.record.mapped import MappedFile
from leakscope.record.options import RecordOptions
from leakscope.record.probes.heap import HeapProbes
from leakscope.record.probes.libraries import FunctionProbes, library_of
from leakscope.record.probes.nvtx import NVTX_LIBRARY, MarkProbes, is_injection_library
from leakscope.record.side_band import SideBandEvent


class Libraries:
    """Attaches to CUDA and NVTX libraries. `command` is the PID of a command that has not begun to run, or None."""

    def __init__(
        self,
        options: RecordOptions,
        functions: FunctionProbes,
        marks: MarkProbes,
        note: Callable[[str], None],
        command: int | None,
        heap: HeapProbes | None = None,
    ) -> None:
        """With `heap` libc is left to it."""
        self._options = options
        self._functions = functions
        self._marks = marks
        self._note = note
        self._command = command
        self._heap = heap

    def attach_known(self, before_start: Iterable[str], running: Mapping[int, Iterable[MappedFile]]) -> None:
        """Attach to what is known before the recording begins.

        :param before_start: libraries that the command is going to load.
        :param running: what the recorded processes have mapped, by PID.
        :raises BadInputError: for a library that was named and has no function to probe.
        """
        for library in self._options.libraries:
            if not self._functions.attach(str(library), any_name=True):
                raise BadInputError(f"{library}: no CUDA function to probe in this file")
        for path in before_start:
            if self._functions.wants(path):
                self._functions.attach(path)
        if self._command is not None:
            self._marks.attach(str(NVTX_LIBRARY))
        for pid, files in running.items():
            for path in sorted({file.path for file in files}):
                if self._functions.wants(path):
                    self._attach(f"/proc/{pid}/root{path}", pid)
                elif is_injection_library(path):
                    self._marks.attach(f"/proc/{pid}/root{path}")

    def on_map(self, event: SideBandEvent) -> None:
        """A library was mapped while the recording runs: attach to it, whoever mapped it (probes are by file)."""
        if self._functions.wants(event.text) or is_injection_library(event.text):
            for path in (f"/proc/{event.pid}/root{event.text}", event.text):
                if Path(path).exists():
                    self._marks.attach(path)
                    count = self._attach(path, event.pid)
                    if count:
                        late = (monotonic_ns() - event.ts_ns) / 1e6
                        self._note(f"attached to {event.text} {late:.0f} ms after process {event.pid} mapped it")
                    return

    def _attach(self, path: str, pid: int) -> int:
        if self._heap is not None and library_of(path) == "libc":
            self._heap.attach(pid, path)
            return 0
        return self._functions.attach(path)

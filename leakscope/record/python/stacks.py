"""Python processes of a recording, and their stacks by id.

Runs in the thread that drains the rings: names must be read while the process lives, and before a short-lived code
object is freed. What it resolved is read by the thread that writes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from leakscope.model.recording import Loss
from leakscope.record.kernel.bpf import Map
from leakscope.record.mapped import MappedFile
from leakscope.record.python.code_objects import (
    CodeObject,
    MemoryGoneError,
    NoCodeObjectError,
    ProcessMemory,
    PythonFrame,
    identify,
    read_code,
)
from leakscope.record.python.layout import Interpreter, UnknownLayoutError, is_interpreter_name
from leakscope.record.side_band import SideBandEvent

GIVE_UP_AFTER = 16
"""Stacks of an interpreter without one code object in them after which its layout counts as unknown."""

_FREED = "of code that was freed before it was read: module bodies, generated code"

PythonStack = tuple[PythonFrame, ...]
"""Outermost first."""


@dataclass
class _Process:
    interpreter: Interpreter
    bias: int
    codes: dict[int, CodeObject]  # by address


class PythonStacks:
    """Tells the kernel side which processes run Python, and names the frames that it finds.

    `note` is called once for each interpreter whose frames are not available, with the reason. `wanted` tells whether a
    process is part of the recording. Until :meth:`connect` the kernel side is told nothing.
    """

    def __init__(self, wanted: Callable[[int], bool], note: Callable[[str], None]) -> None:
        self._map: Map | None = None
        self._wanted = wanted
        self._note = note
        self._processes: dict[int, _Process] = {}
        self._interpreters: dict[tuple[int, int], Interpreter | None] = {}
        self._unproven: Counter[Interpreter] = Counter()  # stacks without a code object
        self._proven: set[Interpreter] = set()
        self._ended: list[int] = []
        self.unavailable: Counter[str] = Counter()  # by reason: stacks without names
        self._resolved: dict[int, PythonStack] = {}
        self._lock = threading.Lock()  # members of a cgroup are added by the thread that samples

    def connect(self, processes: Map) -> None:
        """From now on the kernel side is told, by the map `python_processes`: of what is known at once."""
        with self._lock:
            self._map = processes
            for pid, process in self._processes.items():
                self._tell(pid, process)

    def seed(self, pid: int, files: Iterable[MappedFile]) -> None:
        """Look for an interpreter in a process that already runs, and has these files mapped."""
        for file in files:
            if file.executable and is_interpreter_name(path := file.path.removesuffix(" (deleted)")):
                with self._lock:
                    self._mapped(pid, file.start, file.file_offset, path)

    def losses(self) -> list[Loss]:
        """Stacks without names, by reason."""
        if not self.unavailable:
            return []
        detail = "stacks: " + "; ".join(f"{count} {reason}" for reason, count in self.unavailable.most_common())
        return [Loss("python frames", "python_frames_unavailable", self.unavailable.total(), detail)]

    def follow(self, events: Iterable[SideBandEvent]) -> None:
        """Apply side-band events, in their order."""
        with self._lock:
            for pid in self._ended:
                self._processes.pop(pid, None)
            self._ended.clear()
            for event in events:
                self._apply(event)

    def _apply(self, event: SideBandEvent) -> None:
        if event.kind == "map":
            if is_interpreter_name(event.text) and self._wanted(event.pid):
                self._mapped(event.pid, event.start, event.file_offset, event.text)
        elif event.kind == "fork" and event.pid != event.other:
            parent = self._processes.get(event.other)
            if parent:  # the kernel side copied its entry when the child was made
                self._processes[event.pid] = _Process(parent.interpreter, parent.bias, dict(parent.codes))
        elif event.pid in self._processes and event.kind == "exec":
            del self._processes[event.pid]
            self._untell(event.pid)
        elif event.pid in self._processes and event.kind == "exit" and event.pid == event.tid:
            self._untell(event.pid)
            self._ended.append(event.pid)  # its last stacks are still to be named

    def _mapped(self, pid: int, start: int, file_offset: int, path: str) -> None:
        interpreter = self._interpreter(pid, path)
        bias = interpreter.load_bias(start, file_offset) if interpreter else None
        if interpreter is None or bias is None or self._unproven[interpreter] >= GIVE_UP_AFTER:
            return
        self._processes[pid] = _Process(interpreter, bias, {})
        self._tell(pid, self._processes[pid])

    def _tell(self, pid: int, process: _Process) -> None:
        if self._map is None:
            return
        try:
            self._map.update(pid.to_bytes(4, "little"), process.interpreter.process_value(process.bias))
        except OSError:  # the map is full
            self.unavailable["processes beyond those that can be walked at once"] += 1

    def _untell(self, pid: int) -> None:
        if self._map is not None:
            self._map.delete(pid.to_bytes(4, "little"))

    def _interpreter(self, pid: int, path: str) -> Interpreter | None:
        """The interpreter in a file as the process sees it, each file read once."""
        for candidate in (Path(f"/proc/{pid}/root{path}"), Path(path)):
            try:
                stat = candidate.stat()
                key = stat.st_dev, stat.st_ino
                if key not in self._interpreters:
                    self._interpreters[key] = None
                    self._interpreters[key] = Interpreter.read(candidate, path)
                return self._interpreters[key]
            except UnknownLayoutError as error:
                self._not_available(path, str(error))
                return None
            except (OSError, ValueError):
                continue
        return None

    def _not_available(self, path: str, reason: str) -> None:
        self._note(f"Python frames not available for {path}: {reason}")

    def resolve(self, batch: np.ndarray) -> None:
        """Name the stacks of a batch of PYTHON_RECORD. One that cannot be named is dropped and counted."""
        with self._lock:
            for record in batch:
                self._resolve(record)

    def take(self, stack: int) -> PythonStack | None:
        """The stack of an id, given out once; None for one that is not known (lost, or without names)."""
        return self._resolved.pop(stack, None)

    def _resolve(self, record: np.void) -> None:
        process = self._processes.get(int(record["pid"]))
        if process is None:
            self.unavailable["of a process that was gone"] += 1
            return
        frames = record["frames"][: record["depth"]]
        try:
            self._resolved[int(record["id"])] = self._named(int(record["pid"]), process, frames)
        except MemoryGoneError as error:
            self.unavailable[str(error)] += 1
        except NoCodeObjectError as error:
            interpreter = process.interpreter
            if interpreter in self._proven:
                self.unavailable[_FREED] += 1
                return
            self.unavailable[str(error)] += 1
            self._unproven[interpreter] += 1
            if self._unproven[interpreter] == GIVE_UP_AFTER:
                self._give_up(interpreter, str(error))

    def _give_up(self, interpreter: Interpreter, reason: str) -> None:
        version = ".".join(map(str, interpreter.version))
        self._not_available(interpreter.path, f"{reason}, so its layout is not that of CPython {version}")
        for pid in [p for p, process in self._processes.items() if process.interpreter == interpreter]:
            del self._processes[pid]
            self._untell(pid)

    def _named(self, pid: int, process: _Process, frames: np.ndarray) -> PythonStack:
        own: list[tuple[int, int, bool]] = []
        for code, instruction in frames.tolist():
            if code:
                own.append((code & ~1, instruction, bool(code & 1)))
            elif own:
                own[-1] = (*own[-1][:2], True)
        try:
            with ProcessMemory(pid) as memory:
                for address in dict.fromkeys(address for address, *_ in reversed(own)):  # the longest-lived first
                    self._read(memory, process, address)
        except MemoryGoneError:  # it ended: what it ran before is known
            if any(address not in process.codes for address, *_ in own):
                raise
        first = process.interpreter.offsets.code_adaptive
        return tuple(
            process.codes[address].frame(at - (address + first))._replace(entered=entered)
            for address, at, entered in reversed(own)
        )

    def _read(self, memory: ProcessMemory, process: _Process, address: int) -> None:
        """Know the code object at an address; read again where another one has taken its place."""
        identity = identify(memory, address, process.interpreter, process.bias)
        known = process.codes.get(address)
        if known is None or known.identity != identity:
            process.codes[address] = read_code(memory, identity, process.interpreter)
            self._proven.add(process.interpreter)

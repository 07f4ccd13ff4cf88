"""Kernels by their handles: which name and which parameters a launch's function has.

A handle is what a launch names: a CUfunction or CUkernel of the driver, a launch stub's address or a cudaKernel_t of
the runtime. Handles are told by module look-ups and registrations (bpf_programs/kernels.bpf.h), and may be given to
another kernel later; a child inherits its parent's. The stub of a process that was not watched from its start is named
by its symbol.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from leakscope.record import records
from leakscope.record.gpu.cubin import Parameter
from leakscope.record.gpu.images import Image
from leakscope.record.kernel.bpf import Map
from leakscope.record.probes import functions
from leakscope.symbols.demangle import demangle

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE: no parameter of that index
_MAX_ALIASES = 4
_MAX_PARAMETERS = 4096

SymbolOf = Callable[[int, int, int], tuple[str, Image | None]]
"""(pid, address, time) → the name of the function there and the image of its module; '' where it has none."""


@dataclass(frozen=True)
class Layout:
    """Which words of a kernel's parameters may be pointers: aligned ones of parameters of 8 bytes and more.

    ``slots``, ``offsets``, ``buffer_offsets``: int64[words]. ``whole``: no such word was left out for want of room.
    """

    slots: np.ndarray
    offsets: np.ndarray
    buffer_offsets: np.ndarray
    whole: bool

    @classmethod
    def of(cls, parameters: tuple[Parameter, ...], limit: int) -> Layout:
        """The first `limit` words."""
        words = [
            (slot, offset, parameter.offset_bytes + offset)
            for slot, parameter in enumerate(parameters)
            if parameter.offset_bytes % 8 == 0
            for offset in range(0, parameter.size_bytes - 7, 8)
        ]
        table = np.array(words[:limit], np.int64).reshape(-1, 3)
        return cls(table[:, 0], table[:, 1], table[:, 2], len(words) <= limit)

    def packed(self, number: int) -> bytes:
        """struct launch_layout with an id."""
        row = np.zeros(1, records.LAUNCH_LAYOUT)
        words = len(self.slots)
        row["id"], row["words"] = number, words
        row["word"]["slot"][0, :words] = self.slots
        row["word"]["offset"][0, :words] = self.offsets
        row["word"]["buffer_offset"][0, :words] = self.buffer_offsets
        return row.tobytes()


@dataclass(eq=False)
class Kernel:
    """One kernel of one process: its name ('' where unknown) and, where they are known, its parameters."""

    name: str
    parameters: tuple[Parameter, ...] | None
    layout: Layout | None
    layout_id: int = 0


@dataclass
class _Named:
    """What was told of a handle from a time on; an alias has a container and no name."""

    ts_ns: int
    container: int
    name: str
    kernel: Kernel | None = None


@dataclass
class _Process:
    parent: _Process | None = None
    handles: dict[int, list[_Named]] = field(default_factory=dict)  # oldest first
    images: dict[int, list[tuple[int, Image | None]]] = field(default_factory=dict)  # by container, oldest first
    asked: dict[int, dict[int, Parameter | None]] = field(default_factory=dict)  # handle: index: answer, None: no such

    def named(self, handle: int, ts_ns: int) -> _Named | None:
        """The newest entry of a handle that is not younger than a time."""
        history = self.handles.get(handle, ())
        index = bisect_right(history, ts_ns, key=lambda entry: entry.ts_ns)
        if index:
            return history[index - 1]
        return self.parent.named(handle, ts_ns) if self.parent else None

    def image(self, container: int, ts_ns: int) -> Image | None:
        """The image of a module, library or registered fat binary at a time."""
        history = self.images.get(container, ())
        index = bisect_right(history, ts_ns, key=lambda entry: entry[0])
        if index:
            return history[index - 1][1]
        return self.parent.image(container, ts_ns) if self.parent else None


class Kernels:
    """What is known of the kernels of all processes. `limit`: words of a launch that the probes read."""

    def __init__(self, layouts: Map | None, limit: int, symbol_of: SymbolOf | None = None) -> None:
        self._map = layouts
        self.limit = limit
        self._symbol_of = symbol_of or (lambda pid, address, ts_ns: ("", None))
        self._processes: dict[int, _Process] = {}
        self._by_layout: dict[int, Kernel] = {}
        self._next_layout = 1

    def forked(self, parent: int, child: int) -> None:
        """A child begins with the handles of its parent."""
        self._processes[child] = _Process(self._processes.setdefault(parent, _Process()))

    def forget(self, pid: int) -> None:
        """A process ended, or runs another program now."""
        self._processes.pop(pid, None)

    def follow(self, batch: np.ndarray, told_apart: list[Image | str | None]) -> None:
        """Take KERNEL_RECORDs, with what :class:`Images` read of each from the process: an image or a name."""
        columns = (
            "role",
            "ts_ns",
            "pid",
            "handle",
            "container",
            "address",
            "size_bytes",
            "result",
            "name_bytes",
            "name",
        )
        rows = zip(*(batch[column].tolist() for column in columns), strict=True)
        for (role, ts_ns, pid, handle, container, address, size, result, length, text), told in zip(
            rows, told_apart, strict=True
        ):
            process = self._processes.setdefault(pid, _Process())
            if role == functions.KERNEL_PARAMETER:
                self._answer(process, handle, container, Parameter(address, size), result)
            elif result != 0:
                continue
            elif role in (functions.IMAGE_LOAD, functions.IMAGE_FILE, functions.IMAGE_REGISTER):
                image = told if isinstance(told, Image) else None
                process.images.setdefault(handle, []).append((ts_ns, image))
            elif role == functions.KERNEL_ALIAS:
                process.images.setdefault(handle, []).append((ts_ns, process.image(container, ts_ns)))
                process.handles.setdefault(handle, []).append(_Named(ts_ns, container, ""))
            else:
                name = told if isinstance(told, str) else text[: max(0, length - 1)].decode("utf-8", "replace")
                if name:  # else its process ended before the name could be read: the stub's symbol tells it
                    process.handles.setdefault(handle, []).append(_Named(ts_ns, container, name))

    @staticmethod
    def _answer(process: _Process, handle: int, index: int, parameter: Parameter, result: int) -> None:
        """cuFuncGetParamInfo told one parameter, or that there are no more."""
        answers = process.asked.setdefault(handle, {})
        if result == 0:
            answers[index] = parameter
        elif result == _INVALID_VALUE and index <= _MAX_PARAMETERS:
            answers[index] = None
        for entry in process.handles.get(handle, ()):
            if entry.kernel is not None and entry.kernel.parameters is None:
                entry.kernel = None

    def changes(self, pid: int, handle: int) -> list[int]:
        """When the meaning of a handle changed, oldest first."""
        process = self._processes.get(pid)
        return [entry.ts_ns for entry in process.handles.get(handle, ())] if process else []

    def of(self, pid: int, handle: int, ts_ns: int) -> Kernel | None:
        """The kernel that a handle meant at a time; None for an unknown handle."""
        process = self._processes.setdefault(pid, _Process())
        entry = process.named(handle, ts_ns)
        if entry is None:
            entry = self._by_symbol(process, pid, handle, ts_ns)
        if entry.kernel is None:
            entry.kernel = self._resolve(process, handle, entry)
        return entry.kernel

    def _by_symbol(self, process: _Process, pid: int, handle: int, ts_ns: int) -> _Named:
        name, image = self._symbol_of(pid, handle, ts_ns)
        entry = _Named(0, handle, name)
        process.images.setdefault(handle, []).insert(0, (0, image))
        process.handles.setdefault(handle, []).insert(0, entry)
        return entry

    def _resolve(self, process: _Process, handle: int, entry: _Named) -> Kernel:
        told, ts_ns = entry, entry.ts_ns
        parameters = self._asked(process, handle)
        for _ in range(_MAX_ALIASES):
            if told.name:
                break
            parameters = parameters or self._asked(process, told.container)
            following = process.named(told.container, ts_ns)
            if following is None or following is told:
                break
            told = following
        if told.name:
            image = process.image(told.container, max(ts_ns, told.ts_ns))
            parameters = (image.parameters(told.name) if image else None) or parameters
        layout = Layout.of(parameters, self.limit) if parameters is not None else None
        kernel = Kernel(demangle(told.name), parameters, layout)
        if layout is not None:
            kernel.layout_id, self._next_layout = self._next_layout, self._next_layout + 1
            self._by_layout[kernel.layout_id] = kernel
        return kernel

    @staticmethod
    def _asked(process: _Process, handle: int) -> tuple[Parameter, ...] | None:
        """The whole list where the target asked for each parameter and for the first that is not there."""
        answers = process.asked.get(handle, {})
        given = [answers[index] for index in range(len(answers)) if index in answers]
        if len(given) == len(answers) and answers and given[-1] is None and None not in given[:-1]:
            return tuple(parameter for parameter in given if parameter is not None)
        return None

    def of_layout(self, number: int) -> Kernel | None:
        """The kernel for which a layout was made."""
        return self._by_layout.get(number)

    def tell(self, pid: int, handle: int, kernel: Kernel) -> None:
        """Have the probes read the parameters of a kernel by its layout from now on."""
        if self._map is None or kernel.layout is None:
            return
        key = struct.pack("=QII", handle, pid, 0)
        self._map.update(key, kernel.layout.packed(kernel.layout_id))

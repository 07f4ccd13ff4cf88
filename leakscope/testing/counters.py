"""What a process can read of itself after each iteration, without any privilege and without changing it.

Readings go into arrays that were made beforehand: what is stored here must not be what grows.
"""

from __future__ import annotations

import ctypes
import os
import sys
from array import array
from collections.abc import Callable
from typing import NamedTuple


class Counter(NamedTuple):
    """One counter. ``proves``: its growth in every part of the run is a leak by itself (others only tell the size)."""

    name: str
    layer: str
    unit: str  # bytes, blocks, descriptors, threads
    proves: bool
    says: str  # what it counts


RESIDENT = Counter("resident", "host", "bytes", False, "resident anonymous and shared memory")
MAPPED = Counter("mapped", "host", "bytes", True, "mapped address space that malloc does not manage")
THREADS = Counter("threads", "host", "threads", True, "threads")
HEAP = Counter("heap", "host", "bytes", True, "blocks of malloc in use (mallinfo2)")
PYTHON_BLOCKS = Counter("python_blocks", "host", "blocks", True, "Python's memory blocks (sys.getallocatedblocks)")
DESCRIPTORS = Counter("descriptors", "kernel", "descriptors", True, "open descriptors")
GPU_TORCH = Counter("gpu_torch", "gpu", "bytes", True, "device memory in use by tensors (torch.cuda.memory_allocated)")
GPU_PROCESS = Counter("gpu_process", "gpu", "bytes", False, "device memory of this process (NVML)")
COUNTERS = (RESIDENT, MAPPED, THREADS, HEAP, PYTHON_BLOCKS, DESCRIPTORS, GPU_TORCH, GPU_PROCESS)

_STATUS_BYTES = 8192


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and newer (malloc.h): ten size_t."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


class Counters:
    """Readings of all counters that this process has, one at a time.

    ``kinds`` are those that can be read here. :meth:`read` stores a reading; :meth:`series` gives all of a counter.
    """

    def __init__(self, readings: int, gpu: bool = True) -> None:
        """Make room for so many readings."""
        self._read: dict[Counter, Callable[[], int]] = {
            PYTHON_BLOCKS: sys.getallocatedblocks,
            DESCRIPTORS: lambda: len(os.listdir("/proc/self/fd")),  # noqa: PTH208  a Path for each would be more to make
        }
        if gpu:
            self._read |= _gpu_readers()
        self._mallinfo = _mallinfo2()
        self._process = {MAPPED: 0, RESIDENT: 0, THREADS: 0} | ({HEAP: 0} if self._mallinfo else {})
        self._values = {counter: array("q", bytes(8 * readings)) for counter in (*self._process, *self._read)}
        self._taken = 0
        # The first call of each makes what it keeps for later ones.
        for _ in range(2):
            self.read()
        self._taken = 0

    @property
    def kinds(self) -> tuple[Counter, ...]:
        """The counters that are read, in the order of :data:`COUNTERS`."""
        return tuple(counter for counter in COUNTERS if counter in self._values)

    def read(self) -> None:
        """Take one reading of each. Raises IndexError when there is no room left."""
        at = self._taken
        for counter, reader in self._read.items():
            self._values[counter][at] = reader()
        self._read_process()
        for counter, value in self._process.items():
            self._values[counter][at] = value
        self._taken = at + 1

    def series(self, counter: Counter) -> array[int]:
        """The readings of one counter, in order."""
        return self._values[counter][: self._taken]

    def _read_process(self) -> None:
        """/proc/self/status: sizes in kB (proc_pid_status(5)); VmSize and Threads are exact, Rss* within some pages.

        Less the arenas and the maps of malloc, so that memory which it keeps for later counts nowhere.
        """
        fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, _STATUS_BYTES)
        finally:
            os.close(fd)
        values = self._process
        values[RESIDENT] = values[MAPPED] = 0
        for line in text.splitlines():
            name, _, value = line.partition(b":")
            if name == b"VmSize":
                values[MAPPED] = int(value.split()[0]) * 1024
            elif name in (b"RssAnon", b"RssShmem"):
                values[RESIDENT] += int(value.split()[0]) * 1024
            elif name == b"Threads":
                values[THREADS] = int(value)
        if self._mallinfo:
            info = self._mallinfo()
            values[HEAP] = info.uordblks + info.hblkhd
            values[MAPPED] -= info.arena + info.hblkhd


def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    """glibc's mallinfo2, which sums all arenas; None where another allocator serves this process."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _Mallinfo2
    return function if function().uordblks > 0 else None


def _gpu_readers() -> dict[Counter, Callable[[], int]]:
    """Readers of device memory: of torch where the test has it, and of NVML where there is a GPU."""
    readers: dict[Counter, Callable[[], int]] = {}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        readers[GPU_TORCH] = lambda: sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count()))
    from leakscope.record.samplers.gpu import GpuSampler

    sampler, own = GpuSampler(), str(os.getpid())
    if sampler.state.available:
        readers[GPU_PROCESS] = lambda: sum(
            int(r.value) for r in sampler.sample(0) if r.counter == "gpu_process_used" and r.scope_id == own
        )
    return readers

"""What this kernel lets this process do, found by doing it: tiny maps, programs and probes, closed at once.

Numbers and layouts are the kernel's user-space interface (include/uapi/linux/bpf.h). A feature is tried and
never inferred from a version, because distributions backport. Each trial returns a file descriptor and raises
OSError when the kernel refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from leakscope.record.kernel import bpf, perf
from leakscope.record.kernel.syscalls import syscall

_BPF_MAP_CREATE, _BPF_PROG_LOAD = 0, 5
_MAP_TYPE_RINGBUF = 27
_PROG_TYPE_KPROBE, _PROG_TYPE_RAW_TRACEPOINT = 2, 17
_HELPER_PROBE_READ_KERNEL, _HELPER_GET_CURRENT_TASK_BTF = 113, 158


def _instructions(*instructions: tuple[int, int, int, int]) -> bytes:
    """Encode (opcode, destination | source << 4, offset, immediate)."""
    return b"".join(struct.pack("=BBhi", *instruction) for instruction in instructions)


_RETURN_0 = _instructions((0xB7, 0x00, 0, 0), (0x95, 0x00, 0, 0))
_READ_KERNEL = _instructions(
    (0xBF, 0xA1, 0, 0),  # r1 = r10
    (0x07, 0x01, 0, -8),  # r1 += -8
    (0xB7, 0x02, 0, 8),  # r2 = 8
    (0xB7, 0x03, 0, 0),  # r3 = 0: only loading matters, the program never runs
    (0x85, 0x00, 0, _HELPER_PROBE_READ_KERNEL),
)
_CURRENT_TASK = _instructions((0x85, 0x00, 0, _HELPER_GET_CURRENT_TASK_BTF))


def attempt(trial: Callable[[], int]) -> OSError | None:
    """Run a trial and close what it made; the refusal, or None when it worked."""
    try:
        os.close(trial())
    except OSError as error:
        return error
    except KeyError:
        return OSError(errno.ENOSYS, f"leakscope does not know the system calls of {platform.machine()}")
    return None


def create_ring(size_bytes: int) -> int:
    """A BPF ring buffer map (a power of two, a multiple of the page size)."""
    return _bpf(_BPF_MAP_CREATE, struct.pack("=IIII", _MAP_TYPE_RINGBUF, 0, 0, size_bytes))


def load_tracing_program() -> int:
    """The smallest raw tracepoint program; needs CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN."""
    return _load(_PROG_TYPE_RAW_TRACEPOINT, _RETURN_0)


def load_uprobe_program() -> int:
    """The smallest program for uprobe_multi links (Linux 6.6)."""
    return _load(_PROG_TYPE_KPROBE, _RETURN_0, bpf.BPF_TRACE_UPROBE_MULTI)


def load_kernel_reader() -> int:
    """A program that reads kernel memory; lockdown=confidentiality refuses it."""
    return _load(_PROG_TYPE_RAW_TRACEPOINT, _READ_KERNEL + _RETURN_0)


def load_task_reader() -> int:
    """A program that takes the current task by its BTF type; needs the kernel's BTF (Linux 5.11)."""
    return _load(_PROG_TYPE_RAW_TRACEPOINT, _CURRENT_TASK + _RETURN_0)


def attach_raw_tracepoint() -> int:
    """An empty program on the raw tracepoint kfree, attached for as long as the descriptor lives."""
    with _closing(load_tracing_program()) as program:
        return bpf.open_raw_tracepoint(program, "kfree")


def attach_uprobe_multi() -> int:
    """A uprobe_multi link (Linux 6.6) on a file that nothing maps, so that no process is touched."""
    with (
        _closing(load_uprobe_program()) as program,
        _unmapped_file() as path,
    ):
        return bpf.link_uprobe_multi(program, path, [0], [0], at_return=False)


def open_uprobe() -> int:
    """A uprobe through perf_event_open on a file that nothing maps; needs CAP_SYS_ADMIN."""
    with _unmapped_file() as path:
        return perf.open_uprobe(path, 0, at_return=False)


def open_side_band() -> int:
    """Events of one CPU about maps, exec and exit of every process."""
    return perf.open_side_band(0, build_id=False)


@contextlib.contextmanager
def _unmapped_file() -> Iterator[str]:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(bytes(4096))
        yield file.name


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _load(program_type: int, instructions: bytes, expected_attach_type: int = 0) -> int:
    code = ctypes.create_string_buffer(instructions, len(instructions))
    license_text = ctypes.create_string_buffer(b"GPL")
    # type, count, code, license, log level, log size, log, kernel version, flags, name, ifindex, attach type
    attributes = struct.pack(
        "=IIQQIIQII16sII",
        program_type, len(instructions) // 8, ctypes.addressof(code), ctypes.addressof(license_text),
        0, 0, 0, 0, 0, b"leakscope_trial", 0, expected_attach_type,
    )  # fmt: skip
    return _bpf(_BPF_PROG_LOAD, attributes)


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    return syscall("bpf", command, ctypes.addressof(buffer), len(attributes))

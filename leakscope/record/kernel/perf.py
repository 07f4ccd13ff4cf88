"""perf_event_open(2): tracepoints, uprobes as a fallback, and the side-band of process and mapping events."""

from __future__ import annotations

import ctypes
import struct

from leakscope.record.kernel.syscalls import syscall

_PERF_TYPE_SOFTWARE = 1
_PERF_TYPE_TRACEPOINT = 2
_PERF_COUNT_SW_DUMMY = 9
_PERF_FLAG_FD_CLOEXEC = 8

# Bits of perf_event_attr's flag word (include/uapi/linux/perf_event.h).
_DISABLED = 1 << 0
_MMAP = 1 << 8
_COMM = 1 << 9
_TASK = 1 << 13
_SAMPLE_ID_ALL = 1 << 18
_MMAP2 = 1 << 23
_COMM_EXEC = 1 << 24
_USE_CLOCKID = 1 << 25
_BUILD_ID = 1 << 34

_PERF_SAMPLE_TID = 1 << 1
_PERF_SAMPLE_TIME = 1 << 2
_CLOCK_MONOTONIC = 1
_ATTR_BYTES = 128


def _open(attr: bytes, pid: int, cpu: int) -> int:
    buffer = ctypes.create_string_buffer(attr, _ATTR_BYTES)
    return syscall("perf_event_open", ctypes.addressof(buffer), pid, cpu, -1, _PERF_FLAG_FD_CLOEXEC)


def _attr(
    event_type: int,
    config: int,
    flags: int = 0,
    config1: int = 0,
    config2: int = 0,
    sample_type: int = 0,
    wakeup: int = 0,
    clock: int = 0,
) -> bytes:
    # type, size, config, sample_period, sample_type, read_format, flags, wakeup_events, bp_type, config1, config2,
    # branch_sample_type, sample_regs_user, sample_stack_user, clockid
    return struct.pack(
        "=IIQQQQQIIQQQQIi",
        event_type, _ATTR_BYTES, config, 0, sample_type, 0, flags, wakeup, 0, config1, config2, 0, 0, 0, clock,
    )  # fmt: skip


def open_tracepoint(tracepoint_id: int) -> int:
    """A perf event for a classic tracepoint; a program linked to it runs on every CPU."""
    return _open(_attr(_PERF_TYPE_TRACEPOINT, tracepoint_id), -1, 0)


def open_uprobe(path: str, offset: int, *, at_return: bool) -> int:
    """A perf event for one uprobe in a file: the fallback where uprobe_multi links are missing (before 6.6)."""
    with open("/sys/bus/event_source/devices/uprobe/type") as file:
        event_type = int(file.read())
    with open("/sys/bus/event_source/devices/uprobe/format/retprobe") as file:
        bit = int(file.read().strip().removeprefix("config:"))
    name = ctypes.create_string_buffer(path.encode())
    attr = _attr(event_type, (1 << bit) if at_return else 0, config1=ctypes.addressof(name), config2=offset)
    return _open(attr, -1, 0)


def open_side_band(cpu: int, *, build_id: bool) -> int:
    """A dummy event on one CPU whose ring carries COMM, FORK, EXIT and MMAP2 records in CLOCK_MONOTONIC.

    `build_id` asks for build ids in MMAP2 records (kernel 5.12, 88a16a130933); EINVAL where it is not known.
    """
    flags = _MMAP | _MMAP2 | _COMM | _COMM_EXEC | _TASK | _SAMPLE_ID_ALL | _USE_CLOCKID
    if build_id:
        flags |= _BUILD_ID
    sample_type = _PERF_SAMPLE_TID | _PERF_SAMPLE_TIME
    return _open(
        _attr(_PERF_TYPE_SOFTWARE, _PERF_COUNT_SW_DUMMY, flags, sample_type=sample_type, clock=_CLOCK_MONOTONIC),
        -1,
        cpu,
    )

"""System calls without a libc wrapper."""

from __future__ import annotations

import ctypes
import os
import platform

_NUMBERS = {
    "x86_64": {"bpf": 321, "perf_event_open": 298},
    "aarch64": {"bpf": 280, "perf_event_open": 241},
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(name: str, *args: int) -> int:
    """Make a system call; raises OSError with its errno. KeyError on an architecture that is not known."""
    number = _NUMBERS[platform.machine()][name]
    result = _libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(a & 0xFFFFFFFFFFFFFFFF) for a in args))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(result)

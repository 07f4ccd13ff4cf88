"""System calls without a libc wrapper."""

from __future__ import annotations

import ctypes
import os
import platform

NO_SUCH_CALL = 1 << 62
"""In place of a number: of none that is made."""

_NUMBERS = {
    "x86_64": {
        "bpf": 321,
        "perf_event_open": 298,
        "mmap": 9,
        "munmap": 11,
        "brk": 12,
        "mremap": 25,
        "madvise": 28,
        "membarrier": 324,
        "clone": 56,
        "clone3": 435,
        "fork": 57,
        "vfork": 58,
    },
    "aarch64": {
        "bpf": 280,
        "perf_event_open": 241,
        "mmap": 222,
        "munmap": 215,
        "brk": 214,
        "mremap": 216,
        "madvise": 233,
        "membarrier": 283,
        "clone": 220,
        "clone3": 435,
        "fork": NO_SUCH_CALL,
        "vfork": NO_SUCH_CALL,
    },
}

_MEMBARRIER_CMD_GLOBAL = 1
_CLONE_FS = 0x200

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_brief = ctypes.PyDLL(None, use_errno=True)
_brief.syscall.restype = ctypes.c_long


def number(name: str) -> int:
    """Number of a system call on this machine; KeyError on an architecture that is not known."""
    return _NUMBERS[platform.machine()][name]


def syscall(name: str, *args: int, brief: bool = False) -> int:
    """Make a system call; raises OSError with its errno. KeyError on an architecture that is not known.

    One of microseconds (`brief`) keeps Python's lock: taking it back may wait for another thread's imports.
    """
    call = _brief.syscall if brief else _libc.syscall
    result = call(ctypes.c_long(number(name)), *(ctypes.c_ulong(a & 0xFFFFFFFFFFFFFFFF) for a in args))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(result)


def own_working_directory() -> bool:
    """Give the calling thread a working directory of its own; False where that is refused (some containers' seccomp).

    unshare(CLONE_FS): needs no privilege, and concerns this thread alone.
    """
    return bool(_libc.unshare(_CLONE_FS) == 0)


def wait_for_grace_period() -> bool:
    """Return when an RCU grace period has passed: what was handed to call_rcu() before is then due to be freed.

    MEMBARRIER_CMD_GLOBAL is synchronize_rcu() (kernel/sched/membarrier.c). False where the kernel does not offer it.
    """
    try:
        syscall("membarrier", _MEMBARRIER_CMD_GLOBAL, 0, 0)
    except OSError:
        return False
    return True

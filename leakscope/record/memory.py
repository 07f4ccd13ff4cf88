"""The recorder's own memory in recordings of hours."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
LARGE_BYTES = 128 << 10


def give_large_blocks_back() -> None:
    """Let malloc map each block of LARGE_BYTES or more and unmap it when it is freed.

    glibc begins so, but raises that limit up to 32 MiB to the size of what is freed (mallopt(3), M_MMAP_THRESHOLD).
    Then the arrays of megabytes of each readout lie in the heap, and what is allocated beside them keeps its end from
    being given back: the resident set grows by steps. Costs page faults for each such array, so it is for a census
    alone, which has few. Does nothing where malloc is not glibc's.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)

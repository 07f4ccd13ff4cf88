"""What test_stacks_table records, with any CPython since 3.11: Python that is called back from C, on two threads.

In rounds: at the last one the paths have been seen, and code objects have been read while the process lives.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable

ROUNDS, ROUND_S = 3, 0.4
kept: list[object] = []
runtime = ctypes.CDLL(sys.argv[1])
runtime.cudaMalloc.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
called_back = ctypes.CFUNCTYPE(None)


def keep_object() -> None:
    kept.append(os.eventfd(0))


def keep_map() -> None:
    kept.append(mmap.mmap(-1, 65536))


def keep_device() -> None:
    runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 4096)


def middle(keep: Callable[[], None]) -> None:
    called_back(keep)()


def outer() -> None:
    for keep in (keep_object, keep_map, keep_device):
        middle(keep)


def worker() -> None:
    for _ in range(ROUNDS):
        time.sleep(ROUND_S)
        outer()


def main() -> None:
    thread = threading.Thread(target=worker)
    thread.start()
    for _ in range(ROUNDS):
        time.sleep(ROUND_S)
        outer()
    thread.join()
    time.sleep(0.3)
    os._exit(0)


if __name__ == "__main__":
    main()

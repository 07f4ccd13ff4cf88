"""Blocks of malloc in a parent and, after a fork, in its child: sizes tell them apart.

Usage: heap_forker.py ROUNDS. At a line the parent keeps PARENT blocks and forks. Each 50 ms the child keeps one block
whose size names its round, and then frees the parent's blocks, which are copies of its own. Prints both PIDs.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

PARENT, PARENT_BYTES = 7, 5_003
CHILD_BYTES = 6_007


def main() -> None:
    """See the module's text."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    print("ready", flush=True)
    sys.stdin.readline()
    blocks = [libc.malloc(PARENT_BYTES) for _ in range(PARENT)]
    child = os.fork()
    if child == 0:
        for number in range(int(sys.argv[1])):
            libc.malloc(CHILD_BYTES + number)
            time.sleep(0.05)
        for block in blocks:
            libc.free(block)
        sys.stdin.readline()
        os._exit(0)
    print(json.dumps({"parent": os.getpid(), "child": child}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()

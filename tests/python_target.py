"""What test_record_python records, with any CPython since 3.11: each place that keeps something is marked by a comment.

Starts when a line arrives on stdin, prints "kept" when it has done its work, and lives until the next line.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import threading
from collections.abc import Iterator

MAP_BYTES, DEVICE_BYTES = 65536, 4096
kept: list[object] = []


def keep_pairs(count: int) -> None:
    for _ in range(count):
        kept.append(socket.socketpair())  # keep_pairs


def close_pairs(count: int) -> None:
    for _ in range(count):
        for end in socket.socketpair():  # close_pairs
            end.close()


def generated_pairs(count: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    for _ in range(count):
        yield (
            socket.socketpair()  # a call begins on the line of what it calls  # generated_pairs
        )


class Größe:
    def сокет(self, count: int) -> None:
        for _ in range(count):
            kept.append(socket.socketpair())  # сокет


class Device:
    def __init__(self, runtime: str) -> None:
        self.runtime = ctypes.CDLL(runtime)
        self.runtime.cudaMalloc.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
        self.runtime.cudaFree.argtypes = (ctypes.c_void_p,)

    def keep(self, count: int) -> None:
        for _ in range(count):
            self.malloc()  # Device.keep

    def free(self, count: int) -> None:
        for _ in range(count):
            self.runtime.cudaFree(self.malloc())  # Device.free

    def malloc(self) -> int | None:
        address = ctypes.c_void_p()
        assert self.runtime.cudaMalloc(ctypes.byref(address), DEVICE_BYTES) == 0  # Device.malloc
        return address.value


def keep_maps(count: int) -> None:
    for _ in range(count):
        kept.append(mmap.mmap(-1, MAP_BYTES))  # keep_maps


def deep(depth: int, count: int) -> None:
    if depth:
        deep(depth - 1, count)  # deep
    else:
        kept.extend(socket.socketpair() for _ in range(count))  # deepest


def forked(count: int) -> None:
    child = os.fork()
    if not child:
        keep_pairs(count)  # forked
        threading.Event().wait(0.3)  # its code objects are read while it lives
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    device = Device(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    keep_pairs(211)  # main
    close_pairs(223)
    kept.extend(generated_pairs(101))
    Größe().сокет(103)
    device.keep(53)
    device.free(59)
    keep_maps(61)
    deep(100, 31)
    threads = [threading.Thread(target=keep_pairs, args=(count,)) for count in (17, 19)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    forked(23)
    print("kept", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()

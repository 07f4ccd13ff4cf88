"""What test_nvtx records with launches: a Python program that uses `nvtx` in the ways that applications do."""

from __future__ import annotations

import ctypes
import sys
import threading

import nvtx

DEVICE_BYTES = 4096


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


runtime = ctypes.CDLL(sys.argv[1])
runtime.cudaMalloc.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
runtime.cudaLaunchKernel.argtypes = (
    ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
)  # fmt: skip


def malloc(count: int) -> None:
    for _ in range(count):
        assert runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), DEVICE_BYTES) == 0


def launch(count: int) -> None:
    for _ in range(count):
        assert runtime.cudaLaunchKernel(ctypes.c_void_p(0x1000), Dim3(1, 1, 1), Dim3(32, 1, 1), None, 0, None) == 0


@nvtx.annotate("step", domain="training")
def step() -> None:
    malloc(3)
    with nvtx.annotate("forward"):  # the default domain, inside one of another
        malloc(5)
        launch(7)
    nvtx.mark("a mark", domain="training")
    launch(2)


def worker() -> None:
    nvtx.push_range("worker", domain="training")
    malloc(11)
    nvtx.pop_range(domain="training")
    malloc(13)


def main() -> None:
    launch(1)
    for _ in range(4):
        step()
    handle = nvtx.start_range("across threads")
    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    nvtx.end_range(handle)


if __name__ == "__main__":
    main()

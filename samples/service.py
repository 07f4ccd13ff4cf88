"""A Python service that leaks in three layers at once, annotated with NVTX ranges: ``demo_service.c`` retold.

It reaches CUDA through ctypes: the stand-in's ``libcudart.so.12`` unless ``--cudart`` names another. Even requests are
handled by the main thread, odd ones by a worker.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nvtx
from python_common import Site, finish, options, raise_descriptor_limit, rounds

KIB, MIB = 1024, 1024 * 1024
SESSION_EVERY, RESPONSE_EVERY, KV_BLOCK_EVERY = 11, 13, 17
SESSION_BYTES, RESPONSE_BYTES, KV_BLOCK_BYTES = 3000, 64 * KIB, 256 * KIB
WARM_UP_SHARE, PREFIX_FILL_EVERY, PREFIX_HOST_BYTES, PREFIX_GPU_BYTES = 5, 25, MIB, 4 * MIB
STANDIN_CUDART = Path(__file__).resolve().parent / "bin" / "libcudart.so.12"


class Cuda:
    """The two runtime calls that the service makes."""

    def __init__(self, library: str) -> None:
        self._runtime = ctypes.CDLL(library)
        self._runtime.cudaMalloc.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
        self._runtime.cudaFree.argtypes = (ctypes.c_void_p,)

    def malloc(self, size_bytes: int) -> int:
        """Allocate device memory and return its address; raises MemoryError."""
        address = ctypes.c_void_p()
        if error := self._runtime.cudaMalloc(ctypes.byref(address), size_bytes):
            raise MemoryError(f"cudaMalloc of {size_bytes} bytes failed with CUDA error {error}")
        return address.value or 0

    def free(self, address: int) -> None:
        """Free device memory."""
        self._runtime.cudaFree(address)


def touched_map(size_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, size_bytes, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


class Service:
    """Serves requests: ``sessions``, ``responses`` and ``kv_blocks`` grow without bound."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.sessions: list[tuple[socket.socket, socket.socket]] = []
        self.responses: list[mmap.mmap] = []
        self.kv_blocks: list[int] = []
        self.kv_blocks_by_thread: dict[int, int] = {}
        self.prefixes: list[tuple[mmap.mmap, int]] = []

    # The leaks.

    @nvtx.annotate("session_open")
    def session_open_without_close(self) -> None:
        pair = socket.socketpair()
        pair[0].send(bytes(SESSION_BYTES))
        self.sessions.append(pair)

    @nvtx.annotate("response_buffer")
    def response_buffer_map(self) -> None:
        self.responses.append(touched_map(RESPONSE_BYTES))

    @nvtx.annotate("kv_block")
    def kv_block_alloc(self) -> None:
        self.kv_blocks.append(self.cuda.malloc(KV_BLOCK_BYTES))
        thread = threading.get_native_id()
        self.kv_blocks_by_thread[thread] = self.kv_blocks_by_thread.get(thread, 0) + 1

    # A cache that fills and stops.

    @nvtx.annotate("prefix_cache")
    def prefix_cache_fill(self) -> None:
        self.prefixes.append((touched_map(PREFIX_HOST_BYTES), self.cuda.malloc(PREFIX_GPU_BYTES)))

    # Healthy work.

    @nvtx.annotate("backend_call")
    def backend_call(self) -> None:
        first, second = socket.socketpair()
        with first, second:
            first.send(bytes(SESSION_BYTES))

    @nvtx.annotate("staging_buffer")
    def staging_buffer_use(self) -> None:
        touched_map(RESPONSE_BYTES).close()

    @nvtx.annotate("activations")
    def activations_compute(self) -> None:
        self.cuda.free(self.cuda.malloc(KV_BLOCK_BYTES))

    @nvtx.annotate("access_log")
    def access_log_write(self) -> None:
        with Path(os.devnull).open("wb") as log:
            log.write(bytes(SESSION_BYTES))

    @nvtx.annotate("request")
    def request_handle(self, i: int) -> None:
        self.backend_call()
        self.staging_buffer_use()
        self.activations_compute()
        if i % SESSION_EVERY == 0:
            self.session_open_without_close()
        if i % RESPONSE_EVERY == 0:
            self.response_buffer_map()
        if i % KV_BLOCK_EVERY == 0:
            self.kv_block_alloc()
        self.access_log_write()


class FixedService(Service):
    """The service after the fix: what a request takes is given back when it ends."""

    def request_handle(self, i: int) -> None:
        super().request_handle(i)
        while self.sessions:
            for end in self.sessions.pop():
                end.close()
        while self.responses:
            self.responses.pop().close()
        while self.kv_blocks:
            self.cuda.free(self.kv_blocks.pop())


def main() -> None:
    parser = options(__doc__ or "", count=2000, pause_us=4000, churn=1)
    parser.add_argument("--cudart", default=str(STANDIN_CUDART), help="the CUDA runtime library to load")
    parser.add_argument("--fixed", action="store_true", help="run the service without its leaks")
    arguments = parser.parse_args()
    raise_descriptor_limit()
    service = (FixedService if arguments.fixed else Service)(Cuda(arguments.cudart))
    warm_up = arguments.count // WARM_UP_SHARE
    worker = ThreadPoolExecutor(1)
    for i in rounds(arguments):
        if i % 2:
            worker.submit(service.request_handle, i).result()
        else:
            service.request_handle(i)
        if i < warm_up and i % PREFIX_FILL_EVERY == 0:
            service.prefix_cache_fill()
    sessions, responses = len(service.sessions), len(service.responses)
    blocks, prefixes = len(service.kv_blocks), len(service.prefixes)
    sites = [
        Site(function, layer, kind, api, objects, objects * size)
        for function, layer, kind, api, objects, size in (
            ("session_open_without_close", "kernel", "slab", "socketpair", sessions, SESSION_BYTES),
            ("response_buffer_map", "host", "mmap_anon", "mmap", responses, RESPONSE_BYTES),
            ("kv_block_alloc", "gpu", "device", "cudaMalloc", blocks, KV_BLOCK_BYTES),
        )
    ]
    cached = [
        {"function": "prefix_cache_fill", "layer": layer, "objects": prefixes, "bytes": prefixes * size}
        for layer, size in (("host", PREFIX_HOST_BYTES), ("gpu", PREFIX_GPU_BYTES))
    ]
    threads = [{"tid": tid, "kv_blocks": count} for tid, count in service.kv_blocks_by_thread.items()]
    finish("service.py", sites, arguments.count, arguments.hold, cached=cached, threads=threads)


if __name__ == "__main__":
    main()

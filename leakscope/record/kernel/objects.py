"""Which slab cache holds an address: the kernel's own answer through the kfunc bpf_get_kmem_cache.

kmalloc's tracepoint names no cache, and since v6.11 (kmem_buckets_create, b32801d1255b) size and flags no longer tell
it: a message queue's objects live in msg_msg-2k. A nine-instruction BPF program of type SYSCALL, run by
BPF_PROG_TEST_RUN, asks for one address at a time. Kernels without the kfunc (before 6.13) get None and the caller falls
back to the name that size and flags imply.
"""

from __future__ import annotations

import ctypes
import os
import struct

from leakscope.record.kernel.btf import KernelTypes
from leakscope.record.kernel.syscalls import syscall

_BPF_PROG_LOAD = 5
_BPF_PROG_TEST_RUN = 10
_BPF_PROG_TYPE_SYSCALL = 31
_BPF_F_SLEEPABLE = 1 << 4


def _instruction(code: int, destination: int = 0, source: int = 0, offset: int = 0, immediate: int = 0) -> bytes:
    return struct.pack("=BBhi", code, source << 4 | destination, offset, immediate)


class SlabCacheOfAddress:
    """Callable: kernel address → (cache name, object size in bytes), or None when it cannot be told."""

    def __init__(self, types: KernelTypes) -> None:
        self._fd = -1
        self.reason = ""
        function = types.function_id("bpf_get_kmem_cache")
        name = types.member_offset("kmem_cache", "name")
        size = types.member_offset("kmem_cache", "size")
        if function is None or name is None or size is None:
            self.reason = "the kernel has no kfunc bpf_get_kmem_cache (v6.13)"
            return
        program = b"".join(
            [
                _instruction(0xBF, 6, 1),  # r6 = ctx
                _instruction(0x79, 1, 6, 0),  # r1 = ctx[0], the address
                _instruction(0x85, 0, 2, 0, function),  # r0 = bpf_get_kmem_cache(r1)
                _instruction(0x15, 0, 0, 4, 0),  # if r0 == NULL goto out
                _instruction(0x79, 1, 0, name),  # r1 = r0->name
                _instruction(0x7B, 6, 1, 8),  # ctx[1] = r1
                _instruction(0x61, 1, 0, size),  # r1 = r0->size
                _instruction(0x7B, 6, 1, 16),  # ctx[2] = r1
                _instruction(0xB7, 0, 0, 0, 0),  # out: r0 = 0
                _instruction(0x95),  # exit
            ]
        )
        self._names: dict[int, str] = {}
        self._read = _KernelString()
        try:
            self._fd = _load(program, _BPF_F_SLEEPABLE)
        except OSError as error:
            self.reason = f"bpf_get_kmem_cache cannot be called: {error.strerror}"

    def __call__(self, address: int) -> tuple[str, int] | None:
        """(name, size in bytes) of the cache that holds the object at `address`, None if it is no slab object."""
        if self._fd < 0:
            return None
        context = ctypes.create_string_buffer(struct.pack("=QQQ", address, 0, 0), 24)
        _test_run(self._fd, context)
        _, name, size = struct.unpack("=QQQ", context.raw)
        if not name:
            return None
        if name not in self._names:
            self._names[name] = self._read(name)
        return (self._names[name], int(size)) if self._names[name] else None

    def close(self) -> None:
        """Unload the programs."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._read.close()


class _KernelString:
    """Reads a NUL-terminated string of kernel memory through bpf_probe_read_kernel_str, up to 63 characters."""

    def __init__(self) -> None:
        self._fd = -1

    def _open(self) -> None:
        program = b"".join(
            [
                _instruction(0xBF, 6, 1),  # r6 = ctx
                _instruction(0x79, 3, 6, 0),  # r3 = ctx[0], the address
                _instruction(0xBF, 1, 10),  # r1 = fp
                _instruction(0x07, 1, 0, 0, -64),  # r1 -= 64: the buffer
                *(_instruction(0x7A, 10, 0, -64 + 8 * i, 0) for i in range(8)),
                _instruction(0xB7, 2, 0, 0, 64),  # r2 = 64
                _instruction(0x85, 0, 0, 0, 115),  # bpf_probe_read_kernel_str
                *(
                    part
                    for i in range(8)
                    for part in (_instruction(0x79, 1, 10, -64 + 8 * i), _instruction(0x7B, 6, 1, 8 * i))
                ),
                _instruction(0xB7, 0, 0, 0, 0),
                _instruction(0x95),
            ]
        )
        self._fd = _load(program, _BPF_F_SLEEPABLE)

    def __call__(self, address: int) -> str:
        if self._fd < 0:
            self._open()
        context = ctypes.create_string_buffer(struct.pack("=Q", address) + bytes(56), 64)
        _test_run(self._fd, context)
        return context.raw.split(b"\0", 1)[0].decode("ascii", "replace")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _load(program: bytes, flags: int) -> int:
    instructions = ctypes.create_string_buffer(program, len(program))
    licence = ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(65536)
    attr = struct.pack(
        "=IIQQIIQII16sII",
        _BPF_PROG_TYPE_SYSCALL, len(program) // 8, ctypes.addressof(instructions), ctypes.addressof(licence),
        1, len(log), ctypes.addressof(log), 0, flags, b"leakscope", 0, 0,
    )  # fmt: skip
    buffer = ctypes.create_string_buffer(attr, 128)
    return syscall("bpf", _BPF_PROG_LOAD, ctypes.addressof(buffer), 128)


def _test_run(program_fd: int, context: ctypes.Array[ctypes.c_char]) -> None:
    # prog_fd, retval, data_size_in/out, data_in/out, repeat, duration, ctx_size_in/out, ctx_in/out, flags, cpu, batch
    attr = struct.pack(
        "=IIIIQQIIIIQQII",
        program_fd, 0, 0, 0, 0, 0, 0, 0, len(context), 0, ctypes.addressof(context), 0, 0, 0,
    )  # fmt: skip
    buffer = ctypes.create_string_buffer(attr, 128)
    syscall("bpf", _BPF_PROG_TEST_RUN, ctypes.addressof(buffer), 128)

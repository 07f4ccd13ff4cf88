"""A ring buffer on memory of our own: every layout that a reader may meet, without a kernel that makes it."""

from __future__ import annotations

import mmap
import os
import struct

BUSY, DISCARDED = 1 << 31, 1 << 30  # BPF_RINGBUF_BUSY_BIT, BPF_RINGBUF_DISCARD_BIT


class PaperRing:
    """Memory with the layout of kernel/bpf/ringbuf.c: consumer page, producer page, the data twice."""

    def __init__(self, size_bytes: int) -> None:
        self.size = size_bytes
        self.fd = os.memfd_create("ring")
        os.ftruncate(self.fd, 2 * mmap.PAGESIZE + 2 * size_bytes)
        self.produced = 0

    def put(self, size_bytes: int, flags: int, value: int) -> int:
        """Write a record; its position."""
        position = self.produced
        self._store(position, struct.pack("=II", size_bytes | flags, 0) + struct.pack("=Q", value) * (size_bytes // 8))
        self.produced += 8 + (size_bytes + 7) // 8 * 8
        os.pwrite(self.fd, struct.pack("=Q", self.produced), mmap.PAGESIZE)
        return position

    def set_flags(self, position: int, size_bytes: int, flags: int) -> None:
        """Change a record's flags, as submitting it does."""
        self._store(position, struct.pack("=I", size_bytes | flags))

    def consumed(self) -> int:
        """The consumer's position."""
        return int(struct.unpack("=Q", os.pread(self.fd, 8, 0))[0])

    def _store(self, position: int, content: bytes) -> None:
        for index, byte in enumerate(content):
            at = (position + index) % self.size
            for copy in (0, self.size):
                os.pwrite(self.fd, bytes([byte]), 2 * mmap.PAGESIZE + copy + at)

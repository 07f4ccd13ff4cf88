"""The reading side of a BPF ring buffer: mapped memory, decoded in bulk by numpy.

The layout is the kernel's (kernel/bpf/ringbuf.c): a consumer page, a producer page, and the data mapped twice in a
row, so that no record wraps. Each record has an 8-byte header whose first word is its length with two flag bits.
"""

from __future__ import annotations

import mmap
import sys
import time

import numpy as np

_BUSY = 1 << 31
_DISCARDED = 1 << 30
_HEADER_BYTES = 8


def joined(batches: list[np.ndarray]) -> np.ndarray:
    """Structured arrays of one dtype as one. As words where that is possible: structured rows copy field by field."""
    dtype = batches[0].dtype
    if dtype.itemsize % 8:
        return np.concatenate(batches)
    return np.concatenate([batch.view(np.uint64) for batch in batches]).view(dtype)


def _mapped(fd: int, size_bytes: int) -> tuple[mmap.mmap, mmap.mmap]:
    """(consumer page, producer page with the data twice behind it) of a ring."""
    page = mmap.PAGESIZE
    return (
        mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0),
        mmap.mmap(fd, page + 2 * size_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page),
    )


class RecordRing:
    """A ring of records of any size, few enough to be taken one by one."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._mask = size_bytes - 1
        self._consumer_map, self._producer_map = _mapped(fd, size_bytes)
        self._consumer = memoryview(self._consumer_map)[:8].cast("Q")
        self._producer = memoryview(self._producer_map)[:8].cast("Q")
        self._data = memoryview(self._producer_map)[mmap.PAGESIZE :]

    def read(self, wait_s: float = 0.0) -> list[bytes]:
        """What was put into the ring before. It is taken in order: for one that is still being written, by a program
        that was interrupted, this waits so long at most; what is behind it then stays for the next time."""
        found: list[bytes] = []
        produced, consumed = self._producer[0], self._consumer[0]
        deadline = 0.0
        while consumed < produced:
            start = consumed & self._mask
            header = int.from_bytes(self._data[start : start + 4], sys.byteorder)
            if header & _BUSY:
                now = time.monotonic()
                deadline = deadline or now + wait_s
                if now >= deadline:
                    break
                time.sleep(0.0002)
                continue
            length = header & ~_DISCARDED
            start += _HEADER_BYTES
            if not header & _DISCARDED:
                found.append(self._data[start : start + length].tobytes())
            consumed += (_HEADER_BYTES + length + 7) & ~7
        self._consumer[0] = consumed
        return found


class Ring:
    """A ring whose records all have the size of `dtype`; records of another size land in `other`.

    `read()` never blocks. Bulk decoding looks at all headers first and then copies the payloads, which keeps
    the kernel's order on x86; on weaker memory models the length read orders the copy through the address.
    """

    def __init__(self, fd: int, size_bytes: int, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.size_bytes = size_bytes
        self.other: list[bytes] = []
        self._stride = (_HEADER_BYTES + dtype.itemsize + 7) & ~7
        self._window = 1024
        self._consumer_map, self._producer_map = _mapped(fd, size_bytes)
        self._consumer = np.frombuffer(self._consumer_map, np.uint64, 1)
        self._producer = np.frombuffer(self._producer_map, np.uint64, 1)
        self._data = np.frombuffer(self._producer_map, np.uint8, 2 * size_bytes, mmap.PAGESIZE)

    def submitted(self) -> int:
        """Records that the kernel has put into the ring since it was made, all of the ring's one size."""
        return int(self._producer[0]) // self._stride

    def fill_share(self) -> float:
        """Share of the ring that waits to be read, 0..1."""
        return float(int(self._producer[0]) - int(self._consumer[0])) / self.size_bytes

    def read(self, at_most: int = 1 << 20) -> np.ndarray:
        """All records that are ready, at most about `at_most`, as one structured array (empty when none).

        What comes while it reads waits for the next read: to follow a writer that does not pause would never end, and
        in steps of a few records.
        """
        batches: list[np.ndarray] = []
        total = 0
        produced = int(self._producer[0])
        while total < at_most:
            batch = self._read_batch(produced)
            if batch is None:
                break
            batches.append(batch)
            total += len(batch)
        if len(batches) == 1:
            return batches[0]
        return joined(batches) if batches else np.empty(0, self.dtype)

    def _read_batch(self, produced: int) -> np.ndarray | None:
        """One run of records before the position `produced`, an empty array after progress without records, or None
        when nothing is ready."""
        consumed = int(self._consumer[0])
        offset = consumed & (self.size_bytes - 1)
        size = self.dtype.itemsize
        possible = min((produced - consumed) // self._stride, self._window)
        if possible > 0:
            headers = np.ndarray((possible,), np.uint32, self._data, offset, (self._stride,)).copy()
            whole = (headers & ~np.uint32(_DISCARDED)) == size
            run = possible if whole.all() else int(whole.argmin())
            # A busy or odd record ends the run: look less far next time, so that it is not re-read for each.
            self._window = min(self._window * 2, 65536) if run == possible else max(128, 2 * run)
            if run:
                records = self._copy(run, offset + _HEADER_BYTES)
                discarded = (headers[:run] & _DISCARDED) != 0
                if discarded.any():
                    records = records[~discarded]
                self._consumer[0] = consumed + run * self._stride
                return records
        return self._read_single(consumed, produced, offset)

    def _copy(self, run: int, offset: int) -> np.ndarray:
        """`run` records from `offset` on. As words where that is possible: structured rows copy field by field."""
        size = self.dtype.itemsize
        if size % 8:
            return np.ndarray((run,), self.dtype, self._data, offset, (self._stride,)).copy()
        words = np.ndarray((run, size // 8), np.uint64, self._data, offset, (self._stride, 8))
        return words.copy().reshape(-1).view(self.dtype)

    def _read_single(self, consumed: int, produced: int, offset: int) -> np.ndarray | None:
        if produced <= consumed:
            return None
        header = int(np.ndarray((1,), np.uint32, self._data, offset)[0])
        if header & _BUSY:
            return None
        length = header & ~(_BUSY | _DISCARDED)
        records = np.empty(0, self.dtype)
        if not header & _DISCARDED:
            if length == self.dtype.itemsize:  # busy at the bulk look, ready now
                records = np.ndarray((1,), self.dtype, self._data, offset + _HEADER_BYTES).copy()
            else:
                start = offset + _HEADER_BYTES
                self.other.append(self._data[start : start + length].tobytes())
        self._consumer[0] = consumed + ((_HEADER_BYTES + length + 7) & ~7)
        return records

"""The reader of rings whose records have any size."""

from __future__ import annotations

import mmap
import random
import struct
import threading
import time

import pytest
from paper_ring import BUSY, DISCARDED, PaperRing

from leakscope.record.ring import RecordRing


def told(records: list[bytes]) -> list[tuple[int, int]]:
    """(value, size) of records."""
    return [(struct.unpack_from("=Q", record)[0], len(record)) for record in records]


@pytest.mark.parametrize("seed", range(6))
def test_records_of_any_size_come_whole_and_in_order(seed: int) -> None:
    # given records that fill the ring several times, some of them discarded or still being written
    pattern, paper = random.Random(seed), PaperRing(mmap.PAGESIZE)
    ring = RecordRing(paper.fd, paper.size)
    waiting: list[tuple[int, int, int, int]] = []  # position, size, flags, value
    read: list[tuple[int, int]] = []
    expected: list[tuple[int, int]] = []
    for value in range(300):
        size = 8 * pattern.randrange(1, 40)
        if paper.produced + 16 + size - paper.consumed() < paper.size:
            flags = pattern.choices([0, BUSY, DISCARDED], [8, 1, 1])[0]
            waiting.append((paper.put(size, flags, value), size, flags, value))
        if pattern.random() < 0.3:
            for index, (at, size, flags, _) in enumerate(waiting):
                if flags == BUSY and pattern.random() < 0.5:
                    paper.set_flags(at, size, 0)
                    waiting[index] = (at, size, 0, waiting[index][3])
            while waiting and waiting[0][2] != BUSY:
                _, size, flags, kept = waiting.pop(0)
                if not flags:
                    expected.append((kept, size))
            read += told(ring.read())
            # then what is not behind one that is being written is taken, and no more
            assert read == expected
            assert paper.consumed() == (waiting[0][0] if waiting else paper.produced)
    assert paper.produced > 5 * paper.size


def test_a_record_that_is_being_written_is_waited_for() -> None:
    paper = PaperRing(mmap.PAGESIZE)
    ring = RecordRing(paper.fd, paper.size)
    paper.put(8, 0, 1)
    at = paper.put(16, BUSY, 2)
    paper.put(8, 0, 3)

    def submit() -> None:
        time.sleep(0.05)
        paper.set_flags(at, 16, 0)

    writer = threading.Thread(target=submit)
    writer.start()
    assert told(ring.read(wait_s=30)) == [(1, 8), (2, 16), (3, 8)]
    writer.join()


def test_one_that_stays_unwritten_holds_nothing_up_for_longer_than_it_may() -> None:
    paper = PaperRing(mmap.PAGESIZE)
    ring = RecordRing(paper.fd, paper.size)
    paper.put(8, 0, 1)
    at = paper.put(16, BUSY, 2)
    assert told(ring.read(wait_s=0.01)) == [(1, 8)]
    assert told(ring.read()) == []
    paper.set_flags(at, 16, DISCARDED)
    paper.put(8, 0, 3)
    assert told(ring.read()) == [(3, 8)]

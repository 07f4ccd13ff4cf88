"""The ring buffer reader on a real BPF ring, and the whole recorder when its ring overflows."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from paper_ring import BUSY, DISCARDED, PaperRing
from recording import Recorder, Recording, waiting

from leakscope.record.capabilities import trials
from leakscope.record.kernel.bpf import Map, possible_cpus
from leakscope.record.kernel.btf import KernelTypes
from leakscope.record.kernel.syscalls import syscall
from leakscope.record.ring import Ring

RECORD = np.dtype([("value", "<u8"), ("again", "<u8"), ("last", "<u8")])
STRIDE = 8 + RECORD.itemsize  # with the kernel's header
RING_BYTES = 4 * mmap.PAGESIZE
HOLDS = RING_BYTES // STRIDE - 1
"""Records that fit: the kernel never fills a ring to the last byte (bpf_ringbuf_reserve: > mask)."""

# --- a producer: one BPF program of type SYSCALL for each thing that may stand in a ring -------------------

_MAP_CREATE, _PROG_LOAD, _PROG_TEST_RUN = 0, 5, 10
_MAP_TYPE_ARRAY, _PROG_TYPE_SYSCALL, _SLEEPABLE = 2, 31, 1 << 4
_PSEUDO_MAP_FD, _PSEUDO_MAP_VALUE, _PSEUDO_KFUNC_CALL = 1, 2, 2
RESERVE, SUBMIT, DISCARD = 131, 132, 133  # bpf_ringbuf_*, include/uapi/linux/bpf.h


def _one(code: int, destination: int = 0, source: int = 0, offset: int = 0, immediate: int = 0) -> bytes:
    return struct.pack("=BBhi", code, source << 4 | destination, offset, immediate)


def _load_address(register: int, kind: int, fd: int) -> bytes:
    return _one(0x18, register, kind, 0, fd) + _one(0)  # counts as two


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, 128)
    return syscall("bpf", command, ctypes.addressof(buffer), 128)


class Producer:
    """A program that reserves `size_bytes`, fills them with the value it is called with, and submits or discards.

    With a `gate` (an array map of one {reserved, go} pair) it holds its reservation until `go` is set.
    """

    def __init__(self, ring_fd: int, size_bytes: int = RECORD.itemsize, finish: int = SUBMIT, gate: int = -1) -> None:
        words = size_bytes // 8
        code = [
            _one(0xBF, 6, 1),  # r6 = ctx
            _load_address(1, _PSEUDO_MAP_FD, ring_fd),
            _one(0xB7, 2, 0, 0, size_bytes),
            _one(0xB7, 3),
            _one(0x85, immediate=RESERVE),
            _one(0x55, 0, 0, 2, 0),  # if r0: go on
            _one(0xB7, 0),
            _one(0x95),
            _one(0xBF, 8, 0),  # r8 = the record
            _one(0x79, 7, 6),  # r7 = ctx[0], the value
            *(_one(0x7B, 8, 7, 8 * word) for word in range(words)),
            *(self._wait(gate) if gate >= 0 else []),
            _one(0xBF, 1, 8),
            _one(0xB7, 2),
            _one(0x85, immediate=finish),
            _one(0xB7, 1, 0, 0, 1),
            _one(0x7B, 6, 1, 8),  # ctx[1] = 1: it was there to be filled
            _one(0xB7, 0),
            _one(0x95),
        ]
        text = b"".join(code)
        instructions, licence = ctypes.create_string_buffer(text, len(text)), ctypes.create_string_buffer(b"GPL")
        log = ctypes.create_string_buffer(1 << 16)
        try:
            self.fd = _bpf(
                _PROG_LOAD,
                struct.pack(
                    "=IIQQIIQII", _PROG_TYPE_SYSCALL, len(text) // 8, ctypes.addressof(instructions),
                    ctypes.addressof(licence), 1, len(log), ctypes.addressof(log), 0, _SLEEPABLE,
                ),
            )  # fmt: skip
        except OSError as error:
            raise AssertionError(f"{error}: {log.value.decode()[-2000:]}") from error

    @staticmethod
    def _wait(gate: int) -> list[bytes]:
        """Set gate.reserved, then iterate (bpf_iter_num, Linux 6.4) until gate.go is set.

        An iterator counts to 2^23 at most (BPF_MAX_LOOPS), some 30 ms: one inside another lasts for long enough.
        """
        types = KernelTypes()
        new, following, destroy = (types.function_id(f"bpf_iter_num_{name}") for name in ("new", "next", "destroy"))
        assert new and following and destroy
        outer, inner = -8, -16  # struct bpf_iter_num: 8 bytes on the stack

        def call(function: int, iterator: int) -> list[bytes]:
            bounds = [_one(0xB7, 2), _one(0xB7, 3, 0, 0, 1 << 23)] if function == new else []
            place = [_one(0xBF, 1, 10), _one(0x07, 1, 0, 0, iterator)]
            return [*place, *bounds, _one(0x85, 0, _PSEUDO_KFUNC_CALL, 0, function)]

        def unless_go(back: list[bytes]) -> list[bytes]:
            return [_one(0x79, 1, 9, 8), _one(0x15, 1, 0, -len(back) - 2, 0)]  # if !gate.go: back

        count = [*call(following, inner), _one(0x15, 0, 0, 2, 0)]  # none left: over the next two
        turn = [*call(new, inner), *count, *unless_go(count), *call(destroy, inner)]
        turns = [*call(following, outer), _one(0x15, 0, 0, len(turn) + 2, 0), *turn]
        return [
            _load_address(9, _PSEUDO_MAP_VALUE, gate),
            _one(0xB7, 1, 0, 0, 1),
            _one(0x7B, 9, 1, 0),  # gate.reserved = 1
            *call(new, outer),
            *turns,
            *unless_go(turns),
            *call(destroy, outer),
        ]

    def __call__(self, value: int) -> bool:
        """Run once; False when the ring was full."""
        context = ctypes.create_string_buffer(struct.pack("=QQ", value, 0), 16)
        _bpf(
            _PROG_TEST_RUN,
            struct.pack(
                "=IIIIQQIIIIQQ", self.fd, 0, 0, 0, 0, 0, 0, 0, len(context), 0, ctypes.addressof(context), 0
            ),
        )  # fmt: skip
        return bool(struct.unpack("=QQ", context.raw)[1])


@pytest.fixture
def ring_fd(can_record: None) -> Iterator[int]:
    """A BPF ring of RING_BYTES."""
    fd = trials.create_ring(RING_BYTES)
    yield fd
    os.close(fd)


def values(records: np.ndarray) -> list[int]:
    """The values of records, each of which must be whole."""
    assert records.dtype == RECORD
    for name in ("again", "last"):
        assert (records[name] == records["value"]).all()
    return records["value"].tolist()


def first_word(content: bytes) -> int:
    """The value of a record of another size."""
    return int(struct.unpack_from("=Q", content)[0])


bpf_test = pytest.mark.bpf


@bpf_test
def test_an_empty_ring_reads_as_nothing(ring_fd: int) -> None:
    ring = Ring(ring_fd, RING_BYTES, RECORD)
    assert (len(ring.read()), ring.fill_share()) == (0, 0.0)


@bpf_test
def test_every_record_is_read_once_and_in_order_around_many_turns(ring_fd: int) -> None:
    # given batches whose sizes share no factor with the ring, so that they end at every place of it
    ring, produce = Ring(ring_fd, RING_BYTES, RECORD), Producer(ring_fd)
    produced, read = 0, []
    for batch in [1, 7, 128, 311, HOLDS, 509, 13, 257] * 3:
        for _ in range(batch):
            assert produce(produced)
            produced += 1
        assert ring.fill_share() == batch * STRIDE / RING_BYTES
        read += values(ring.read())
        assert ring.fill_share() == 0.0
    # then the ring has been around several times
    assert produced * STRIDE > 10 * RING_BYTES
    assert read == list(range(produced))
    assert ring.submitted() == produced


@bpf_test
def test_read_plus_refused_is_produced(ring_fd: int) -> None:
    # given a producer that writes on whether or not there is room, and a reader that comes too seldom
    ring, produce = Ring(ring_fd, RING_BYTES, RECORD), Producer(ring_fd)
    tried, refused, read = 7 * HOLDS + 3, [], []
    for value in range(tried):
        if not produce(value):
            refused.append(value)
        if value % 1009 == 1008:
            read += values(ring.read())
    read += values(ring.read())
    assert len(refused) > HOLDS
    assert sorted(read + refused) == list(range(tried))
    assert ring.submitted() == tried - len(refused)
    assert read == sorted(read)


@bpf_test
def test_discarded_records_are_passed_over(ring_fd: int) -> None:
    ring, submit, discard = Ring(ring_fd, RING_BYTES, RECORD), Producer(ring_fd), Producer(ring_fd, finish=DISCARD)
    pattern = random.Random(5)
    kept, read = [], []
    for turn in range(5):
        for value in range(turn * 500, turn * 500 + 500):
            if pattern.random() < 0.4:
                assert discard(value)
            else:
                assert submit(value)
                kept.append(value)
        read += values(ring.read())
        assert ring.fill_share() == 0.0
    assert read == kept and ring.other == []


@bpf_test
def test_a_run_of_nothing_but_discarded_records_reads_as_nothing(ring_fd: int) -> None:
    ring, discard = Ring(ring_fd, RING_BYTES, RECORD), Producer(ring_fd, finish=DISCARD)
    assert all(discard(value) for value in range(300))
    assert (len(ring.read()), ring.fill_share(), ring.other) == (0, 0.0, [])


@bpf_test
def test_records_of_another_size_are_kept_apart(ring_fd: int) -> None:
    # given shorter and longer records, submitted and discarded, between those of the usual size
    ring = Ring(ring_fd, RING_BYTES, RECORD)
    sizes = [8, 13, 24, 32, 101]  # the kernel rounds up to 8
    producers = {
        (size, finish): Producer(ring_fd, size, finish) for size in sizes for finish in (SUBMIT, DISCARD)
    }  # fmt: skip
    pattern = random.Random(7)
    usual, odd, read = [], [], []
    for turn in range(20):
        for value in range(turn * 100, turn * 100 + 100):
            size = 24 if pattern.random() < 0.7 else pattern.choice(sizes)
            finish = DISCARD if pattern.random() < 0.2 else SUBMIT
            assert producers[size, finish](value)
            if finish == SUBMIT and size == 24:
                usual.append(value)
            elif finish == SUBMIT:
                odd.append((value, size))
        read += values(ring.read())
    # then all are read, each in its own order
    assert read == usual
    assert [(first_word(content), len(content)) for content in ring.other] == odd
    assert ring.fill_share() == 0.0


@bpf_test
def test_a_record_that_is_being_written_holds_back_those_after_it(ring_fd: int) -> None:
    if not KernelTypes().function_id("bpf_iter_num_new"):
        pytest.skip("NOT TESTED: this kernel has no bpf_iter_num (Linux 6.4), so a record cannot be held busy")
    gate_fd = _bpf(_MAP_CREATE, struct.pack("=IIII", _MAP_TYPE_ARRAY, 4, 16, 1))
    gate = Map(gate_fd, 4, 16, 1)
    ring, submit, hold = Ring(ring_fd, RING_BYTES, RECORD), Producer(ring_fd), Producer(ring_fd, gate=gate_fd)
    # given a producer that stopped between reserving and submitting, with others done before and after it
    assert submit(1) and submit(2)
    holding = threading.Thread(target=hold, args=(3,))
    holding.start()
    end = time.monotonic() + 30
    while gate.lookup(bytes(4))[:8] == bytes(8) and time.monotonic() < end:
        time.sleep(0.001)
    try:
        assert submit(4) and submit(5)
        # then what lies before it is read at once, and nothing else
        assert values(ring.read()) == [1, 2]
        assert values(ring.read()) == []
        assert ring.fill_share() == 3 * STRIDE / RING_BYTES
    finally:
        gate.update(bytes(4), struct.pack("=QQ", 1, 1))
        holding.join(30)
    # and the rest once it is submitted
    assert values(ring.read()) == [3, 4, 5]
    os.close(gate_fd)


# --- every layout, on memory of our own that looks like a ring ---------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_is_read_as_the_kernel_would(seed: int) -> None:
    # given random records of which some are busy, discarded or of another size, and random moments of reading
    pattern, paper = random.Random(seed), PaperRing(mmap.PAGESIZE)
    ring = Ring(paper.fd, paper.size, RECORD)
    waiting_to_be_read: list[dict[str, int]] = []
    expected: list[int] = []
    odd: list[int] = []
    read: list[int] = []
    for value in range(400):
        size = pattern.choice([24, 24, 24, 24, 13, 40])
        if paper.produced + 16 + size - paper.consumed() < paper.size:
            flags = pattern.choices([0, BUSY, DISCARDED], [8, 1, 1])[0]
            position = paper.put(size, flags, value)
            waiting_to_be_read.append({"at": position, "size": size, "flags": flags, "value": value})
        for record in waiting_to_be_read:
            if record["flags"] == BUSY and pattern.random() < 0.2:
                record["flags"] = pattern.choice([0, DISCARDED])
                paper.set_flags(record["at"], record["size"], record["flags"])
        if pattern.random() < 0.15:
            # when all that is not behind a busy record is taken
            while waiting_to_be_read and waiting_to_be_read[0]["flags"] != BUSY:
                record = waiting_to_be_read.pop(0)
                if not record["flags"]:
                    (expected if record["size"] == 24 else odd).append(record["value"])
            read += values(ring.read())
            # then exactly these come out, and the consumer stands where the next one begins
            assert read == expected
            assert [first_word(content) for content in ring.other] == odd
            assert paper.consumed() == (waiting_to_be_read[0]["at"] if waiting_to_be_read else paper.produced)
    assert len(expected) > 100 and len(odd) > 20
    os.close(paper.fd)


def test_a_read_ends_where_the_writer_stood_when_it_began() -> None:
    # given a writer that adds a record each time that some are copied out
    paper = PaperRing(mmap.PAGESIZE)

    class Followed(Ring):
        copies = 0

        def _copy(self, run: int, offset: int) -> np.ndarray:
            self.copies += 1
            records = super()._copy(run, offset)
            if self.copies < 50:
                paper.put(24, 0, 100 + self.copies)
            return records

    ring = Followed(paper.fd, paper.size, RECORD)
    for value in range(3):
        paper.put(24, 0, value)
    # then it is not followed: what it adds is there for the next read
    assert values(ring.read()) == [0, 1, 2]
    assert values(ring.read()) == [101]
    assert ring.copies == 2 and ring.submitted() == 5
    os.close(paper.fd)


# --- the recorder with a ring that is far too small --------------------------------------------------------

PAIRS, CHURN = 6007, 3


@pytest.fixture(scope="module")
def flooded(bpf: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Recording, int]:
    """One leaker, seen by a recorder with a ring of a page and at the same time by one with the usual ring."""
    place = tmp_path_factory.mktemp("ring")
    with waiting("leak_socketpair", "--count", PAIRS, "--churn", CHURN, "--pause-us", 0) as leaker:
        target = ("-p", leaker.pid)
        with (
            Recorder(place / "small.lscope", *target, "--ring", "4KiB") as small,
            Recorder(place / "usual.lscope", *target) as usual,
        ):
            small.wait_ready()
            usual.wait_ready()
            leaker.go()
            time.sleep(0.3)  # frees through RCU
            small.signal(2)
            return small.result(), usual.stop(), leaker.pid


def drops(recording: Recording) -> int:
    return recording.losses("ring_drop")


def test_events_read_and_counted_drops_are_the_events_produced(flooded: tuple[Recording, Recording, int]) -> None:
    small, usual, _ = flooded
    for recording in (small, usual):
        facts = recording.facts
        assert facts["events_read"] + drops(recording) == facts["events_produced"]
        assert recording.capture.manifest.complete and recording.capture.problems == []
    assert drops(small) > small.facts["events_read"] > 0
    assert drops(usual) == 0


def test_drops_are_told_by_cpu(flooded: tuple[Recording, Recording, int]) -> None:
    ((probe, count, detail),) = flooded[0].rows("SELECT probe, count, detail FROM losses WHERE what = 'ring_drop'")
    assert probe == "mem_ring"
    by_cpu = {int(cpu): int(n) for cpu, n in re.findall(r"(\d+): (\d+)", detail.split("by CPU: ")[1])}
    assert by_cpu.keys() <= set(range(possible_cpus()))
    assert sum(by_cpu.values()) == count


def test_all_that_was_read_is_in_the_capture(flooded: tuple[Recording, Recording, int]) -> None:
    for recording in flooded[:2]:
        rows = recording.rows("SELECT count(*) FROM mem_events")[0][0]
        assert rows == recording.facts["events_read"] > 0


def test_what_was_produced_is_what_another_recorder_saw(flooded: tuple[Recording, Recording, int]) -> None:
    small, usual, pid = flooded
    # given a recorder without drops that saw each socket of the leaker, two a pair
    sockets = usual.rows(
        """SELECT count(*) FROM events
           WHERE pid = ? AND op = 'alloc' AND kind = 'slab' AND list_contains(kernel_functions, 'sk_prot_alloc')""",
        pid,
    )
    assert sockets == [(2 * PAIRS * (1 + CHURN),)]
    # then the other took or refused as many events, but for what interrupts skipped in one and not in the other
    assert small.facts["events_produced"] == pytest.approx(usual.facts["events_produced"], rel=0.01)

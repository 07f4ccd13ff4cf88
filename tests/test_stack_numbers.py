"""Numbers of stacks: what stands for them, for how long, and that nothing fills up however many processes come."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from recording import Recording, record, sample, shell

from benchmarks.workloads import STORMS_DIRECTORY, build_storms
from leakscope.record import records
from leakscope.record.symbols import stack_numbers
from leakscope.record.symbols.address_space import AddressSpaces
from leakscope.record.symbols.interner import Interner
from leakscope.record.symbols.numbers import GENERATION, UNKNOWN, Numbers
from leakscope.record.symbols.stack_numbers import StackNumbers


def numbers_of(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_live_stays_known_and_the_rest_is_forgotten(seed: int) -> None:
    # given objects that name numbers of five generations; some outlive them, others are freed in time
    rng, kept, model = random.Random(seed), Numbers(), dict[int, int]()
    live: dict[int, int] = {}
    for generation in range(5):
        now = 100 * (generation + 1)
        new = [generation * GENERATION + at for at in rng.sample(range(GENERATION), 200)]
        for number in new:
            model[number] = rng.randrange(1, 50)
            kept.put(number, model[number], now)
        allocated = [rng.choice(new) for _ in range(500)]
        kept.count(np.array(allocated), np.ones(500, np.int64))
        for number in allocated:
            live[number] = live.get(number, 0) + 1
        freed = [number for number in live for _ in range(live[number]) if rng.random() < 0.6]
        kept.count(np.array(freed), np.full(len(freed), -1))
        for number in freed:
            live[number] -= 1
        # when all that was closed before this one is forgotten
        kept.forget(now)
        current = {number for number in model if number // GENERATION >= generation - 1}
        wanted = sorted(current | {number for number, objects in live.items() if objects})
        # then every number that a free or an allocation may name has its id
        assert kept.ids(np.array(wanted)).tolist() == [model[number] for number in wanted]
        gone = sorted(n for n in model if n // GENERATION < generation - 1 and not live.get(n))
        assert set(kept.ids(np.array(gone, np.int64)).tolist()) <= {UNKNOWN}
        assert len(kept) <= 2 * GENERATION + sum(objects > 0 for objects in live.values())
    assert gone


def test_an_id_may_be_replaced_until_it_is_forgotten() -> None:
    kept = Numbers()
    kept.put(5, 50, 1)
    kept.replace(5, 51)
    kept.replace(GENERATION + 1, 9)  # of no generation that is known
    assert kept.ids(numbers_of(5, GENERATION + 1)).tolist() == [51, UNKNOWN]
    kept.count(numbers_of(5), numbers_of(1))
    kept.put(GENERATION, 60, 10)
    assert (kept.forget(10), kept.forget(11), kept.forget(11)) == ([], [0], [])
    kept.replace(5, 52)
    assert kept.ids(numbers_of(5, 6, GENERATION)).tolist() == [51, UNKNOWN, 60]
    kept.count(numbers_of(5, 6), numbers_of(-1, -1))
    kept.put(2 * GENERATION, 70, 20)
    assert kept.forget(30) == [1]
    assert kept.ids(numbers_of(5, GENERATION, 2 * GENERATION)).tolist() == [UNKNOWN, UNKNOWN, 70]


def sent(number: int, kind: int, *addresses: int, caller: int = 0, pid: int = 7) -> bytes:
    header = records.STACK_HEADER.pack(5, caller, number, pid, kind, len(addresses))
    return header + np.array(addresses, np.uint64).tobytes()


@pytest.fixture
def known() -> tuple[StackNumbers, Interner]:
    python = {3: [("f", "m.py", 4, False)], 4: [("g", "m.py", 5, False)]}
    kernel: Any = SimpleNamespace(lookup=lambda address: (f"k{address + 1}", "", 0))
    spaces = AddressSpaces()
    interner = Interner(kernel, spaces, lambda number: python.pop(number, None))
    return StackNumbers(interner, spaces), interner


def test_stacks_by_number(known: tuple[StackNumbers, Interner]) -> None:
    numbers, interner = known
    numbers.take([sent(1, records.STACK_KERNEL, 10, 20), sent(2, records.STACK_USER, 30, 40)])
    dump = records.STACK_DUMP_BIT | 77
    stacks = numbers.stacks(np.array([1, 2, -1, -14, 9, 9, dump, 1], np.int32))
    assert interner.functions(stacks[0]) == ["k20", "k10"]
    assert [frame[4] for frame in interner.frames(stacks[1])] == [40, 30]  # no file is mapped there: addresses
    assert stacks[2:].tolist() == [0, 0, 0, 0, 0, stacks[0]]
    # a number whose stack never came is counted once
    assert [(loss.what, loss.count) for loss in numbers.losses()] == [("stack_miss", 1)]
    # a dump stands for its own stack, or for the walk beside it
    numbers.unwound[77] = (0, 2)
    numbers.unwound[78] = (12345, -1)
    assert numbers.stacks(np.array([dump, dump + 1], np.int32)).tolist() == [stacks[1], 12345]
    numbers.equate(2, 54321)
    assert numbers.stacks(np.array([2, dump], np.int32)).tolist() == [54321, stacks[1]]
    # for as long as it may be asked for, also when the walk's number is forgotten
    numbers.take([sent(GENERATION, records.STACK_KERNEL, 5)])
    numbers.forget(1 << 62)
    assert numbers.stacks(np.array([2, dump], np.int32)).tolist() == [0, stacks[1]]


def test_walks_beside_a_dump_keep_their_addresses(known: tuple[StackNumbers, Interner]) -> None:
    numbers, _ = known
    numbers.take([sent(1, records.STACK_USER, 30, 40), sent(2, records.STACK_BESIDE_DUMP, 30, 40)])
    assert [list(numbers.walked(number)) for number in (1, 2, 3, -1)] == [[], [30, 40], [], []]


def test_python_stacks_by_number(known: tuple[StackNumbers, Interner]) -> None:
    numbers, interner = known
    stacks = numbers.python_stacks(np.array([0, 3, 4, 3, 8], np.uint32))
    assert [interner.functions(stack) for stack in stacks.tolist()] == [[], ["f"], ["g"], ["f"], []]
    assert numbers.python_stacks(np.array([3, 4], np.uint32)).tolist() == stacks[1:3].tolist()  # named once


def test_frees_long_after_find_the_stacks_of_their_allocations(
    known: tuple[StackNumbers, Interner], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, _ = known
    monkeypatch.setattr(stack_numbers, "monotonic_ns", lambda: 1000)
    numbers.take([sent(number, records.STACK_KERNEL, 10 * number) for number in range(1, 7)])
    numbers.python_stacks(np.array([3, 4], np.uint32))
    batch = np.zeros(4, records.MEM_RECORD)
    batch["kernel_stack"], batch["user_stack"], batch["python_stack"] = (1, 1, 2, 3), (4, 4, 5, -1), (3, 0, 4, 0)
    before = [numbers.stacks(batch[name]).tolist() for name in ("kernel_stack", "user_stack")]
    numbers.count(batch)
    calls = np.zeros(1, records.CALL_RECORD)
    calls["user_stack"] = 6
    numbers.count_calls(calls, 1)
    six = numbers.stacks(calls["user_stack"]).tolist()
    # when the third object is freed, and then a generation of stacks comes
    freed = batch[2:3].copy()
    freed["op"] = records.OP_FREE
    numbers.count(freed)
    numbers.take([sent(GENERATION, records.STACK_KERNEL, 5)])
    numbers.forget(1001)
    # then what still lives has its stacks, and that of the freed one is gone
    assert len(numbers) == GENERATION + GENERATION + 4  # that of today, Python's only one, and 1, 3, 4, 6
    after = [numbers.stacks(batch[name]).tolist() for name in ("kernel_stack", "user_stack")]
    assert [stacks[:2] for stacks in after] == [stacks[:2] for stacks in before]
    assert numbers.stacks(calls["user_stack"]).tolist() == six
    assert (after[0][3], after[0][2], after[1][2]) == (before[0][3], 0, 0)


# --- recorded ----------------------------------------------------------------------------------------------

SHORT_LIVES, SOCKETS = 800, 403


@pytest.fixture(scope="module")
def after_many_processes(bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A leaker that runs after many short processes, each with addresses of its own."""
    build_storms()
    path = tmp_path_factory.mktemp("numbers") / "many.lscope"
    command = shell(
        [str(STORMS_DIRECTORY / "bin" / "spawn"), str(SHORT_LIVES)],
        sample("leak_socketpair", "--count", SOCKETS, "--churn", 1, "--pause-us", 200),
    )
    return record(path, command, "--stacks", "all")


@pytest.mark.bpf
def test_stacks_of_processes_that_ended_take_no_room_from_others(after_many_processes: Recording) -> None:
    recording = after_many_processes
    (walks,) = recording.rows("SELECT count(DISTINCT (pid, user_stack)) FROM events WHERE user_stack > 0")
    assert walks[0] > 15 * SHORT_LIVES
    assert recording.losses("stack_miss") == 0
    # every allocation of the leak has its kernel and user stack
    leaker = recording.reports["leak_socketpair"]["pid"]
    made = recording.rows(
        """SELECT list_contains(functions, 'open_session_and_forget'), count(*) FROM events
           WHERE pid = ? AND op = 'alloc' AND slab_cache LIKE 'sock_inode%' AND len(kernel_functions) > 3
           GROUP BY 1 ORDER BY 1""",
        leaker,
    )
    assert made == [(False, 2 * SOCKETS), (True, 2 * SOCKETS)]


@pytest.mark.bpf
def test_short_processes_leave_the_stacks_to_those_that_stay(bpf: None, tmp_path: Path) -> None:
    # given a leak of some 100 socket pairs a second for two seconds, beside some thousand short processes
    build_storms()
    storm, leak = (
        STORMS_DIRECTORY / "bin" / "spawn",
        sample("leak_socketpair", "--count", 200, "--churn", 1, "--pause-us", 10_000),
    )
    recording = record(tmp_path / "x.lscope", ["/bin/sh", "-c", f"{storm} 100000 & {' '.join(leak)}; kill $!"])
    leaker = recording.reports["leak_socketpair"]["pid"]
    # when it is no longer in its first tenth of a second
    own = recording.rows(
        """SELECT weight, count(*) FROM events WHERE pid = ? AND op = 'alloc' AND slab_cache LIKE 'sock_inode%'
           AND ts_ns > (SELECT start_ns + 200_000_000 FROM processes WHERE pid = ?) GROUP BY 1""",
        leaker, leaker,
    )  # fmt: skip
    # then each of its allocations has its own stacks, and few of those of the short processes have
    assert [weight for weight, _ in own] == [1] and own[0][1] > 300
    (short,) = recording.rows(
        """SELECT count(DISTINCT pid), count(*), count(*) FILTER (weight = 1) FROM events JOIN processes p USING (pid)
           WHERE layer = 'kernel' AND op = 'alloc' AND p.exit_ns > 0 AND p.exit_ns - p.start_ns < 50_000_000"""
    )
    assert short[0] > 500 and short[2] < short[1] / 8

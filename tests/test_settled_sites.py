"""Busy sites whose frees keep up with their allocations take fewer stacks; slow sites and growing ones keep theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from recording import Recorder, Recording, waiting

from leakscope.record.records import MEM_RECORD, OP_ALLOC, OP_FREE
from leakscope.record.settled_sites import (
    BUSY_PER_WINDOW,
    BUSY_WINDOWS,
    GROWTH_SHARE,
    GROWTH_SLACK,
    HISTORY,
    RECENT,
    WINDOW_NS,
    SettledSites,
)

BUSY = BUSY_PER_WINDOW


class PaperMap:
    """What the probes would read: 1 by site number less one."""

    entries = 8

    def __init__(self) -> None:
        self.values: dict[int, int] = {}

    def update(self, key: bytes, value: bytes) -> None:
        self.values[int.from_bytes(key, "little")] = int.from_bytes(value, "little")


def batch(counts: dict[int, tuple[int, int]]) -> np.ndarray:
    """Records of (allocations, frees) by site."""
    sites, ops = [], []
    for site, (allocated, freed) in counts.items():
        sites += [site] * (allocated + freed)
        ops += [OP_ALLOC] * allocated + [OP_FREE] * freed
    records = np.zeros(len(sites), MEM_RECORD)
    records["site"], records["op"] = sites, ops
    return records


def windows(counts: list[dict[int, tuple[int, int]]]) -> list[dict[int, int]]:
    """What the probes are told after each window with these counts."""
    told = PaperMap()
    settled = SettledSites(told)  # type: ignore[arg-type]  # has what is used of a Map
    settled.follow(batch({}), 1)
    states = []
    for number, of_window in enumerate(counts, 1):
        settled.follow(batch(of_window), 1 + number * WINDOW_NS)
        states.append(dict(told.values))
    return states


def test_a_site_settles_once_it_was_busy_and_balanced_in_every_window() -> None:
    busy = {1: (BUSY, BUSY), 2: (BUSY - 1, BUSY - 1), 8: (3 * BUSY, 3 * BUSY)}
    states = windows([busy] * (BUSY_WINDOWS + 1))
    assert states == [{}] * (BUSY_WINDOWS - 1) + [{0: 1, 7: 1}] * 2


def test_what_is_gained_and_kept_for_two_windows_is_growth_beyond_a_share_of_the_allocations() -> None:
    assert BUSY_WINDOWS * BUSY // GROWTH_SHARE < GROWTH_SLACK
    fast = GROWTH_SHARE * GROWTH_SLACK  # a window; so the share counts
    share = BUSY_WINDOWS * fast // GROWTH_SHARE
    even = {1: (BUSY, BUSY), 2: (BUSY, BUSY), 3: (fast, fast), 4: (fast, fast), 5: (BUSY, BUSY)}
    gaining = {
        1: (BUSY, BUSY - GROWTH_SLACK), 2: (BUSY, BUSY - GROWTH_SLACK - 1),
        3: (fast, fast - share), 4: (fast, fast - share - 1), 5: (BUSY, 0),
    }  # fmt: skip
    freed_again = even | {5: (BUSY, 2 * BUSY)}
    assert windows([even, even, gaining, freed_again])[-1] == {0: 1, 2: 1, 4: 1}


def test_growth_ends_it_until_all_that_is_remembered_came_after() -> None:
    even, grown = {1: (BUSY, BUSY)}, {1: (2 * BUSY, BUSY)}
    states = [state.get(0) for state in windows([even] * BUSY_WINDOWS + [grown] + [even] * HISTORY)]
    assert states == [None] * (BUSY_WINDOWS - 1) + [1] * RECENT + [0] * (HISTORY - RECENT) + [1] * RECENT


def test_a_slow_steady_leak_is_growth() -> None:
    # given one object in 300 that stays, and one in 1,200
    leaking = {1: (1200, 1196), 2: (1200, 1199)}
    assert windows([leaking] * HISTORY)[-1] == {0: 0, 1: 1}


def test_objects_of_before_that_end_are_no_growth() -> None:
    assert windows([{1: (BUSY, 2 * BUSY)}] * BUSY_WINDOWS)[-1] == {0: 1}


QUICK = """
import leakscope.record.settled_sites as settled
from leakscope.cli.main import main
settled.WINDOW_NS, settled.BUSY_PER_WINDOW = {window_ns}, 100
main()
"""


@pytest.mark.bpf
def test_probes_take_fewer_stacks_of_a_settled_site_alone(
    bpf: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given two recorders of the same programs, whose windows are 50 ms and never
    with (
        waiting("leak_eventfd", "--count", 1, "--churn", 300_000, "--pause-us", 0) as churning,
        waiting("leak_socketpair", "--count", 2001, "--churn", 9, "--pause-us", 200) as leaking,
    ):
        recorders = []
        for name, window_ns in (("quick", 50_000_000), ("never", 1 << 60)):
            code = QUICK.format(window_ns=window_ns)
            monkeypatch.setattr("recording.LEAKSCOPE", [sys.executable, "-c", code])
            options = ("-p", churning.pid, "-p", leaking.pid, "--flush", 0.05)
            recorders.append(Recorder(tmp_path / f"{name}.lscope", *options))
        for recorder in recorders:
            recorder.wait_ready()
        churning.go()
        leaking.go()
        quick, never = (recorder.stop() for recorder in recorders)
    # then both saw every object, and one took far fewer stacks where nothing was kept, and as many where one in ten was
    assert (quick.code, never.code) == (0, 0), quick.stderr + never.stderr
    (settled, of_churn), (growing, of_leak) = (stacks_taken(quick, pid) for pid in (churning.pid, leaking.pid))
    (unsettled, all_churn), (also_growing, all_leak) = (stacks_taken(never, pid) for pid in (churning.pid, leaking.pid))
    assert (of_churn, of_leak) == (all_churn, all_leak) == (300_001, 40_020)
    assert settled < unsettled / 2 and growing > also_growing / 2


def stacks_taken(recording: Recording, pid: int) -> tuple[int, int]:
    """(stacks taken that stand for one object alone, objects) of what only this program allocates."""
    cache = "slab_cache IN ('kmalloc-64', 'sock_inode_cache')"
    return recording.rows(
        f"""SELECT count(*) FILTER (weight = 1), count(*) FROM events
            WHERE op = 'alloc' AND pid = ? AND {cache} AND size_bytes > 0
              AND (slab_cache <> 'kmalloc-64' OR requested_bytes = 48)""",
        pid,
    )[0]

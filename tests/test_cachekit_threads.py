"""The cache kit with many threads at once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cachekit_tools import Value, cache_of, events_of

from leakscope.cachekit import Cache, CacheFullError, EventLog, StrongHandle, Sweeper


def test_upgrade_is_one_step() -> None:
    """Whoever would evict between an upgrade's look and its reference waits until the upgrade is done."""
    cache, _ = cache_of()
    cache["a"] = Value()
    weak = cache.weak("a")
    about_to = threading.Event()

    def invalidate() -> None:
        about_to.set()
        cache.invalidate(None)

    other = threading.Thread(target=invalidate)

    def timer() -> float:  # called by the upgrade, inside the step
        if not other.ident:
            other.start()
            about_to.wait()
            other.join(0.05)
            assert other.is_alive()
        return 100.0

    cache.timer = timer
    handle = weak.upgrade()
    other.join()

    assert handle is not None and isinstance(handle.value, Value)
    assert (weak.upgrade(), len(cache), cache.currsize) == (None, 0, 1)
    handle.release()
    assert cache.currsize == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_many_threads_leave_exact_counts(tmp_path: Path, seed: int) -> None:
    threads, rounds, maxsize = 8, 1_500, 200
    log = EventLog(tmp_path / "e.jsonl")
    cache: Cache[int, tuple[int, int]] = Cache(maxsize, ttl=0.02, getsizeof=lambda value: value[1], events=log)
    totals: Counter[str] = Counter()
    wrong: list[str] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        mine, own = random.Random(seed * 100 + number), Counter[str]()
        held: list[tuple[StrongHandle[int, tuple[int, int]], int]] = []
        weak: list[Any] = []
        for _ in range(rounds):
            key = mine.randrange(60)
            match mine.randrange(10):
                case 0 | 1 | 2:
                    try:
                        cache[key] = (key, 1 + key % 7)
                        own["put"] += 1
                    except CacheFullError:
                        own["full"] += 1
                case 3 | 4:
                    own["lookup"] += 1
                    value = cache.get(key)
                    if value is not None and value != (key, 1 + key % 7):
                        wrong.append(f"{key}: {value}")
                case 5:
                    own["lookup"] += 1
                    try:
                        held.append((cache.strong(key, owner=str(number)), key))
                    except KeyError:
                        own["absent"] += 1
                case 6 if weak:
                    own["lookup"] += 1
                    handle = weak.pop(mine.randrange(len(weak))).upgrade(str(number))
                    if handle is not None:
                        held.append((handle, handle.key))
                case 7 if held:
                    handle, key = held.pop(mine.randrange(len(held)))
                    if handle.value != (key, 1 + key % 7):
                        wrong.append(f"held {key}: {handle.value}")
                    weak.append(handle.weak())
                    handle.release()
                case 8 if key == 0:
                    cache.invalidate(None)
                case 9 if key < 5 and held:
                    held.pop()  # dropped
                    own["dropped"] += 1
                case _:
                    if cache.currsize > maxsize:
                        wrong.append("too full")
        for handle, _ in held:
            handle.release()
        with lock:
            totals.update(own)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    with Sweeper(cache, period_s=0.005):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    cache.invalidate(None)
    cache.sweep()
    stats = cache.stats()
    assert wrong == []
    assert stats.hits + stats.misses == totals["lookup"]
    assert (stats.inserts, stats.insert_fails) == (totals["put"], totals["full"])
    assert stats.dropped_handles == totals["dropped"] > 0
    assert sum(stats.evictions.values()) == stats.inserts
    assert (cache.currsize, stats.held_entries, cache.held()) == (0, 0, [])
    log.close()
    ops = Counter(event["op"] for event in events_of(log.path))
    assert ops["insert"] == ops["evict"] == stats.inserts and ops["ref"] == ops["unref"]
    assert log.lost == 0 and log.written == sum(ops.values())


def test_of_many_setdefaults_one_wins() -> None:
    cache, _ = cache_of(100)
    barrier = threading.Barrier(8)
    got: list[tuple[int, object]] = []

    def race(number: int) -> None:
        for key in range(50):
            barrier.wait()
            got.append((key, cache.setdefault(key, number)))

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(got) == 400 and all(value == cache[key] for key, value in got)
    assert cache.stats().inserts == 50

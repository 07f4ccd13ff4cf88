"""What the cache kit says of itself: events, stacks of dropped handles, the sweeper's reports."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from cachekit_tools import cache_of, events_of

from leakscope.cachekit import Cache, EventLog, Fingerprint, StrongHandle, Sweeper
from nsight_parsers.cache_log import parse_cache_log


def leaky_lookup(cache: Cache[Any, Any]) -> None:
    cache.strong("a", owner="lookup")


@pytest.mark.parametrize("release", [True, False])
def test_a_dropped_handle_is_reported_with_the_stack_that_made_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, release: bool
) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        cache, _ = cache_of(events=log, release_dropped=release)
        cache["a"] = 1
        for _ in range(3):
            leaky_lookup(cache)
        with caplog.at_level(logging.WARNING, "leakscope.cachekit"):
            cache.sweep()
            cache.sweep()

    assert (cache.stats().dropped_handles, cache.stats().held_entries) == (3, 0 if release else 1)
    (message,) = caplog.messages  # one place, once
    assert message.startswith("cache: lookup dropped 3 handles without release up to now, made in ")
    assert f"leaky_lookup ({__file__}:" in message.rsplit(";", 1)[-1]
    held = cache.held()
    assert len(held) == (0 if release else 3)
    findings = parse_cache_log(tmp_path / "events.jsonl").findings
    if release:
        (said,) = findings
        assert said.startswith(
            f"3 handles were dropped without release, most by lookup made in leaky_lookup ({__file__}:"
        )
    else:
        assert findings == [] and "leaky_lookup" in held[0].stack


def test_stacks_leave_the_kit_out_and_keep_the_innermost_frames() -> None:
    cache, _ = cache_of(stack_depth=2)
    cache["a"] = 1

    def taker() -> StrongHandle[Any, Any]:
        handle = cache.weak("a").upgrade("me")
        assert handle is not None
        return handle

    with taker():
        (held,) = cache.held()
    frames = held.stack.split(";")
    assert [frame.split(" ")[0].rsplit(".", 1)[-1] for frame in frames] == [
        "test_stacks_leave_the_kit_out_and_keep_the_innermost_frames", "taker",
    ]  # fmt: skip


def test_events_tell_the_life_of_an_entry_and_no_key(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e.jsonl", clock_ns=lambda: 5_000) as log:
        cache, clock = cache_of(100, events=log, getsizeof=len, name="kv", fingerprint=Fingerprint("m", "1"))
        cache.put("a secret prompt", b"12345678", owner="prefill", ttl=2.5)
        with cache.strong("a secret prompt", owner="decode"):
            clock.now += 0.5
            assert cache["a secret prompt"]  # a hit soon after another: no event
            clock.now += 1
            assert cache["a secret prompt"]
        cache["b"] = b"1"
        cache.invalidate(Fingerprint("m", "1"))
        with pytest.raises(ValueError, match="too large"):
            cache["c"] = bytes(101)
        cache.sweep()

    generation = f"kv/{Fingerprint('m', '1').namespace}#1"
    first = {"obj": "kv/1", "size": 8}
    second = {"obj": "kv/3", "size": 1, "owner": "kv"}
    none = {"obj": "", "owner": "kv"}
    hold = {"owner": "decode", "hold": 2}
    expected = [
        {"op": "insert", **first, "owner": "prefill", "ttl_ns": 2_500_000_000, "generation": generation},
        {"op": "ref", **first, **hold, "refcount": 1},
        {"op": "access", **first, "owner": "prefill"},
        {"op": "unref", **first, **hold, "refcount": 0, "cause": "released"},
        {"op": "insert", **second, "ttl_ns": 60_000_000_000, "generation": generation},
        {"op": "invalidate", **none, "size": 0, "generation": generation},
        {"op": "insert_fail", **none, "size": 101},
        {"op": "evict", **second, "cause": "generation"},
        {"op": "evict", **first, "owner": "prefill", "cause": "generation"},
    ]
    events = events_of(tmp_path / "e.jsonl")
    stacks = [event.pop("stack") for event in events if "stack" in event]
    assert events == [{"ts_ns": 5_000 + number} | event for number, event in enumerate(expected)]
    (stack,) = stacks
    assert stack.rsplit(";", 1)[-1].startswith("test_events_tell_the_life_of_an_entry_and_no_key (")
    report = parse_cache_log(tmp_path / "e.jsonl")
    assert report.tables["cache_events"].num_rows == len(events) and report.findings == []


def test_a_label_names_entries() -> None:
    cache, _ = cache_of(label=lambda key: f"block-{key}")
    cache[12] = 1
    assert next(iter(cache._store.resident.values())).label == "cache/block-12#1"


def test_a_full_disk_costs_events_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e.jsonl"
    log = EventLog(path)
    real, left = os.write, [1_000_000]

    def write(file: int, data: bytes) -> int:
        if file != log._file:
            return real(file, data)
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        done = real(file, data[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr(os, "write", write)
    for number in range(10):
        log.emit("insert", f"o/{number}", 1)
    log.flush()
    left[0] = 130  # one line and a part of the next
    for number in range(10, 20):
        log.emit("insert", f"o/{number}", 1)
    log.flush()
    left[0] = 1_000_000
    log.emit("insert", "o/20", 1)
    log.close()
    log.emit("insert", "o/21", 1)
    log.flush()

    assert (log.written, log.lost) == (12, 10)
    report = parse_cache_log(path)
    rows = report.tables["cache_events"].to_pylist()
    assert [row["object"] for row in rows] == [*(f"o/{n}" for n in range(11)), "", "o/20"]
    assert rows[11]["op"] == "gap"
    assert "9 events were lost where they were written" in report.findings
    assert any("1 lines are no cache events" in finding for finding in report.findings)


def test_a_sweeper_frees_what_nobody_asks_for(tmp_path: Path) -> None:
    swept = threading.Semaphore(0)
    with EventLog(tmp_path / "e.jsonl") as log:
        cache, clock = cache_of(events=log)
        cache["a"] = 1
        clock.now += 61
        with Sweeper(cache, period_s=0.01, also=swept.release) as sweeper:
            swept.acquire()
        assert cache._store.size == 0 and sweeper.sweeps > 0
        assert [event["op"] for event in events_of(log.path)] == ["insert", "evict"]  # flushed


def test_a_sweeper_survives_a_failing_cache(caplog: pytest.LogCaptureFixture) -> None:
    bad, _ = cache_of(name="bad")
    good, clock = cache_of(name="good")
    bad.timer = lambda: 1 / 0
    good["a"] = 1
    clock.now += 61
    swept = threading.Semaphore(0)
    with Sweeper(bad, good, period_s=0.01, also=swept.release):
        swept.acquire()
        assert good._store.size == 0
    assert "bad: the sweep failed" in caplog.text


def test_a_sweeper_keeps_no_cache_alive_and_ends_with_the_last() -> None:
    cache, _ = cache_of()
    swept = threading.Semaphore(0)
    sweeper = Sweeper(cache, period_s=0.01, also=swept.release).start()
    swept.acquire()
    del cache
    sweeper._thread.join(30)
    assert not sweeper._thread.is_alive()

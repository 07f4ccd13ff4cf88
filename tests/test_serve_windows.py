"""What `leakscope serve` remembers of live sources: counters, histograms, levels over minutes, verdicts over days."""

from __future__ import annotations

import numpy as np
import pytest
from serving import values

from leakscope.serve.cache_book import CacheBook
from leakscope.serve.verdicts import LiveVerdict
from leakscope.serve.windows import Counters, Latencies, Levels

MIB = 1 << 20


def test_windows_take_what_rose_and_begin_anew_after_a_restart() -> None:
    counters = Counters()
    for at, hits in ((0, 100), (10, 150), (20, 400)):
        counters.add(at, {"hits": hits})
    assert counters.increase("hits") == 300
    counters.add(30, {"hits": 7})  # the server began anew
    assert counters.increase("hits") == 0
    counters.add(40, {"hits": 9})
    assert counters.increase("hits") == 2
    # of more than five minutes only the last five count
    for at in range(50, 700, 10):
        counters.add(at, {"hits": 9 + at})
    assert counters.increase("hits") == 300


def test_p99_of_slots_trembles_as_planted() -> None:
    bounds = np.array([0.001, 0.002, 0.004, np.inf])
    latencies, total = Latencies(bounds), np.zeros(4)
    latencies.add(0.0, total)
    # given slots of 200 requests, all in the second bucket, and every other one in the third: P99 1.99 and 3.98 ms
    for slot in range(1, 31):
        total = total + np.array([0.0, 200.0, 0.0, 0.0] if slot % 2 else [0.0, 0.0, 200.0, 0.0])
        latencies.add(10.0 * slot, total)
        latencies.add(10.0 * slot + 1, total + 1)  # too soon: not a slot of its own
    jitter = latencies.jitter()
    assert jitter is not None
    assert jitter.slots == 30
    assert jitter.ratio == pytest.approx((3.98 - 1.99) / 2 / ((3.98 + 1.99) / 2))
    assert latencies.latest_p99() == pytest.approx(0.00398)
    assert latencies.p95() == pytest.approx(0.0038)
    # after a restart nothing is known
    latencies.add(400.0, np.array([1.0, 0.0, 0.0, 0.0]))
    assert (latencies.jitter(), latencies.p95(), latencies.latest_p99()) == (None, None, None)


def test_hidden_memory_over_two_minutes_and_over_an_hour() -> None:
    book = CacheBook("c", 10.0)
    # given RSS that grows by 2 MiB in ten seconds, of which used memory explains one
    for at in range(0, 1300, 10):
        used = 100 * MIB + at / 10 * MIB
        found, metrics = book.memory(float(at), 200 * MIB + at / 5 * MIB, used, restarted=False)
        assert found["hidden_growth_ratio"] == (None if at < 110 else 1.0)
        assert (found["hidden_growth"] is None) == (at < 600)
    served = values(metrics)
    assert served["leakscope_cache_hidden_bytes"][()] == 100 * MIB + 129 * MIB
    assert served["leakscope_cache_hidden_growth_bytes_per_second"][()] == pytest.approx(MIB / 10)
    assert served["leakscope_cache_hidden_growth_low_bytes_per_second"][()] == pytest.approx(MIB / 10)
    # after a restart all of it is unknown again
    found, _ = book.memory(1300.0, 10 * MIB, 5 * MIB, restarted=True)
    assert set(found.values()) == {None}
    # and a reading of ten minutes ago is none of two minutes ago
    levels = Levels(3600.0, 10.0)
    levels.add(0.0, 1.0, 1.0)
    levels.add(600.0, 2.0, 2.0)
    assert levels.since(120.0) is None


def test_a_verdict_on_a_live_service_comes_when_it_is_beyond_chance() -> None:
    generator = np.random.default_rng(11)
    told = {}
    for name, rate in (("leaking", 4e6), ("steady", 0.0)):
        live = LiveVerdict(name, 15 * 3600.0, byte_counters=("redis_used_memory", "rss"))
        assert live.verdict.verdict == "inconclusive"
        # given 30 hours, a reading each five minutes, keys without a time to live at 4 MB an hour
        for at in range(0, 30 * 3600 + 1, 300):
            grown = rate * at / 3600
            used = 1.0e9 + grown + generator.normal(0, 1e5)
            counters = {"redis_used_memory": used, "rss": used + 2e8, "redis_keys_nottl": 1000 + grown / 1000}
            metrics = live.told(1e6 + at, counters | {"redis_keys": None})
        told[name] = values(metrics)
    assert told["leaking"]["leakscope_verdict"]["leak",] == 1
    assert told["leaking"]["leakscope_findings"] == {("leak", "keys_without_ttl", "host"): 1.0}
    growth = told["leaking"]["leakscope_growth_bytes_per_second"]
    assert next(iter(growth.values())) == pytest.approx(4e6 / 3600, rel=0.05)
    assert told["steady"]["leakscope_verdict"]["leak",] == 0


def test_watches_are_renewed_halfway_and_never_more_than_two() -> None:
    live = LiveVerdict("x", 1e9)
    seen = []
    for hour in range(0, 145, 12):
        live.told(hour * 3600.0, {"rss": 1.0})
        live.told(hour * 3600.0 + 1, {"rss": 2.0})  # too soon to be a reading
        seen.append([round(began / 3600) for began, _ in live._watches])
    assert seen == [
        *([0], [0], [0], [0, 36], [0, 36], [0, 36]),
        *([36, 72], [36, 72], [36, 72], [72, 108], [72, 108], [72, 108], [108, 144]),
    ]

"""The verdict engine for counters: generated series of known truth, and the shapes that fool a straight line."""

from __future__ import annotations

import numpy as np
import pytest

from leakscope.detect.series.counters import Counter
from leakscope.detect.series.floors import daily_wave, floor
from leakscope.detect.series.judge import judge
from leakscope.detect.series.trend import Course, trend
from leakscope.model.results import Verdict
from tests.series import MIB_H, autoregressive, make

GIB = 2.0**30
MIB = 2.0**20


def counters(t: np.ndarray, **values: np.ndarray) -> list[Counter]:
    """Counters by name; a name that ends in ``_bytes`` is in bytes."""
    return [
        Counter(n.removesuffix("_bytes"), t, np.asarray(v, np.float64), n.endswith("_bytes")) for n, v in values.items()
    ]


def verdict_of(t: np.ndarray, **values: np.ndarray) -> Verdict:
    return judge(counters(t, **values)).verdict


def noise(t: np.ndarray, deviation: float, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, deviation, len(t))


def test_generated_series_keep_precision_and_recall() -> None:
    """100 fresh series of 72 h (no seed of them was used to make a rule)."""
    called = hits = leaks = large = large_hits = clean_alarms = 0
    ratios = []
    for seed in range(7000, 7100):
        made = make(seed)
        verdict = judge(made.counters()).verdict
        is_leak = verdict.verdict == "leak"
        called += is_leak
        hits += is_leak and made.rate > 0
        leaks += made.rate > 0
        large += made.rate >= 20 * MIB_H
        large_hits += is_leak and made.rate >= 20 * MIB_H
        clean_alarms += is_leak and made.rate == 0
        if is_leak and made.rate:
            assert verdict.growth is not None
            ratios.append(verdict.growth.bytes_per_s / made.rate)

    assert leaks == 50
    assert hits / called >= 0.95 and clean_alarms <= 2
    assert large_hits / large >= 0.9 and hits / leaks >= 0.85  # 40 and 50 of them: three are two standard deviations
    assert 0.95 <= np.median(ratios) <= 1.05


def test_rate_and_start_of_a_leak_under_start_up() -> None:
    # given 6 GiB that settle in an hour, and 40 MiB/h from the first reading on
    t = np.arange(0, 72 * 3600, 60.0)
    rss = 6 * GIB - GIB * np.exp(-t / 3600) + 40 * MIB_H * t + noise(t, 10 * MIB)

    verdict = verdict_of(t, rss_bytes=rss)

    assert (verdict.verdict, verdict.kind, verdict.leak_start_s) == ("leak", "retained_growth", 0.0)
    assert verdict.growth is not None and verdict.growth.bytes_per_s == pytest.approx(40 * MIB_H, rel=0.02)
    assert verdict.growth.ci_low < verdict.growth.bytes_per_s < verdict.growth.ci_high


def test_a_late_leak_begins_where_it_begins() -> None:
    t = np.arange(0, 20 * 3600, 30.0)
    rss = 2 * GIB + 300 * MIB_H * np.maximum(0, t - 8 * 3600) + noise(t, 5 * MIB)

    verdict = verdict_of(t, rss_bytes=rss)

    assert verdict.verdict == "leak"
    assert verdict.leak_start_s == pytest.approx(8 * 3600, abs=1800)


@pytest.mark.parametrize(
    ("shape", "course"),
    [
        (lambda t: 1 - np.exp(-t / 5000), Course.PLATEAU),  # a cache that fills
        (lambda t: np.minimum(t / 20_000, 1.0), Course.PLATEAU),  # workers that are added
        (lambda t: (t > 15_000).astype(float), Course.PLATEAU),  # one step
        (lambda t: (t / 9000) % 1.0, Course.RETURNED),  # garbage, four times collected
        (lambda t: (t / 1500) % 1.0, Course.RETURNED),  # the same, often
        (lambda t: (t / 500) % 1.0, Course.FLAT),  # too often to tell the drops: the floor is flat
        (lambda t: t / 36_000, Course.RISING),
        (lambda t: np.floor(t / 1200) / 30, Course.RISING),  # a staircase
        (lambda t: np.minimum(t, 12_000) / 36_000 + np.maximum(0, t - 24_000) / 36_000, Course.RISING),  # a pause
    ],
)  # fmt: skip
def test_courses(shape: object, course: Course) -> None:
    t = np.arange(0, 36_000, 20.0)
    level = GIB + 0.5 * GIB * shape(t) + noise(t, 2 * MIB)  # type: ignore[operator]

    assert trend(t, level).course is course


def test_a_ramp_is_found_whatever_its_slope_where_the_z_rule_sees_nothing() -> None:
    """A ramp's last reading has z of at most sqrt(3) in its own window, so |z| > 2.5 never fires."""
    t = np.arange(0, 90 * 60, 30.0)[:180]
    for rate in (1.0, 1e3, 1e6):
        ramp = rate * t
        assert (ramp[-1] - ramp.mean()) / ramp.std() < np.sqrt(3)
        assert trend(t, GIB * 0 + ramp).course is Course.RISING


def test_floor_of_a_saw_tooth_is_its_troughs() -> None:
    t = np.arange(0, 40_000, 20.0)
    tooth = 10 * MIB * ((t / 1000) % 1.0)
    base = floor(t, GIB + tooth)

    assert base.value.max() <= GIB + 0.6 * MIB
    assert len(base.value) >= 20


def test_a_daily_wave_is_taken_out_and_a_ramp_is_not() -> None:
    t = np.arange(0, 72 * 3600, 600.0)
    wave = 100 * np.sin(2 * np.pi * t / 86_400)

    found = daily_wave(t, wave + t / 1000)

    assert found is not None and np.abs(found - wave).max() < 10
    assert daily_wave(t, t / 1000 + noise(t, 5)) is None


def test_restarts_are_lives_of_their_own() -> None:
    t = np.arange(0, 90_000, 60.0)
    start = np.select([t >= 61_000, t >= 30_000], [61_000, 30_000], 0).astype(float)
    rss = 8 * GIB + 120_000 * (t - start) + noise(t, 20 * MIB)

    found = judge([*counters(t, rss_bytes=rss), Counter("proc_start_s", t, start, False)]).verdict
    unmarked = verdict_of(t, rss_bytes=rss)

    assert (found.verdict, found.leak_start_s) == ("leak", 0.0)
    assert found.growth is not None and found.growth.bytes_per_s == pytest.approx(120_000, rel=0.05)
    assert any("3 lives" in reason for reason in found.reasons)
    assert unmarked.verdict == "not_leak"  # without them it is a saw-tooth


def test_growth_that_stops_with_the_work_is_a_leak_and_a_cache_that_is_full_is_not() -> None:
    t = np.arange(0, 20_000, 10.0)
    work = np.minimum(t, 14_000) * 3.0
    rss = GIB + 50_000 * np.minimum(t, 14_000) + noise(t, MIB)

    with_work = verdict_of(t, rss_bytes=rss, request_total=work)
    without = verdict_of(t, rss_bytes=rss, request_total=3.0 * t)

    assert with_work.verdict == "leak" and without.verdict == "not_leak"
    assert with_work.growth is not None and with_work.growth.per_unit is not None
    assert with_work.growth.per_unit[0] == "request_total"
    assert with_work.growth.per_unit[1] == pytest.approx(50_000 / 3, rel=0.05)


RAMP = np.arange(0, 40_000, 20.0)
FLAT = np.full(len(RAMP), GIB) + noise(RAMP, 2 * MIB, 3)
UP = 30_000 * RAMP + noise(RAMP, 2 * MIB, 4)


@pytest.mark.parametrize(
    ("values", "verdict", "kind", "layer", "counter"),
    [
        (
            {"rss_bytes": FLAT, "slab_foo_cache_bytes": UP + 50 * MIB},
            "leak",
            "kernel_object_per_event",
            "kernel",
            "slab_foo_cache_bytes",
        ),
        (
            {"rss_bytes": FLAT, "fd_count": RAMP / 100, "slab_filp_bytes": UP},
            "leak",
            "descriptor_leak",
            "kernel",
            "fd_count",
        ),
        (
            {"rss_bytes": FLAT, "meminfo_unaccounted_bytes": UP + GIB},
            "leak",
            "pages_outside_slab",
            "kernel",
            "meminfo_unaccounted_bytes",
        ),
        (
            {"rss_bytes": FLAT + UP, "heap_inuse_bytes": FLAT / 2, "anon_mmap_bytes": UP},
            "leak",
            "mapping_outside_heap",
            "host",
            "anon_mmap_bytes",
        ),
        (
            {"rss_bytes": FLAT + UP, "heap_inuse_bytes": FLAT / 2 + UP, "anon_mmap_bytes": FLAT / 8},
            "leak",
            "retained_growth",
            "host",
            "heap_inuse_bytes",
        ),
        (
            {"rss_bytes": FLAT + UP, "pinned_allocated_bytes": FLAT / 4, "pinned_driver_bytes": FLAT / 4 + UP},
            "leak",
            "evicted_but_not_released",
            "host",
            "pinned_driver_bytes",
        ),
        (
            {"rss_bytes": FLAT + UP, "client_output_buffer_bytes": UP},
            "leak",
            "unbounded_send_queue",
            "host",
            "client_output_buffer_bytes",
        ),
        (
            {"rss_bytes": FLAT + UP, "db_used_memory_bytes": FLAT / 2 + UP, "db_keys_nottl": RAMP},
            "leak",
            "keys_without_ttl",
            "host",
            "db_keys_nottl",
        ),
        (
            {
                "vss_bytes": 8 * GIB + np.floor(RAMP / 100) * 8 * MIB,
                "rss_bytes": FLAT,
                "threads": 12 + 0 * RAMP,
                "threads_created_total": np.floor(RAMP / 100),
            },
            "leak",
            "unjoined_thread_stacks",
            "host",
            "vss_bytes",
        ),
        (
            {"rss_bytes": FLAT, "gpu_used_bytes": 40 * GIB + UP * 5},
            "inconclusive",
            "missing_allocator_counters",
            "",
            "gpu_used_bytes",
        ),
        (
            {
                "rss_bytes": FLAT,
                "gpu_used_bytes": 40 * GIB + UP * 5,
                "gpu_reserved_bytes": 39 * GIB + UP * 5,
                "gpu_allocated_bytes": 30 * GIB + UP * 5,
            },
            "leak",
            "retained_growth",
            "gpu",
            "gpu_allocated_bytes",
        ),
        (
            {
                "rss_bytes": FLAT,
                "cgroup_bytes": 2 * FLAT + UP,
                "cgroup_anon_bytes": FLAT,
                "cgroup_file_bytes": GIB / 4 + UP,
            },
            "not_leak",
            "page_cache",
            "host",
            "cgroup_file_bytes",
        ),
        (
            {
                "rss_bytes": FLAT,
                "cgroup_bytes": 2 * FLAT + UP,
                "cgroup_anon_bytes": FLAT,
                "cgroup_slab_reclaimable_bytes": UP,
                "slab_dentry_bytes": UP * 0.8,
            },
            "not_leak",
            "reclaimable_slab",
            "kernel",
            "cgroup_slab_reclaimable_bytes",
        ),
        (
            {"rss_bytes": FLAT + UP, "heap_inuse_bytes": FLAT / 2, "malloc_free_retained_bytes": UP},
            "not_leak",
            "fragmentation",
            "host",
            "malloc_free_retained_bytes",
        ),
        (
            {
                "rss_bytes": 9 * GIB + 0 * UP + noise(RAMP, MIB),
                "pss_bytes": 2 * GIB + UP,
                "shared_clean_bytes": 7 * GIB - UP,
            },
            "not_leak",
            "cow_unsharing",
            "host",
            "pss_bytes",
        ),
        (
            {"rss_bytes": FLAT, "vss_bytes": 10 * GIB + 8 * GIB * np.minimum(RAMP / 4000, 1)},
            "not_leak",
            "address_reservation",
            "host",
            "vss_bytes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pairs_of_counters(values: dict[str, np.ndarray], verdict: str, kind: str, layer: str, counter: str) -> None:
    found = verdict_of(RAMP, **values)

    assert (found.verdict, found.kind, found.layer) == (verdict, kind, layer)
    assert found.culprit is not None and found.culprit.counter == counter


def test_short_windows_prove_nothing() -> None:
    t = np.arange(0, 120.0)
    flat = verdict_of(t, rss_bytes=300 * GIB + noise(t, 100 * MIB))
    steep = verdict_of(t, rss_bytes=GIB + 10 * MIB * t)

    for found in (flat, steep):
        assert (found.verdict, found.kind) == ("inconclusive", "window_too_short")
        assert found.missing and found.smallest_provable_bytes_per_s
    assert flat.growth is None or "rss" in flat.growth.counter


def test_junk_changes_nothing() -> None:
    rng = np.random.default_rng(5)
    values = {"rss_bytes": FLAT + UP}
    junk = {
        "build_number": 7 + 0 * RAMP, "frobs_total": RAMP * 2, "mood_ratio": rng.random(len(RAMP)),
        "scratch_bytes": MIB + noise(RAMP, 1e4), "weather": autoregressive(rng, len(RAMP), 0.9, 3.0),
    }  # fmt: skip

    plain, with_junk = verdict_of(RAMP, **values), verdict_of(RAMP, **values, **junk)

    assert (plain.verdict, plain.kind, plain.growth and plain.growth.counter) == (
        with_junk.verdict, with_junk.kind, with_junk.growth and with_junk.growth.counter,
    )  # fmt: skip


def test_the_same_counters_give_the_same_verdict() -> None:
    made = make(42)

    assert judge(made.counters()).verdict.to_json() == judge(made.counters()).verdict.to_json()

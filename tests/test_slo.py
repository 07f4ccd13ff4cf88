"""Objectives of caches: exact values of each, what makes them unknown, and one state for every value."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakscope.detect.slo.hidden import hidden_growth, hidden_growth_ratio
from leakscope.detect.slo.hits import bound_of_events, hit_ratio, relative_hit_ratio
from leakscope.detect.slo.latency import latency_p95, p99_jitter, percentile
from leakscope.detect.slo.states import (
    HIDDEN_GROWTH,
    HIT_RATIO,
    LATENCY_P95,
    LEVELS,
    OBJECTIVES,
    P99_JITTER,
    STALE_RATIO,
    STATES,
    Objective,
)

MIB = 1 << 20
VALUES = st.floats(allow_nan=False, allow_infinity=True, width=64)


@given(objective=st.sampled_from(OBJECTIVES), value=VALUES, before=st.sampled_from(LEVELS))
def test_every_value_has_exactly_one_state(objective: Objective, value: float, before: str) -> None:
    # given any number: without a past it lies in exactly one of three ranges that share their bounds
    beyond = [value >= b if objective.low_is_good else value < b for b in (objective.suspected, objective.critical)]
    ranges = [not beyond[0], beyond[0] and not beyond[1], beyond[1]]
    assert sum(ranges) == 1
    assert objective.state(value) == LEVELS[ranges.index(True)]
    # and with one, it is never better than that, never worse than both, and stays where it is when nothing changes
    state = objective.state(value, before)
    levels = LEVELS.index(objective.state(value)), LEVELS.index(before)
    assert levels[0] <= LEVELS.index(state) <= max(levels)
    assert objective.state(value, state) == state


@given(objective=st.sampled_from(OBJECTIVES), one=VALUES, other=VALUES, before=st.sampled_from(LEVELS))
def test_a_worse_value_has_no_better_state(objective: Objective, one: float, other: float, before: str) -> None:
    better, worse = sorted((one, other), reverse=not objective.low_is_good)
    assert LEVELS.index(objective.state(better, before)) <= LEVELS.index(objective.state(worse, before))


@pytest.mark.parametrize(
    ("objective", "value", "state", "met"),
    [
        (P99_JITTER, 0.2499, "normal", True),
        (P99_JITTER, 0.25, "suspected", True),
        (P99_JITTER, 0.3, "suspected", True),  # the alarm is above 0.3
        (P99_JITTER, 0.3001, "suspected", False),
        (P99_JITTER, 0.35, "critical", False),
        (HIT_RATIO, 0.75, "normal", True),  # 75 % or more
        (HIT_RATIO, 0.7499, "suspected", False),
        (HIT_RATIO, 0.4999, "critical", False),
        (LATENCY_P95, 0.0079, "normal", True),  # below 8 ms
        (LATENCY_P95, 0.008, "suspected", False),
        (LATENCY_P95, 0.016, "critical", False),
        (LATENCY_P95, math.inf, "critical", False),
        (STALE_RATIO, 0.005, "suspected", False),  # below 0.5 %
        (STALE_RATIO, 0.0, "normal", True),
        (HIDDEN_GROWTH, -0.5, "normal", True),
        (HIT_RATIO, None, "unknown", None),
        (HIT_RATIO, math.nan, "unknown", None),
    ],
)
def test_bounds(objective: Objective, value: float | None, state: str, met: bool | None) -> None:
    assert (objective.state(value), objective.met(value)) == (state, met)
    assert state in STATES


def test_a_state_gets_better_only_past_a_tenth_of_its_bound() -> None:
    state, seen = "normal", []
    for value in (0.24, 0.26, 0.24, 0.2251, 0.2249, 0.36, 0.32, 0.3149, 0.1):
        state = P99_JITTER.state(value, state)
        seen.append(state)
    assert seen == [
        *("normal", "suspected", "suspected", "suspected", "normal"),
        *("critical", "critical", "suspected", "normal"),
    ]
    assert HIT_RATIO.state(0.80, "suspected") == "suspected"
    assert HIT_RATIO.state(0.83, "suspected") == "normal"


def test_jitter_is_deviation_over_mean_and_its_robust_form_ignores_one_outlier() -> None:
    # given ten slots, nine of 10 ms and one of 110 ms: mean 20, deviation sqrt((9·10² + 90²)/10) = 30
    p99 = np.array([0.010] * 9 + [0.110])
    found = p99_jitter(p99, np.full(10, 100.0))
    assert found is not None
    assert found.ratio == pytest.approx(1.5)
    assert found.robust == 0.0
    assert (found.slots, found.left_out) == (10, 0)
    # and of 1…11: median 6, median of the distances 3
    spread = p99_jitter(np.arange(1.0, 12.0), np.full(11, 100.0))
    assert spread is not None
    assert spread.robust == pytest.approx(1.4826 * 3 / 6)
    assert spread.ratio == pytest.approx(math.sqrt(10) / 6)


def test_jitter_is_unknown_without_enough_requests_slots_or_numbers() -> None:
    # one slot of 99 requests does not count, whatever its value
    p99, requests = np.array([1.0] * 10 + [50.0]), np.array([100.0] * 10 + [99.0])
    found = p99_jitter(p99, requests)
    assert found is not None
    assert (found.ratio, found.left_out) == (0.0, 1)
    assert p99_jitter(p99[1:], requests[1:]) is None  # nine slots
    assert p99_jitter(np.zeros(10), np.full(10, 100.0)) is None  # a mean of 0
    assert p99_jitter(np.array([1.0] * 9 + [math.inf]), np.full(10, 100.0)) is None
    assert p99_jitter(np.array([]), np.array([])) is None


def test_percentiles_are_interpolated_within_their_bucket() -> None:
    bounds = np.array([0.001, 0.002, 0.004, math.inf])
    # 50 up to 1 ms, 40 up to 2 ms, 10 up to 4 ms: rank 95 is halfway through the third bucket
    assert percentile(bounds, np.array([50.0, 40.0, 10.0, 0.0]), 0.95) == pytest.approx(0.003)
    assert percentile(bounds, np.array([100.0, 0.0, 0.0, 0.0]), 0.5) == pytest.approx(0.0005)
    assert percentile(bounds, np.array([90.0, 0.0, 0.0, 10.0]), 0.95) == math.inf
    assert percentile(bounds, np.zeros(4), 0.95) is None
    assert latency_p95(bounds, np.array([50.0, 40.0, 9.0, 0.0])) is None  # 99 requests
    assert latency_p95(bounds, np.array([50.0, 40.0, 10.0, 0.0])) == pytest.approx(0.003)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_hypothesis_percentiles_lie_in_the_bucket_of_their_rank(counts: list[int], share: float) -> None:
    bounds = np.arange(1.0, len(counts) + 1)
    found = percentile(bounds, np.array(counts, np.float64), share)
    if not sum(counts):
        assert found is None
        return
    values = np.repeat(bounds, counts)
    exact = values[max(math.ceil(share * len(values) - 1e-9), 1) - 1]
    assert found is not None
    assert exact - 1 - 1e-9 <= found <= exact + 1e-9


def test_the_ratio_of_hidden_growth_is_guarded() -> None:
    # used grew by 10 MiB of 100, RSS by 15: half as much again is hidden
    assert hidden_growth_ratio(15 * MIB, 10 * MIB, 100 * MIB) == 0.5
    assert hidden_growth_ratio(10 * MIB, 10 * MIB, 100 * MIB) == 0.0
    # a tenth of a MiB, or less than 1 % of what is used, is no growth to divide by
    assert hidden_growth_ratio(MIB, MIB // 10, 5 * MIB) is None
    assert hidden_growth_ratio(90 * MIB, 9 * MIB, 1000 * MIB) is None
    assert hidden_growth_ratio(0.0, 0.0, 100 * MIB) is None
    # freed by the cache and kept by the process would read -1, both falling would turn the sign around
    assert hidden_growth_ratio(0.0, -1024 * MIB, 2048 * MIB) is None
    assert hidden_growth_ratio(-20 * MIB, -10 * MIB, 100 * MIB) is None


def test_the_slope_of_hidden_memory_is_exact_on_a_line_and_its_interval_covers_noise() -> None:
    t = np.arange(0.0, 3600.0, 10.0)
    used = 500.0 * MIB + 200 * MIB * np.sin(t / 300)  # what the cache itself does does not matter
    # given 36 MiB an hour on 1 GiB
    rss = used + 524 * MIB + 36 * MIB * t / 3600
    found = hidden_growth(t, rss, used)
    assert found is not None
    assert found.bytes_per_s == pytest.approx(36 * MIB / 3600, rel=1e-9)
    assert found.low == pytest.approx(found.high, rel=1e-6)
    assert found.per_hour == pytest.approx(36 * MIB / np.median(rss), rel=1e-6)
    assert HIDDEN_GROWTH.state(found.per_hour) == "suspected"
    # given noise and no growth, and given one step
    noise = np.random.default_rng(7).normal(0, 3 * MIB, len(t))
    for hidden in (noise, np.where(t > 1800, 30.0 * MIB, 0.0)):
        still = hidden_growth(t, used + 524 * MIB + hidden, used)
        assert still is not None
        assert still.low <= 0 or HIDDEN_GROWTH.state(still.per_hour) == "normal"


def test_the_slope_is_unknown_with_few_readings_or_a_short_time() -> None:
    t = np.arange(0.0, 3600.0, 10.0)
    flat = np.full(len(t), 1e9)
    assert hidden_growth(t[:60], flat[:60], flat[:60]) is None  # 590 s
    assert hidden_growth(t[:61], flat[:61], flat[:61]) is not None
    assert hidden_growth(t[::13][:29], flat[:29], flat[:29]) is None
    assert hidden_growth(t, np.zeros(len(t)), flat) is None


def test_hits_and_what_an_infinite_cache_would_have_hit() -> None:
    assert hit_ratio(60, 100) == 0.6
    assert hit_ratio(60, 99) is None
    # of 100 lookups 60 hit and 20 more asked for what had been evicted: no cache could have hit more than 80
    bound = bound_of_events(60, 100, 20)
    assert bound == 0.8
    assert relative_hit_ratio(0.6, bound) == pytest.approx(0.75)
    assert relative_hit_ratio(0.6, None) is None
    assert relative_hit_ratio(0.6, 0.0) is None
    assert bound_of_events(60, 99, 20) is None
    assert bound_of_events(100, 100, 20) == 1.0

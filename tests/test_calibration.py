"""Calibration: the source document's rule as it stands, and the robust form beside it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.calibration import MIB, ramp_scores, row, series
from leakscope.detect.calibration import Dimension, calibrate, dimensions
from leakscope.detect.calibration.robust import calibrate_once
from leakscope.detect.calibration.z_rule import EPSILON, LIMIT, WINDOW, follow, z_scores
from leakscope.detect.series.counters import Counter

GIB = 1024 * MIB


def times(count: int) -> np.ndarray:
    return np.arange(count) * 30.0


# --- the z-rule


def test_the_rule_is_that_of_the_source_document() -> None:
    assert (WINDOW, LIMIT, EPSILON) == (180, 2.5, 1e-6)
    value = np.random.default_rng(5).normal(100.0, 3.0, 400)
    scores = z_scores(value)
    assert np.isnan(scores[:179]).all() and not np.isnan(scores[179:]).any()
    window = value[121:301]
    assert scores[300] == pytest.approx((value[300] - window.mean()) / (window.std() + 1e-6))


def test_a_window_without_any_movement_divides_by_epsilon() -> None:
    assert z_scores(np.full(180, 7e9))[-1] == 0.0


def test_a_straight_ramp_has_the_same_score_whatever_its_slope() -> None:
    # sqrt(3 (n - 1) / (n + 1)): below 2.5, so that the rule can never fire
    expected = math.sqrt(3 * 179 / 181)
    assert list(ramp_scores().values()) == pytest.approx([expected] * 4, rel=1e-6)
    _, rebaselines, alarms = follow(times(8640), GIB + 200 * MIB * times(8640) / 3600)
    assert (rebaselines, alarms) == ((), 0)


def test_an_alarm_moves_the_baseline_to_the_mean_of_its_window() -> None:
    # given 300 readings of 100 and then of 200: the first of them alone stands out
    value = np.r_[np.full(300, 100.0), np.full(300, 200.0)]
    baseline, rebaselines, alarms = follow(times(600), value)
    # z of the k-th reading after the step in a window of n is sqrt((n - k) / k): above 2.5 for k <= 24
    assert alarms == len(rebaselines) == 24
    assert rebaselines[0].t_s == 300 * 30 and rebaselines[0].bytes == pytest.approx(100 / 180)
    assert baseline[299] == 100 and baseline[-1] == pytest.approx(100 + 100 * 24 / 180)
    assert sum(one.bytes for one in rebaselines) == pytest.approx(100 * 24 / 180)


# --- the robust form


def test_the_offset_is_taken_after_warm_up_and_frozen() -> None:
    # given a difference that settles at 50 MiB after an hour and stays there
    rng = np.random.default_rng(2)
    difference = 50 * MIB - 40 * MIB * np.exp(-times(2000) / 900) + rng.normal(0, MIB / 4, 2000)
    offset = calibrate_once(difference, GIB)
    assert offset.settled and offset.begin * 30 >= 900
    assert offset.bytes == pytest.approx(50 * MIB, abs=MIB)


def test_a_difference_that_never_settles_is_told() -> None:
    offset = calibrate_once(10 * MIB * np.arange(2000.0), GIB)
    assert not offset.settled and offset.begin == 200


def test_a_shift_is_logged_once_with_its_bytes() -> None:
    # given resident memory that runs 30 MiB above its group's, and from hour 6 on 80 MiB
    rng = np.random.default_rng(3)
    t = times(1440)
    reference = 4 * GIB + rng.normal(0, 20 * MIB, 1440)
    value = reference + np.where(t < 6 * 3600, 30, 80) * MIB + rng.normal(0, MIB, 1440)
    result = calibrate(Dimension("rss", t, value, "cgroup_anon", reference))
    (shift,) = result.divergences
    assert shift.bytes == pytest.approx(50 * MIB, rel=0.05) and 6 * 3600 <= shift.t_s <= 6 * 3600 + 300
    assert result.offset_bytes == pytest.approx(30 * MIB, rel=0.05) and result.settled
    # and the deviation falls from the offset to the noise
    assert result.before == pytest.approx(55 / 4096, rel=0.05) and result.after_robust < 0.001
    assert result.to_json()["robust"]["swallowed_bytes"] == round(shift.bytes)


def test_readings_that_stand_still_never_diverge() -> None:
    t, value = series(seed=1, rate_mib_h=0, noise=0.01, phi=0.0)
    assert calibrate(Dimension("rss", t, value)).divergences == ()


# --- dimensions


def test_each_dimension_is_held_against_what_measures_the_same() -> None:
    t, value = times(400), np.full(400, 5.0 * GIB)
    counters = [Counter(name, t, value, True) for name in ("rss", "vss", "gpu_used", "pss", "cgroup_anon")]
    found = {one.name: one.reference_name for one in dimensions(counters)}
    assert found == {"rss": "cgroup_anon", "vss": "rss", "gpu_used": ""}
    # and readings of both sides are paired by their time
    late = Counter("cgroup_anon", t[10:], value[10:], True)
    (rss,) = dimensions([counters[0], late])
    assert rss.t_s.tolist() == t[10:].tolist()


def test_fewer_than_two_windows_are_not_calibrated() -> None:
    assert dimensions([Counter("rss", times(359), np.full(359, 1.0), True)]) == []


# --- what docs/calibration.md shows, in small


def test_the_rule_swallows_a_leak_and_shows_a_small_deviation() -> None:
    one = row(48.6, noise=0.01, phi=0.0, seeds=3)
    # nine tenths of 3.4 GiB are in its baseline, and the table looks healthy
    assert one.swallowed_mib >= 0.9 * one.grown_mib == pytest.approx(0.9 * 48.6 * 72)
    assert one.deviation_z < 0.02 < 0.2 < one.deviation_before
    # while the robust form has logged it and the verdict is a leak
    assert one.first_divergence_h < 6 and one.logged_mib >= 0.9 * one.grown_mib and one.leaks == 3


def test_the_faster_the_leak_the_fewer_the_alarms() -> None:
    alarms = {rate: row(rate, noise=0.0005, phi=0.0, seeds=2).alarms for rate in (0, 48.6, 1000)}
    # theory: 1.24 % of 8,461 windows of white noise are beyond 2.5
    assert alarms[0] == pytest.approx(105, rel=0.15) and alarms[48.6] == alarms[1000] == 0

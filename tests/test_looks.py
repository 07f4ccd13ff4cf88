"""Interim verdicts: alpha is spent once, however often is looked; regular movement raises no alarm, a leak does."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from leakscope.detect.looks import Interim, Looks, judge_interim, needed_score
from leakscope.detect.series.counters import Counter
from leakscope.detect.series.judge import judge
from tests.series import MIB_H, autoregressive, make
from tools.eval_series import OURS, evaluate

GIB = 2.0**30
HOUR = 3600.0


@pytest.mark.parametrize("hours", [range(1, 73), [3, 4, 50, 72], [72], np.arange(0.25, 72.1, 0.25)])
def test_looks_at_any_times_share_one_alpha(hours: list[float]) -> None:
    looks = Looks(0.05, 72 * HOUR)

    shares = [looks.next(hour * HOUR) for hour in hours]

    assert sum(shares) == pytest.approx(0.05) == looks.spent
    assert min(shares) > 0


def test_a_time_already_looked_at_gives_nothing_and_a_new_horizon_its_own() -> None:
    looks = Looks(0.05, 100.0)

    assert looks.next(50.0) == pytest.approx(0.025)
    assert looks.next(50.0) == looks.next(10.0) == 0.0
    assert needed_score(0.0) == float("inf")
    assert looks.next(150.0) == pytest.approx(0.05)
    assert Looks(0.05, 100.0, spent=looks.spent).next(200.0) == pytest.approx(0.025)
    assert Looks(0.05, 100.0).next(1000.0) == 0.05  # a pause hands on no more than one horizon's alpha


def test_the_score_is_the_normal_one_of_alpha() -> None:
    assert needed_score(0.05 / 72) == pytest.approx(NormalDist().inv_cdf(1 - 0.05 / 72))


def test_wrong_arguments_are_refused() -> None:
    for alpha, horizon in ((0.0, 1.0), (1.0, 1.0), (0.05, 0.0)):
        with pytest.raises(ValueError, match="total_alpha"):
            Looks(alpha, horizon)


def watch(t: np.ndarray, value: np.ndarray, hours: int) -> list[Interim]:
    """Hourly looks."""
    looks, found = Looks(), list[Interim]()
    for hour in range(1, hours + 1):
        part = t < hour * HOUR
        counters = [Counter("rss", t[part], value[part], True)]
        found.append(judge_interim(counters, looks, hour * HOUR, found[-1] if found else None))
    return found


def test_a_leak_of_48_6_mib_an_hour_is_found_within_12_hours() -> None:
    # given half a GiB with noise of 1 %: of 6 GiB it would be a tenth in 12 hours, as much as a daily wave
    t = np.arange(0, 12 * HOUR, 30.0)
    rss = 0.5 * GIB + 48.6 * MIB_H * t + autoregressive(np.random.default_rng(5), len(t), 0.9, 0.005 * GIB)

    found = watch(t, rss, 12)

    assert found[-1].alarm
    first = next(look for look in found if look.alarm)
    assert first.elapsed_s <= 9 * HOUR and first.score >= first.needed
    assert first.judged.verdict.growth is not None
    assert first.judged.verdict.growth.bytes_per_s == pytest.approx(48.6 * MIB_H, rel=0.25)


def test_what_the_window_cannot_tell_the_odds_tell() -> None:
    # given a leak from the 17th hour on, of which the verdict of all readings so far says that the window is too short
    made = make(5_100_081, leaking=True, rate=48.6 * MIB_H)
    counters = made.until(30 * HOUR).counters()
    assert judge(counters).verdict.kind == "window_too_short"

    look = judge_interim(counters, Looks(), 30 * HOUR)

    verdict = look.judged.verdict
    assert (look.alarm, verdict.verdict, verdict.kind, verdict.missing) == (True, "leak", "retained_growth", ())
    assert verdict.growth is not None and verdict.leak_start_s is not None
    assert verdict.growth.ci_low <= 48.6 * MIB_H <= verdict.growth.ci_high
    assert verdict.leak_start_s == pytest.approx(made.start_s, abs=6 * HOUR)


def test_growth_that_ended_raises_no_alarm_at_any_look() -> None:
    # given a cache that fills for five hours
    t = np.arange(0, 24 * HOUR, 30.0)
    noise = autoregressive(np.random.default_rng(4), len(t), 0.9, 0.01 * GIB)
    rss = GIB * (1 + 0.2 * np.minimum(t / (5 * HOUR), 1.0)) + noise

    assert not any(look.alarm for look in watch(t, rss, 24))


def test_growth_that_the_priors_know_no_shape_for_alarms_no_more_once_it_ended() -> None:
    # given a cache that fills for fifteen hours by half of the level: as long as it does so it is a line
    t = np.arange(0, 48 * HOUR, 60.0)
    noise = autoregressive(np.random.default_rng(1), len(t), 0.9, 0.01 * GIB)
    counters = [Counter("rss", t, GIB * (1 + 0.5 * np.minimum(t / (15 * HOUR), 1.0)) + noise, True)]

    look = judge_interim(counters, Looks(), 48 * HOUR)

    # then the odds, which know no better than a line, are not believed
    assert (look.score >= look.needed, look.alarm, look.judged.verdict.kind) == (True, False, "cache_warmup")


def test_the_rise_of_a_daily_wave_is_called_a_leak_at_its_end_and_raises_no_alarm() -> None:
    # given the rising half of a day: to a recording that ends here it is a line
    t = np.arange(0, 14 * HOUR, 30.0)
    noise = autoregressive(np.random.default_rng(3), len(t), 0.5, 0.01 * GIB)
    rss = GIB * (1 - 0.1 * np.cos(2 * np.pi * (t + HOUR) / 86_400)) + noise

    found = watch(t, rss, 14)

    assert any(look.judged.verdict.verdict == "leak" for look in found)
    assert not any(look.alarm for look in found)


def test_other_rules_on_the_same_series_alarm_on_clean_ones() -> None:
    """The short form of tools/eval_series.py, whose table stands in docs/verdicts.md."""
    said: list[str] = []

    scores = evaluate(910_000, series=40, looks=2, say=said.append)

    z, kendall, line = (scores[name] for name in scores if name != OURS)
    ours = scores[OURS]
    assert ours.clean == 20 and ours.clean_called <= 1
    assert ours.right / ours.called >= 0.95 and ours.right >= 18
    assert sum(ours.clean_alarms) == 0
    assert z.clean_called == 20 and all(z.clean_alarms)  # |z| > 2.5 fires on all of them
    assert kendall.clean_called >= 5 and all(kendall.clean_alarms)
    assert line.right < ours.right
    assert len(said) == 2 + len(scores)

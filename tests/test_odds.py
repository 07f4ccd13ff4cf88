"""Odds that a floor rises for good: the closed form is the integral that it stands for; waves, steps, start-ups and
growth that ended are no lines."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from leakscope.detect.series import odds as module
from leakscope.detect.series.odds import MIN_POINTS, Odds, Priors, odds
from tests.series import autoregressive

HOUR = 3600.0
GIB = 2.0**30


def floor(hours: float, seed: int = 1, noise: float = 0.005) -> tuple[np.ndarray, np.ndarray]:
    """(times, noise of 1 GiB) of 60 points."""
    t = np.linspace(0.0, hours * HOUR, 60)
    return t, GIB + autoregressive(np.random.default_rng(seed), 60, 0.4, noise * GIB)


def test_the_closed_form_is_the_integral_over_all_courses() -> None:
    # given few courses, so that each can be integrated over by itself
    priors = Priors(
        wave=(0.1,), start_up=((0.15, 0.08, 1.0),), constants_h=(1.5,), ended=((0.0, 0.5),), hinges=((0.25, 1.0),)
    )
    t, value = floor(10.0)
    t, value = t[::5], (value + 0.01 * GIB * t / HOUR)[::5]
    hours, y = (t - t[0]) / HOUR, (value - value[0]) / GIB
    columns = module._columns(hours, priors)
    steps = (np.arange(12)[:, None] >= np.r_[12, np.arange(1, 12)]).astype(np.float64)
    phi, variance = module._noise(columns, steps, y, priors)
    noise = variance / (1 - phi**2) * phi ** np.abs(np.subtract.outer(np.arange(12), np.arange(12)))

    # when the likelihood of each course is that of a normal vector, and slopes are summed over a grid
    slopes = np.linspace(0.0, 6 * priors.rate_h, 2001)
    density = np.exp(-0.5 * (slopes / priors.rate_h) ** 2)
    density /= density.sum()
    line = columns[:, 7]
    without = with_line = 0.0
    for (shape, chance), (wave, spread, likely), place in product(
        ((5, 0.8), (6, 0.2)),
        [
            (w, s, np.exp(c))
            for centres, s, chances in module._waves(priors)
            for w, c in zip(centres, chances, strict=True)
        ],
        range(12),
    ):
        parts: list[tuple[Any, float, float]] = [
            (columns[:, 0], 0.0, 1.0),
            *((columns[:, 1 + i], wave[i], spread) for i in (0, 1)),
            *((columns[:, 3 + i], 0.0, priors.half_day) for i in (0, 1)),
            (columns[:, shape], 0.15, 0.08),
        ]
        weight = chance * likely * (0.25 / 11 if place else 0.75)
        if place:
            parts.append((steps[:, place], 0.0, priors.step))
        mean = sum(column * middle for column, middle, _ in parts)
        covariance = noise + sum(deviation**2 * np.outer(column, column) for column, _, deviation in parts)
        likelihood = np.exp(multivariate_normal(mean, covariance).logpdf(y - slopes[:, None] * line))
        without += weight * likelihood[0]
        with_line += weight * float(likelihood @ density)

    # then both agree
    assert odds(t, value, GIB, priors).log == pytest.approx(np.log(with_line / without), abs=0.02)


def test_a_line_after_a_clean_day_is_found_in_hours_with_its_rate_and_start() -> None:
    t, value = floor(28.0)
    value = value + 0.03 * GIB * np.maximum(0.0, t - 20 * HOUR) / HOUR

    found = odds(t, value, GIB)

    assert found.score > 6
    assert found.rate == pytest.approx(0.03 * GIB / HOUR, rel=0.15)
    assert abs(found.rate - 0.03 * GIB / HOUR) < 3 * found.error
    assert found.start_s == pytest.approx(20 * HOUR, abs=2 * HOUR)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "shape",
    [
        lambda h: 0 * h,
        lambda h: 0.12 * (h >= 9.3),
        lambda h: -0.12 * np.cos(2 * np.pi * h / 24),
        lambda h: 0.35 * (1 - np.exp(-h / 3)),
        lambda h: 0.2 * np.minimum(h / 7, 1.0),
        lambda h: -0.1 * np.cos(2 * np.pi * (h + 2) / 24) + 0.2 * (1 - np.exp(-h)) + 0.08 * (h >= 5.1),
    ],
    ids=["flat", "step", "half a day's wave", "start-up", "growth that ended", "all of them"],
)
def test_what_else_a_counter_does_is_no_line(shape: Callable[[np.ndarray], np.ndarray], seed: int) -> None:
    t, value = floor(14.0, seed)

    assert odds(t, value + GIB * shape(t / HOUR), GIB).score < 3.2


def test_shares_are_of_the_level_and_few_points_say_nothing() -> None:
    t, value = floor(20.0)
    value = value + 0.02 * GIB * t / HOUR

    one, thousand = odds(t, value, GIB), odds(t, 1000 * value, 1000 * GIB)

    assert thousand.log == pytest.approx(one.log) and thousand.rate == pytest.approx(1000 * one.rate)
    assert odds(t[: MIN_POINTS - 1], value[: MIN_POINTS - 1], GIB) == Odds()
    assert odds(t, np.full(60, GIB), GIB).score == Odds().score == 0.0

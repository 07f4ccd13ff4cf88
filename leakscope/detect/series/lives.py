"""Lives of a process: a counter that falls back when its process restarts is judged in each life by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from leakscope.detect.series.floors import BINS, binned, daily_wave
from leakscope.detect.series.trend import MIN_EFFECT_SHARE, MIN_READINGS, MIN_T, Z95, Course, Trend, trend

FloatArray = npt.NDArray[np.float64]

RESET_SHARE = 0.3
"""A counter belongs to the process when a restart takes back this share of what it had gained."""
MIN_T_NONE_RISES = 6.0
"""The pooled slope against its error where no life rises by itself."""
MIN_LIFE_RATE = 0.5
MAX_LIVES_OF_A_WAVE = 8
START_UP_S = 3600.0
MIN_RISING_SHARE = 0.5
"""Lives in which the counter rises must make up this share of the time in lives long enough to judge."""


def restarts(t_s: FloatArray, start_s: FloatArray) -> FloatArray:
    """Times of the first reading of each further life, from the process's start time as it was read."""
    changed = np.flatnonzero(np.diff(start_s) != 0) + 1
    return t_s[changed]


def trend_of_lives(t_s: FloatArray, value: FloatArray, restarted_s: FloatArray) -> Trend:
    """The course over all lives; rates are means over lives weighted by their length."""
    edges = np.searchsorted(t_s, restarted_s)
    edges = edges[(edges > 0) & (edges < len(t_s))]
    if not len(edges) or not _resets(value, edges):
        return trend(t_s, value)
    parts = [
        (t_s[a:b], value[a:b])
        for a, b in zip(np.r_[0, edges], np.r_[edges, len(t_s)], strict=True)
        if b - a >= MIN_READINGS and t_s[b - 1] > t_s[a]
    ]
    if not parts:
        return trend(t_s, value)
    trends = [trend(*part) for part in _without_daily_wave(t_s, parts)]
    spans = np.array([part[0][-1] - part[0][0] for part in parts])
    rising = np.array([one.rising for one in trends])
    longest = trends[int(np.argmax(spans))]
    if spans[rising].sum() < MIN_RISING_SHARE * spans.sum() and (pooled := _pooled(trends, spans, float(t_s[-1]))):
        return pooled
    if spans[rising].sum() < MIN_RISING_SHARE * spans.sum():
        others = [(span, one) for span, one in zip(spans, trends, strict=True) if not one.rising]
        chosen = max(others, key=lambda pair: pair[0])[1] if others else longest
        return replace(chosen, lives=len(parts), end_s=float(t_s[-1]))
    weights = spans[rising] / spans[rising].sum()
    picked = [one for one in trends if one.rising]
    rate = float(sum(w * one.rate for w, one in zip(weights, picked, strict=True)))
    error = float(np.sqrt(sum((w * (one.high - one.rate)) ** 2 for w, one in zip(weights, picked, strict=True))))
    return replace(
        longest,
        course=Course.RISING,
        rate=rate,
        low=rate - error,
        high=rate + error,
        start_s=_start(trends, rate),
        rise=sum(one.rise for one in picked),
        line_rise=sum(one.line_rise for one in picked),
        lives=len(parts),
        end_s=float(t_s[-1]),
        smallest_rate=min(one.smallest_rate for one in picked),
    )


def _without_daily_wave(
    t_s: FloatArray, parts: list[tuple[FloatArray, FloatArray]]
) -> list[tuple[FloatArray, FloatArray]]:
    """The lives without what repeats every day in all of them: the load goes on whether or not a process restarts, and
    a life of less than a day and a half cannot tell it from a line by itself."""
    if not 2 <= len(parts) <= MAX_LIVES_OF_A_WAVE:
        return parts
    binned_parts = [binned(*part, BINS // len(parts)) for part in parts]
    times = np.concatenate([times for times, _ in binned_parts])
    columns = []
    for at, _ in binned_parts:
        inside = (times >= at[0]) & (times <= at[-1])
        since = np.where(inside, times - at[0], 0.0)
        columns += [inside * 1.0, since, np.where(inside, np.exp(-since / START_UP_S), 0.0)]
    wave = daily_wave(times, np.concatenate([value for _, value in binned_parts]), np.stack(columns, axis=1))
    if wave is None:
        return parts
    return [(at, value - np.interp(at, times, wave)) for at, value in parts]


def _start(trends: list[Trend], rate: float) -> float:
    """Where the first life begins to rise; a life too short to be judged rises where it does so at half the rate."""
    for one in trends:
        if one.rising:
            return one.start_s
        if one.course is not Course.SHORT and one.rate >= MIN_LIFE_RATE * rate:
            return one.start_s
    return trends[0].start_s


def _pooled(trends: list[Trend], spans: FloatArray, end_s: float) -> Trend | None:
    """One slope for all lives, weighted by the inverse square of their errors; None where together they show none.

    A life that rises has its line; of the others the slope after start-up counts, whatever its sign.
    """
    errors = np.array([(one.high - one.rate) / Z95 for one in trends])
    usable = np.isfinite(errors) & (errors > 0)
    if usable.sum() < 2:
        return None
    needed = MIN_T if any(one.rising for one in trends) else MIN_T_NONE_RISES
    rates = np.array([one.rate for one in trends])[usable]
    weights = 1 / np.maximum(errors[usable], 1e-3 * np.abs(rates).max()) ** 2
    rate, error = float((weights * rates).sum() / weights.sum()), float(1 / np.sqrt(weights.sum()))
    spread = float(np.sqrt((weights * (rates - rate) ** 2).sum() / weights.sum()))
    error = max(error, spread / np.sqrt(len(rates)))
    first = next((one for one in trends if one.rising), trends[0])
    smallest = min(one.smallest_rate for one in trends)
    if rate < needed * error or rate * spans.sum() < MIN_EFFECT_SHARE * abs(first.level) or (rates <= 0).any():
        return None
    return replace(
        first,
        course=Course.RISING,
        start_s=_start(trends, rate),
        rate=rate,
        low=rate - Z95 * error,
        high=rate + Z95 * error,
        lives=len(trends),
        end_s=end_s,
        line_rise=rate * float(spans.sum()),
        smallest_rate=smallest,
    )


def _resets(value: FloatArray, edges: npt.NDArray[np.int64]) -> bool:
    """Whether most restarts take back what the counter had gained in the life before."""
    starts = np.r_[0, edges]
    taken = []
    for start, edge in zip(starts, edges, strict=False):
        before = np.median(value[max(start, edge - 5) : edge])
        after = np.median(value[edge : edge + 3])
        first = np.median(value[start : start + 3])
        gained = max(before - first, 0.0)
        spread = np.std(np.diff(value[start:edge])) if edge - start > 3 else 0.0
        taken.append(before - after >= max(RESET_SHARE * gained, 3 * spread) and before - after > 0)
    return bool(np.mean(taken) >= 0.5)

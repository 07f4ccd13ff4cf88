"""The floor of a counter: what is still there after garbage collections, evictions and quiet hours.

A level is what remains of the readings in equal time bins. Where it goes up and down in cycles, its floor is the least
of windows longer than a cycle; where it does not, the median of shorter windows, which is less noisy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

BINS = 240
WINDOWS = 60
MIN_WINDOWS = 6
"""Fewer windows than this: the troughs themselves are the floor."""
CYCLE_SHARE = 0.2
"""A fall by this share of the whole range ends a cycle."""
NOISE_FACTOR = 6.0
"""And by this many times the noise between neighbouring readings."""
CYCLE_WINDOWS = 1.25
OPEN_FACTOR = 1.5
SLOW_KNOTS = 12
MIN_FLUCTUATIONS = 4
MIN_FALL_SHARE = 0.3
"""Falls that take this share of a cycle, in so many cycles, are fluctuations and no teeth of a saw."""
MIN_SHORT_CYCLES = 10
"""From so many on, cycles are shorter than what the slow course follows."""
START_UPS = (0.01, 0.03, 0.08)
"""Time constants of start-up beside a daily wave, as shares of the time: it must not be taken for one."""
DAY_S = 86_400.0
MIN_DAYS = 1.5
DIURNAL_SHARE = 0.3
STEPS = np.arange(0.025, 0.98, 0.025)
"""Where a step may be, as shares of the readings."""


@dataclass(frozen=True)
class Cycle:
    """A fall that ends a cycle: from a peak down to a trough, as bins of the level."""

    peak: int
    trough: int
    fall: float


@dataclass(frozen=True)
class Floor:
    """``t_s`` and ``value``, float64[K]: the floor at K times, up to the last trough where the counter cycles.

    ``cycles``: falls by a large share of the range. ``noise``: standard deviation between neighbouring bins.

    """

    t_s: FloatArray
    value: FloatArray
    cycles: tuple[Cycle, ...]
    noise: float
    span: float
    level: float
    level_t_s: FloatArray
    level_value: FloatArray
    diurnal: bool = False
    raw_value: FloatArray = field(default_factory=lambda: np.empty(0))  # the level with its daily wave


def binned(t_s: FloatArray, value: FloatArray, bins: int = BINS) -> tuple[FloatArray, FloatArray]:
    """Median of each of ``bins`` equal time bins, those without a reading left out: (mean times, medians)."""
    if len(t_s) <= bins:
        return t_s, _median3(value)
    span = t_s[-1] - t_s[0]
    index = np.minimum(((t_s - t_s[0]) / span * bins).astype(np.int64), bins - 1)
    order = np.lexsort((value, index))
    sorted_index = index[order]
    starts = np.flatnonzero(np.r_[True, sorted_index[1:] != sorted_index[:-1]])
    counts = np.diff(np.r_[starts, len(order)])
    middle = starts + counts // 2
    lower = starts + (counts - 1) // 2
    medians = (value[order][middle] + value[order][lower]) / 2
    times = np.add.reduceat(t_s[order], starts) / counts
    return times, medians


def floor(t_s: FloatArray, value: FloatArray) -> Floor:
    """The floor of one life of a counter; ``t_s`` rises, at least 8 readings."""
    smooth = _median3(value)
    level_t, level = binned(t_s, value)
    raw = level
    diurnal = daily_wave(level_t, level)
    if diurnal is not None:
        level = level - diurnal
        smooth = smooth - np.interp(t_s, level_t, diurnal)
    noise = noise_between(level)
    low, high = np.percentile(level, [1, 99])
    span = float(high - low)
    cycles = _cycles(level, max(CYCLE_SHARE * span, NOISE_FACTOR * noise))
    short = _short_cycles(level_t, level, noise)
    if len(cycles) >= MIN_FLUCTUATIONS and not short and _fluctuates(cycles):
        cycles = []
    if cycles and not short and level[-1] - level[cycles[-1].trough] >= OPEN_FACTOR * max(c.fall for c in cycles):
        cycles = []  # since the last trough it rose far beyond what it ever fell: no tooth of the same saw
    if not cycles and not short:
        times, values = _windows(t_s, smooth, WINDOWS, 50.0)
    elif short:
        times, values = _windows(t_s, smooth, min(int((t_s[-1] - t_s[0]) / (CYCLE_WINDOWS * short)), WINDOWS), 0.0)
    else:
        troughs = np.array([c.trough for c in cycles])
        gaps = np.diff(level_t[troughs])
        period = float(np.median(gaps)) if len(gaps) else level_t[-1] - level_t[0]
        windows = int((t_s[-1] - t_s[0]) / (CYCLE_WINDOWS * max(period, 1e-9)))
        if windows >= MIN_WINDOWS:
            times, values = _windows(t_s, smooth, min(windows, WINDOWS), 0.0)
        else:
            first = int(np.argmin(level[: troughs[0]])) if troughs[0] > 0 else 0
            points = np.unique(np.r_[first, troughs])
            times, values = level_t[points], level[points]
    return Floor(
        times,
        values,
        tuple(cycles),
        noise,
        span,
        float(np.median(level)),
        level_t,
        level,
        diurnal is not None,
        raw,
    )


def _fluctuates(cycles: list[Cycle]) -> bool:
    """Whether falls take as long as rises: slow noise does so, what is collected or evicted falls at once."""
    falls = np.array([cycle.trough - cycle.peak for cycle in cycles])
    lengths = np.diff([cycle.trough for cycle in cycles])
    return bool(np.median(falls) >= MIN_FALL_SHARE * np.median(lengths))


def _short_cycles(level_t: FloatArray, level: FloatArray, noise: float) -> float:
    """Length of a cycle in seconds where there are many short ones, told after the slow course is taken out; else 0."""
    knots = np.linspace(level_t[0], level_t[-1], SLOW_KNOTS)
    hats = np.maximum(0.0, 1.0 - np.abs(level_t[:, None] - knots) / (knots[1] - knots[0]))
    solution, *_ = np.linalg.lstsq(hats, level, rcond=None)
    quick = level - hats @ solution
    low, high = np.percentile(quick, [5, 95])
    found = _cycles(quick, max((high - low) / 2, NOISE_FACTOR * noise))
    if len(found) < MIN_SHORT_CYCLES:
        return 0.0
    length = float(np.median(np.diff(level_t[[cycle.trough for cycle in found]])))
    return length if (level_t[-1] - level_t[0]) / (CYCLE_WINDOWS * length) >= MIN_SHORT_CYCLES else 0.0


def noise_between(level: FloatArray) -> float:
    """Standard deviation of what differs between neighbours beyond a smooth course, robust against steps."""
    if len(level) < 3:
        return 0.0
    second = level[2:] - 2 * level[1:-1] + level[:-2]
    return float(np.median(np.abs(second)) / 0.6745 / np.sqrt(6.0))


def daily_wave(t_s: FloatArray, level: FloatArray, course: FloatArray | None = None) -> FloatArray | None:
    """The part of ``level`` that repeats every day, where there is one and at least 36 hours of it; else None.

    Sines and cosines of 24, 12 and 8 hours beside a slow course, by least squares: ``course``, float64[K, columns],
    else hats a day wide and start-ups.
    """
    span = t_s[-1] - t_s[0]
    if span < MIN_DAYS * DAY_S or len(t_s) < 24:
        return None
    hats = course if course is not None else _slow_course(t_s, span)
    angles = 2 * np.pi * t_s[:, None] * np.array([1.0, 2.0, 3.0]) / DAY_S
    waves = np.hstack([np.cos(angles), np.sin(angles)])
    # One step beside them: alone it would be taken for half a wave.
    without, _ = _beside_a_step(hats, level)
    rest, solution = _beside_a_step(np.hstack([hats, waves]), level)
    if without <= 0 or rest > (1.0 - DIURNAL_SHARE) * without:
        return None
    wave: FloatArray = waves @ solution[hats.shape[1] :]
    return wave


def _slow_course(t_s: FloatArray, span: float) -> FloatArray:
    knots = np.linspace(t_s[0], t_s[-1], max(3, int(span / DAY_S) + 1))
    width = knots[1] - knots[0]
    hats = np.maximum(0.0, 1.0 - np.abs(t_s[:, None] - knots[None, :]) / width)
    since = (t_s - t_s[0]) / span
    return np.hstack([hats, np.stack([np.exp(-since / constant) for constant in START_UPS], axis=1)])


def _beside_a_step(design: FloatArray, level: FloatArray) -> tuple[float, FloatArray]:
    """(sum of squares left, coefficients of ``design``) of the least squares fit with the best single step, or with
    none where that leaves as little."""
    count = len(level)
    basis, _ = np.linalg.qr(design)
    rest = level - basis @ (basis.T @ level)
    at = np.unique((STEPS * count).astype(np.int64))
    steps = (np.arange(count)[:, None] >= at[None, :]).astype(np.float64)
    own = steps - basis @ (basis.T @ steps)  # what of each step the design does not explain
    size = np.maximum((own**2).sum(axis=0), 1e-9)
    gain = (own.T @ rest) ** 2 / size
    best = int(np.argmax(gain))
    height = float(own[:, best] @ rest) / float(size[best])
    solution, *_ = np.linalg.lstsq(design, level - height * steps[:, best], rcond=None)
    return float(rest @ rest) - float(gain[best]), np.asarray(solution, np.float64)


def _median3(value: FloatArray) -> FloatArray:
    if len(value) < 3:
        return value
    middle = np.median(np.stack([value[:-2], value[1:-1], value[2:]]), axis=0)
    return np.concatenate([[np.median(value[:2])], middle, [np.median(value[-2:])]])


def _windows(t_s: FloatArray, value: FloatArray, windows: int, percentile: float) -> tuple[FloatArray, FloatArray]:
    index = np.minimum(((t_s - t_s[0]) / (t_s[-1] - t_s[0]) * windows).astype(np.int64), windows - 1)
    times, values = [], []
    for window in range(windows):
        inside = index == window
        if inside.any():
            times.append(t_s[inside].mean())
            values.append(np.percentile(value[inside], percentile))
    return np.array(times), np.array(values)


def _cycles(level: FloatArray, threshold: float) -> list[Cycle]:
    """Falls of at least ``threshold``, by turning points: a peak counts once the level has fallen so far from it, a
    trough once it has risen as far again or the readings end."""
    cycles: list[Cycle] = []
    if threshold <= 0:
        return cycles
    peak = trough = 0
    falling = False
    for index, value in enumerate(level):
        if not falling:
            if value > level[peak]:
                peak = index
            elif level[peak] - value >= threshold:
                falling, trough = True, index
        elif value < level[trough]:
            trough = index
        elif value - level[trough] >= threshold:
            cycles.append(Cycle(peak, trough, float(level[peak] - level[trough])))
            falling, peak = False, index
    if falling:
        cycles.append(Cycle(peak, trough, float(level[peak] - level[trough])))
    return cycles

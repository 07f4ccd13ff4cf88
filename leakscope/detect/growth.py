"""Growth of curves of kept bytes: rate, interval, persistence and start. All functions take many curves at
once.

A curve is the kept bytes (or objects) at the end of each of B equal time bins. As a running sum of
allocations and frees its noise is that of a random walk, or mean-reverting where memory churns; both are
respected by resampling blocks of its increments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

WARM_UP_SHARE = 0.2
PARTS = 4
"""Disjoint parts of the time after the warm-up whose floors are compared."""
MIN_LAST_PART = 0.2
NO_LAST_PART = 0.05
"""Growth into and within the last part, as shares of the mean growth between parts: below the first it is not
steady, below the second it has levelled off."""
MIN_MEDIAN_SLOPE = 0.25
"""Theil-Sen slope as a share of the mean rate: a single step has a slope near zero."""
MIN_ITERATIONS = PARTS
BLOCK_BINS = 8
RESAMPLES = 400
SEED = 20_240_229  # any fixed number: the same capture gives the same interval


class Rates(NamedTuple):
    """Mean rate per second after the warm-up, and its 95 % interval; float64[n] each."""

    mean: FloatArray
    low: FloatArray
    high: FloatArray


def warm_up_bins(bins: int, window_s: FloatArray, warm_up_s: float | None = None) -> npt.NDArray[np.int64]:
    """Bins of each curve that count as warm-up: a fifth, or ``warm_up_s`` of its window of ``window_s``
    seconds.

    At least :data:`PARTS` bins stay. int64[n].
    """
    if warm_up_s is None:
        share = np.full(len(window_s), WARM_UP_SHARE)
    else:
        share = np.minimum(1.0, warm_up_s / np.maximum(window_s, 1e-9))
    return np.minimum(np.ceil(share * bins - 1e-9), bins - PARTS).astype(np.int64)


def rates(curves: FloatArray, warm: npt.NDArray[np.int64], bin_s: FloatArray) -> Rates:
    """Rates of ``curves`` (float64[n, B]) after ``warm`` bins (int64[n]) of ``bin_s`` seconds each
    (float64[n]).

    The interval is the 2.5 and 97.5 percentile of a circular block bootstrap of the increments (Politis and
    Romano 1992) with blocks of :data:`BLOCK_BINS`.
    """
    n, bins = curves.shape
    mean, low, high = np.zeros(n), np.zeros(n), np.zeros(n)
    increments = np.diff(curves, axis=1, prepend=0.0)
    for skipped in np.unique(warm):
        chosen = np.flatnonzero(warm == skipped)
        steps = increments[chosen, skipped:]
        length = bins - int(skipped)
        weights = _block_weights(length)
        per_second = 1.0 / (length * bin_s[chosen])
        sums = steps @ weights  # [chosen, RESAMPLES]
        mean[chosen] = steps.sum(axis=1) * per_second
        bounds = np.percentile(sums, [2.5, 97.5], axis=1)
        low[chosen] = np.minimum(bounds[0] * per_second, mean[chosen])
        high[chosen] = np.maximum(bounds[1] * per_second, mean[chosen])
    return Rates(mean, low, high)


def _block_weights(length: int) -> FloatArray:
    """How often each of ``length`` increments is drawn in each resample: float64[length, RESAMPLES].

    The mean weight is 1, so that a weighted sum estimates the plain one.
    """
    rng = np.random.default_rng(SEED)
    block = min(BLOCK_BINS, max(1, length // 4))
    blocks = -(-length // block)
    starts = rng.integers(0, length, (blocks, RESAMPLES))
    drawn = (starts[:, None, :] + np.arange(block)[None, :, None]).reshape(-1, RESAMPLES) % length
    weights = np.zeros((length, RESAMPLES))
    np.add.at(weights, (drawn, np.arange(RESAMPLES)[None, :]), 1.0)
    return weights * (length / (blocks * block))


class Persistence(NamedTuple):
    """Steadiness of growth after the warm-up.

    ``steps``: float64[n, PARTS], growth of the floor from part to part, and last from the floor of the last part
    to the end. ``steady``: each step up, and the last two at least :data:`MIN_LAST_PART` of the mean step.
    ``plateau``: one of the last two is next to nothing.
    """

    steps: FloatArray
    steady: npt.NDArray[np.bool_]
    plateau: npt.NDArray[np.bool_]


def persistence(curves: FloatArray, warm: npt.NDArray[np.int64]) -> Persistence:
    """Compare the floors (smallest values) of :data:`PARTS` disjoint parts of each curve after its warm-up."""
    n, bins = curves.shape
    floors = np.zeros((n, PARTS + 1))
    for skipped in np.unique(warm):
        chosen = np.flatnonzero(warm == skipped)
        edges = np.linspace(skipped, bins, PARTS + 1).astype(int)
        for part in range(PARTS):
            floors[chosen, part] = curves[chosen, edges[part] : edges[part + 1]].min(axis=1)
    floors[:, PARTS] = curves[:, -1]
    steps = np.diff(floors, axis=1)
    mean_step = np.maximum(0.0, floors[:, PARTS - 1] - floors[:, 0]) / (PARTS - 1)
    last = steps[:, -2:].min(axis=1)
    steady = (steps > 0).all(axis=1) & (last >= MIN_LAST_PART * mean_step)
    return Persistence(steps, steady, last <= NO_LAST_PART * mean_step)


def theil_sen(curves: FloatArray, warm: npt.NDArray[np.int64], bin_s: FloatArray) -> FloatArray:
    """Median of the slopes between all pairs of bins after the warm-up, per second (Theil 1950, Sen 1968).

    A single step up, however large, leaves it near zero. float64[n].
    """
    n, bins = curves.shape
    slopes = np.zeros(n)
    for skipped in np.unique(warm):
        chosen = np.flatnonzero(warm == skipped)
        first, second = np.triu_indices(bins - int(skipped), k=1)
        distance = (second - first).astype(np.float64)
        for at in range(0, len(chosen), 256):  # 256 curves × 4,560 pairs: 9 MB
            rows = chosen[at : at + 256]
            after = curves[rows, skipped:]
            slopes[rows] = np.median((after[:, second] - after[:, first]) / distance, axis=1) / bin_s[rows]
    return slopes


def steadily_rises(curves: FloatArray) -> npt.NDArray[np.bool_]:
    """Which curves rise in every part of a run of M iterations: float64[n, M + 1], before the first and after each.

    Floors of disjoint parts rise from each to the next and to the end (:func:`persistence`), and the median slope is a
    quarter of the mean one, so a step or two are no growth. bool[n]; M >= :data:`MIN_ITERATIONS`. With so few each has
    to add something: the rule of CPython's own hunt for reference leaks (test.libregrtest.refleak).
    """
    n, points = curves.shape
    none = np.zeros(n, np.int64)
    rises = persistence(curves, none).steady
    mean = (curves[:, -1] - curves[:, 0]) / (points - 1)
    slope = theil_sen(curves, none, np.ones(n))
    return np.asarray(rises & (mean > 0) & (slope >= MIN_MEDIAN_SLOPE * mean), dtype=bool)


def leak_start_bins(curves: FloatArray) -> npt.NDArray[np.int64]:
    """The bin at whose beginning each curve begins to rise for good: float64[n, B] → int64[n] in 0..B-2.

    A line that is flat up to a bin and rises from there is fitted by least squares to the lower envelope (at
    each time the least that is kept from then on); the best hinge wins, the earliest on a tie.
    """
    bins = curves.shape[1]
    envelope = np.minimum.accumulate(curves[:, ::-1], axis=1)[:, ::-1]
    ends = np.arange(1, bins + 1, dtype=np.float64)
    hinges = np.maximum(0.0, ends[None, :] - np.arange(bins - 1, dtype=np.float64)[:, None])
    hinges -= hinges.mean(axis=1, keepdims=True)
    hinges /= np.sqrt((hinges * hinges).sum(axis=1, keepdims=True))
    explained = (envelope - envelope.mean(axis=1, keepdims=True)) @ hinges.T
    best = explained.max(axis=1, keepdims=True)
    return np.argmax(explained >= best - 1e-9 * np.abs(best), axis=1).astype(np.int64)


def largest_fall(curves: FloatArray, since: npt.NDArray[np.int64]) -> FloatArray:
    """Deepest fall of each curve (float64[n, B]) from a value at or after bin ``since`` (int64[n]); float64[n]."""
    bins = np.arange(curves.shape[1])
    later = np.where(bins >= since[:, None], curves, -np.inf)
    highest = np.maximum.accumulate(later, axis=1)
    with np.errstate(invalid="ignore"):
        falls = np.where(bins >= since[:, None], highest - later, 0.0)
    return falls.max(axis=1, initial=0.0)

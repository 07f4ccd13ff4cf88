"""Percentiles of latencies from histograms, and how much they tremble."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MIN_REQUESTS = 100
"""With fewer requests the 99th percentile is the largest of them, and a 95th one of the five largest."""
MIN_SLOTS = 10
MAD_TO_DEVIATION = 1.4826
"""Of normal values, the standard deviation is so many median absolute deviations (Rousseeuw and Croux 1993)."""


@dataclass(frozen=True)
class Jitter:
    """``ratio``: population standard deviation over mean; ``robust``: the same of median absolute deviation and median.
    ``slots``: percentiles that counted; ``left_out``: those of too few requests."""

    ratio: float
    robust: float
    slots: int
    left_out: int


def p99_jitter(p99: FloatArray, requests: FloatArray) -> Jitter | None:
    """The jitter of percentiles, float64[n] each: one a slot of time, and the number of requests that it rests on.

    Slots of fewer than :data:`MIN_REQUESTS` do not count. None (unknown) with fewer than :data:`MIN_SLOTS` others, and
    where one of them is not finite or their mean or median is 0.
    """
    counts = requests >= MIN_REQUESTS
    values = p99[counts]
    if len(values) < MIN_SLOTS or not np.isfinite(values).all():
        return None
    mean, median = float(values.mean()), float(np.median(values))
    if mean <= 0 or median <= 0:
        return None
    deviation = MAD_TO_DEVIATION * float(np.median(np.abs(values - median)))
    return Jitter(float(values.std()) / mean, deviation / median, len(values), int((~counts).sum()))


def percentile(bounds: FloatArray, counts: FloatArray, share: float) -> float | None:
    """The value that ``share`` (0 to 1) of the observations do not exceed, interpolated within its bucket as
    Prometheus' ``histogram_quantile`` does.

    bounds: float64[n], upper bounds in rising order, the last one may be infinite; counts: float64[n], observations in
    each bucket alone. None without an observation, infinite where it lies above the highest finite bound.
    """
    total = float(counts.sum())
    if total <= 0:
        return None
    cumulative = np.cumsum(counts)
    rank = share * total
    bucket = min(int(np.searchsorted(cumulative, rank, "left")), len(bounds) - 1)
    if math.isinf(bounds[bucket]):
        return math.inf
    low = float(bounds[bucket - 1]) if bucket else min(0.0, float(bounds[0]))
    before = float(cumulative[bucket - 1]) if bucket else 0.0
    inside = (rank - before) / float(counts[bucket]) if counts[bucket] else 1.0
    return low + (float(bounds[bucket]) - low) * inside


def latency_p95(bounds: FloatArray, counts: FloatArray) -> float | None:
    """The 95th percentile, None with fewer than :data:`MIN_REQUESTS` observations. As :func:`percentile`."""
    return percentile(bounds, counts, 0.95) if counts.sum() >= MIN_REQUESTS else None

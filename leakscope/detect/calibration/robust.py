"""The robust form: an offset taken once, after warm-up, then frozen; what strays from it for good is logged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leakscope.detect.calibration.z_rule import WINDOW
from leakscope.detect.series.fit import autocorrelation
from leakscope.model.calibration import Rebaseline

FloatArray = npt.NDArray[np.float64]

STEP = 30
"""Readings between the windows that are tried for the end of warm-up."""
SETTLED_SHARE = 0.005
SETTLED_MADS = 1.0
"""A window stands still when its halves' medians differ by less than this share of the level, or so many MADs."""
UNSETTLED_SHARE = 0.1
NORMAL = 1.4826
"""Standard deviations in one median absolute deviation of normal noise (Hampel 1974)."""
LEAST_SHARE = 1e-4
LEAST_BYTES = 4096.0
"""Noise is taken to be at least a page and this share of the level: a counter that stands still has none of its own."""
ALLOWANCE = 0.5
DECISION = 20.0
"""CUSUM (Page 1954): slack and decision interval in standard deviations. Even with an offset that is a tenth of a
deviation wrong, a false alarm comes once in more than 10^7 independent readings (Siegmund's approximation,
exp(2k(h + 1.166)) / 2k^2); 72 hours have 8,640. A shift by one deviation is decided after 40."""
MAX_LOGGED = 1000


@dataclass(frozen=True)
class Offset:
    """The frozen offset: median of readings ``begin`` to ``end``, their median absolute deviation, and whether they
    stood still."""

    bytes: float
    mad: float
    begin: int
    end: int
    settled: bool


def calibrate_once(value: FloatArray, level: float, window: int = WINDOW) -> Offset:
    """The offset from the first ``window`` readings that stand still; where none do, from those that begin after
    UNSETTLED_SHARE of all."""
    for begin in range(0, max(1, len(value) - window + 1), STEP):
        part = value[begin : begin + window]
        middle = float(np.median(part))
        mad = float(np.median(np.abs(part - middle)))
        half = len(part) // 2
        drift = abs(float(np.median(part[half:])) - float(np.median(part[: max(1, half)])))
        if drift <= max(SETTLED_MADS * mad, SETTLED_SHARE * level, LEAST_BYTES):
            return Offset(middle, mad, begin, begin + len(part), True)
    begin = min(int(UNSETTLED_SHARE * len(value)), max(0, len(value) - window))
    part = value[begin : begin + window]
    middle = float(np.median(part))
    return Offset(middle, float(np.median(np.abs(part - middle))), begin, begin + len(part), False)


def divergences(
    t_s: FloatArray, value: FloatArray, level: float, offset: Offset
) -> tuple[FloatArray, tuple[Rebaseline, ...]]:
    """(offset in force at each reading, its changes): a two-sided CUSUM of what is left after the offset.

    Its unit is the noise of the calibration window, widened by sqrt((1 + phi) / (1 - phi)) for its autocorrelation. At
    a decision the offset moves to the median of the window that begins where the excursion did; the move is logged.
    """
    part = value[offset.begin : offset.end] - offset.bytes
    phi = min(max(autocorrelation(part), 0.0), 0.95) if len(part) > 8 else 0.0
    noise = max(NORMAL * offset.mad, LEAST_SHARE * level, LEAST_BYTES) * np.sqrt((1 + phi) / (1 - phi))
    current = np.full(len(value), offset.bytes)
    changes: list[Rebaseline] = []
    begin, baseline = offset.end, offset.bytes
    while begin < len(value) and len(changes) < MAX_LOGGED:
        scaled = (value[begin:] - baseline) / noise
        found = min(_decision(scaled), _decision(-scaled), key=lambda pair: pair[1])
        if found[1] >= len(scaled):
            break
        start, at = begin + found[0], begin + found[1]
        again = max(at + 1, min(start + WINDOW, len(value)))
        fresh = float(np.median(value[start:again]))
        changes.append(Rebaseline(float(t_s[at]), fresh - baseline))
        baseline = fresh
        current[start:] = baseline
        begin = again
    return current, tuple(changes)


def _decision(scaled: FloatArray) -> tuple[int, int]:
    """(where the excursion began, where its CUSUM exceeds DECISION); (0, len) where it never does."""
    walk = np.cumsum(scaled - ALLOWANCE)
    least = np.minimum.accumulate(np.minimum(walk, 0.0))
    above = np.flatnonzero(walk - np.r_[0.0, least[:-1]] > DECISION)
    if not len(above):
        return 0, len(scaled)
    at = int(above[0])
    start = int(np.argmin(walk[: at + 1])) + 1 if walk[: at + 1].min() < 0 else 0
    return min(start, at), at

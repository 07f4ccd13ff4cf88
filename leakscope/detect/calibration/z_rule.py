"""The source document's rule: the z-score of a reading in its window of 180; beyond 2.5 the baseline is taken anew."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from leakscope.model.calibration import Rebaseline

FloatArray = npt.NDArray[np.float64]

WINDOW = 180
LIMIT = 2.5
EPSILON = 1e-6


def z_scores(value: FloatArray, window: int = WINDOW, epsilon: float = EPSILON) -> FloatArray:
    """z of each reading against the ``window`` readings that end with it: float64[n], NaN for the first window - 1.

    z = (x - mean) / (standard deviation + ``epsilon``), with the population's standard deviation. A reading is part of
    its own window, so |z| is at most (window - 1) / sqrt(window - 1); of a straight ramp the last reading has z =
    sqrt(3 (window - 1) / (window + 1)), 1.7225 for 180, whatever its slope.
    """
    scores = np.full(len(value), np.nan)
    if len(value) < window:
        return scores
    # Less the level, so that the sums keep their digits.
    windows = np.lib.stride_tricks.sliding_window_view(value - value[0], window)
    mean, deviation = windows.mean(axis=1), windows.std(axis=1)
    scores[window - 1 :] = (windows[:, -1] - mean) / (deviation + epsilon)
    return scores


def follow(
    t_s: FloatArray, value: FloatArray, window: int = WINDOW, limit: float = LIMIT
) -> tuple[FloatArray, tuple[Rebaseline, ...], int]:
    """(baseline at each reading, its changes, readings beyond the limit).

    The first baseline is the mean of the first window (of all readings where there are fewer); at each |z| above the
    limit it becomes the mean of the window that ends there.
    """
    first = float(value[:window].mean())
    baseline = np.full(len(value), first)
    alarms = np.flatnonzero(np.abs(z_scores(value, window)) > limit)
    changes = []
    current = first
    for number, at in enumerate(alarms.tolist()):
        fresh = float(value[at - window + 1 : at + 1].mean())
        changes.append(Rebaseline(float(t_s[at]), fresh - current))
        current = fresh
        baseline[at : alarms[number + 1] if number + 1 < len(alarms) else len(value)] = current
    return baseline, tuple(changes), len(alarms)

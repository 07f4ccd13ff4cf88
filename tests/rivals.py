"""Rules that others judge counters by, for comparison: what each says of readings so far, times in seconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Rule = Callable[[FloatArray, FloatArray], bool]

Z_WINDOW = 180
Z_LIMIT = 2.5
Z_EPSILON = 1e-6
MEDIAN_S = 1800.0
SIGNIFICANT = 0.05
MIN_R2 = 0.7


def z_scores(value: FloatArray) -> FloatArray:
    """Of each reading within the window of 180 that it ends: the rule of the source document."""
    if len(value) < Z_WINDOW:
        return np.empty(0)
    windows = np.lib.stride_tricks.sliding_window_view(value, Z_WINDOW)
    scores: FloatArray = (value[Z_WINDOW - 1 :] - windows.mean(axis=1)) / (windows.std(axis=1) + Z_EPSILON)
    return scores


def z_rule(t_s: FloatArray, value: FloatArray) -> bool:
    """Any |z| > 2.5."""
    scores = z_scores(value)
    return bool(len(scores) and np.abs(scores).max() > Z_LIMIT)


def medians(t_s: FloatArray, value: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Of half hours: what tests of trend are usually given."""
    index = (t_s // MEDIAN_S).astype(np.int64)
    edges = np.flatnonzero(np.r_[True, index[1:] != index[:-1]])
    parts = np.split(np.arange(len(t_s)), edges[1:])
    return np.array([t_s[p].mean() for p in parts]), np.array([np.median(value[p]) for p in parts])


def mann_kendall(t_s: FloatArray, value: FloatArray) -> bool:
    """Kendall's tau against time, upwards, p < 0.05 (Mann 1945)."""
    from scipy.stats import kendalltau

    times, middle = medians(t_s, value)
    if len(times) < 8:
        return False
    found = kendalltau(times, middle)
    return bool(found.statistic > 0 and found.pvalue < SIGNIFICANT)


def straight_line(t_s: FloatArray, value: FloatArray) -> bool:
    """Least squares: slope > 0 and R² > 0.7."""
    times, middle = medians(t_s, value)
    if len(times) < 8 or not np.ptp(middle):
        return False
    slope = np.polyfit(times, middle, 1)[0]
    return bool(slope > 0 and np.corrcoef(times, middle)[0, 1] ** 2 > MIN_R2)


RIVALS: dict[str, Rule] = {
    r"z rule, \|z\| > 2.5 of 180": z_rule,
    "Mann–Kendall, p < 0.05": mann_kendall,
    "least squares, R² > 0.7": straight_line,
}

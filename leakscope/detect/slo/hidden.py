"""Memory that a cache takes beyond what it says that it uses: RSS minus used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leakscope.detect.series.fit import straight, theil_sen

FloatArray = npt.NDArray[np.float64]

RATIO_WINDOW_S = 120.0
LEAST_USED_GROWTH_BYTES = 1 << 20
LEAST_USED_GROWTH_SHARE = 0.01
"""Used memory must have grown by both for a ratio: one MiB over a tenth of one would read 900 %."""
MIN_READINGS = 30
MIN_SPAN_S = 600.0
MAX_POINTS = 240
Z95 = 1.96
HOUR_S = 3600.0


@dataclass(frozen=True)
class HiddenGrowth:
    """Slope of RSS - used, with its 95 % interval; ``per_hour``: ``low`` in an hour as a share of the median RSS."""

    bytes_per_s: float
    low: float
    high: float
    per_hour: float


def hidden_growth_ratio(rss_growth_bytes: float, used_growth_bytes: float, used_bytes: float) -> float | None:
    """(growth of RSS - growth of used) / growth of used.

    None unless used memory grew by more than :data:`LEAST_USED_GROWTH_BYTES` and :data:`LEAST_USED_GROWTH_SHARE` of
    ``used_bytes``: near 0 the ratio has no meaning, and below 0 its sign says the opposite (memory that the cache freed
    and the process kept would read as -1).
    """
    if used_growth_bytes <= max(LEAST_USED_GROWTH_BYTES, LEAST_USED_GROWTH_SHARE * used_bytes):
        return None
    return (rss_growth_bytes - used_growth_bytes) / used_growth_bytes


def hidden_growth(t_s: FloatArray, rss_bytes: FloatArray, used_bytes: FloatArray) -> HiddenGrowth | None:
    """The Theil-Sen slope of RSS - used; float64[n] each, times in rising order.

    The interval is 1.96 standard errors of a straight line, widened by the autocorrelation of what it leaves. None
    before :data:`MIN_READINGS` readings over :data:`MIN_SPAN_S`. Long series are reduced to medians of equal counts.
    """
    if len(t_s) < MIN_READINGS or t_s[-1] - t_s[0] < MIN_SPAN_S:
        return None
    level = float(np.median(rss_bytes))
    if level <= 0:
        return None
    hidden = rss_bytes - used_bytes
    if len(t_s) > MAX_POINTS:
        parts = np.array_split(np.arange(len(t_s)), MAX_POINTS)
        t_s = np.array([np.median(t_s[part]) for part in parts])
        hidden = np.array([np.median(hidden[part]) for part in parts])
    slope = theil_sen(t_s, hidden)
    _, error = straight(t_s, hidden)
    low = slope - Z95 * error
    return HiddenGrowth(slope, low, slope + Z95 * error, low * HOUR_S / level)

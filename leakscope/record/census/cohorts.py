"""Cohorts: what was allocated in the same window of time. Windows grow with age, so that there are few of them.

Times are intervals since the start of the recording. A window is a block of 2^k intervals that begins at a multiple of
2^k; k is the largest for which the block ended at least 4 · 2^k intervals ago. So the older window takes in whole
younger ones, and T intervals make about 4 · log2(T) windows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
AGE_IN_WINDOWS = 4


def window_starts(births: IntArray, now: int) -> IntArray:
    """First interval of the window that each birth (int64[n], in intervals) belongs to at the time ``now``.

    Birth and start of its window belong to the same window at any later time.
    """
    starts = births.copy()
    level = 1
    old = np.ones(len(births), bool)
    while old.any():
        ends = ((births >> level) + 1) << level
        old &= now - ends >= AGE_IN_WINDOWS << level
        starts[old] = (births[old] >> level) << level
        level += 1
    return starts

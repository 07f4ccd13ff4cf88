"""Two counts of kept objects: is one more than chance makes of the other?"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

FALSE_ALARMS = 1e-4
"""Chance that two clean runs differ in one of all their sites. Kept objects come as a Poisson process; by how many
standard deviations head must exceed the baseline follows from the number of sites (Bonferroni)."""


def least_sigmas(sites: int) -> float:
    """Standard deviations that a site must exceed the baseline by, of so many sites."""
    return NormalDist().inv_cdf(1 - FALSE_ALARMS / max(sites, 1))


def sigmas(kept: float, expected: float, ratio: float) -> float:
    """By how many standard deviations a Poisson count exceeds what another one, times ``ratio``, gives.

    Counts go by their square roots, whose variance is a quarter whatever their mean (Anscombe 1948); the plain
    difference calls too many of the small counts.
    """
    before = max(0.0, expected) / ratio
    root = np.sqrt(max(0.0, kept) + 0.375) - np.sqrt(ratio * (before + 0.375))
    return float(2 * root / np.sqrt(1 + ratio))


def most_by_chance(expected: float, ratio: float, least: float) -> float:
    """The count whose :func:`sigmas` are ``least``."""
    before = max(0.0, expected) / ratio
    root = np.sqrt(ratio * (before + 0.375)) + least * np.sqrt(1 + ratio) / 2
    return float(max(0.0, root**2 - 0.375))

"""Bytes of allocations without a stack of their own, apportioned to the sampled stacks of their call site.

A hot call site gives its own stack to one allocation in N (its row has weight N) and none to the others
(weight 0). Each sampled survivor thus speaks for N - 1 others, the Horvitz-Thompson weight of what was not
sampled: live bytes of the pool are shared by the (w - 1)-weighted live bytes of the stacks, what has ended
by their (w - 1)-weighted ended bytes; allocated is the sum of both. Without a sampled survivor, those that took
their own stack while the call site was slow (weight 1) speak for the pool; without any, it stays a site of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def largest_remainder(totals: IntArray, group: IntArray, shares: FloatArray) -> IntArray:
    """Integers that split ``totals[group]`` by ``shares`` and sum to it exactly in each group.

    totals: int64[G]; group: int64[M], the group of each member; shares: float64[M], summing to 1 in each
    group. Returns int64[M]. Left-over units go to the largest fractions (the earlier member on a tie).
    """
    exact = totals[group] * shares
    whole = np.floor(exact).astype(np.int64)
    left = totals - np.bincount(group, weights=whole, minlength=len(totals)).astype(np.int64)
    order = np.lexsort((np.arange(len(group)), -(exact - whole), group))
    sorted_group = group[order]
    starts = np.searchsorted(sorted_group, np.arange(len(totals)))
    rank = np.arange(len(group)) - starts[sorted_group]
    # Shares that sum to 1 only within rounding can leave more units than members: go round again.
    members = np.bincount(group, minlength=len(totals))[sorted_group]
    extra = left[sorted_group] // members + (rank < left[sorted_group] % members)
    whole[order] += extra
    return whole


def shares_within(group: IntArray, mass: FloatArray, groups: int) -> FloatArray:
    """``mass`` divided by its sum in each group: float64[M], 0 where the group's sum is 0."""
    total = np.bincount(group, weights=mass, minlength=groups)[group]
    return np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)


def standard_error(pool_bytes: IntArray, group: IntArray, share: FloatArray, survivors: FloatArray) -> FloatArray:
    """Standard error in bytes of each member's part of its pool: total * sqrt(p (1 - p) / n).

    The binomial error of a share p estimated from the n sampled survivors of the group (float64[G]).
    """
    n = np.maximum(survivors[group], 1.0)
    relative: FloatArray = np.sqrt(share * (1.0 - share) / n)
    return pool_bytes[group].astype(np.float64) * relative

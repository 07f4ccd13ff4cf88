"""Lifetimes and nesting in numpy: which allocation a free ends, which range encloses another.

All functions take parallel arrays and return row numbers, -1 for none. Nothing is done row by row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Lifetimes(NamedTuple):
    """How rows of one address follow each other."""

    alloc_of: Ints  # for a free, the row of the allocation that it ends; -1 for allocations and unknown ones
    replaced: Ints  # rows of allocations whose address was handed out again although no free was seen
    replaced_by: Ints  # and the rows of the allocations that got it


def lifetimes(is_alloc: npt.NDArray[np.bool_], *keys: npt.NDArray[Any]) -> Lifetimes:
    """Pairs each free with the allocation before it that has the same ``keys`` (an address and what it belongs to).

    Rows are in the order of time. A second free of an address without an allocation in between ends nothing.
    """
    count = len(is_alloc)
    order = np.lexsort((np.arange(count), *keys))
    same = np.ones(max(count - 1, 0), bool)
    for key in keys:
        same &= key[order[1:]] == key[order[:-1]]
    alloc = is_alloc[order]
    follows_alloc = same & alloc[:-1] if count else same
    alloc_of = np.full(count, -1, np.int64)
    ends = np.flatnonzero(follows_alloc & ~alloc[1:]) if count else np.empty(0, np.int64)
    alloc_of[order[ends + 1]] = order[ends]
    again = np.flatnonzero(follows_alloc & alloc[1:]) if count else np.empty(0, np.int64)
    return Lifetimes(alloc_of, order[again], order[again + 1])


def enclosing(group: npt.NDArray[Any], start: Ints, end: Ints) -> Ints:
    """For each interval the one of its group that was open when it started and started last.

    Of intervals that start together the longer encloses. Where intervals of a group are nested, as calls of a
    thread are, that is the parent. Pointer jumping: about log2(n) passes.
    """
    count = len(start)
    order = np.lexsort((-end, start, group))
    group, start, end = group[order], start[order], end[order]
    parent = np.arange(-1, count - 1)
    while True:
        ended = parent >= 0
        at = parent[ended]
        ended[ended] = (end[at] <= start[ended]) | (group[at] != group[ended])
        if not ended.any():
            break
        other = group[parent[ended]] != group[ended]  # everything of this group before it has ended
        parent[ended] = np.where(other, -1, parent[parent[ended]])
    result = np.full(count, -1, np.int64)
    known = parent >= 0
    result[order[known]] = order[parent[known]]
    return result


def innermost(group: npt.NDArray[Any], start: Ints, end: Ints, query_group: npt.NDArray[Any], query: Ints) -> Ints:
    """For each time ``query`` the interval of its group that is open then and started last."""
    if not len(start):
        return np.full(len(query), -1, np.int64)
    parent = enclosing(group, start, end)
    groups = np.concatenate([group, query_group])
    times = np.concatenate([start, query])
    is_query = np.concatenate([np.zeros(len(start), np.int8), np.ones(len(query), np.int8)])
    ends = np.concatenate([-end, np.zeros(len(query), np.int64)])
    order = np.lexsort((ends, is_query, times, groups))
    last = np.where(is_query[order] == 0, np.arange(len(order)), -1)
    last = np.maximum.accumulate(last)
    candidate = np.full(len(order), -1, np.int64)
    candidate[order] = np.where(last >= 0, order[last], -1)
    found = candidate[len(start) :]
    found[(found >= 0) & (group[found] != query_group)] = -1
    while True:
        closed = np.flatnonzero(found >= 0)
        closed = closed[end[found[closed]] <= query[closed]]
        if not len(closed):
            return found
        found[closed] = parent[found[closed]]

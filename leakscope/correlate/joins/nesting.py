"""Rule 1, nesting: what happened on a thread while a call of the same thread was open. Exact: parent and child.

A kernel allocation in a CUDA call, a driver call in a runtime call, a map in malloc: each is an event of a thread and
the intervals of that thread. One search a depth of the calls, the deepest that holds wins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from leakscope.correlate.joins.timeline import Ints, Timeline

MAX_DEPTH = 8
"""Calls nested deeper than this count as part of the one at this depth; real ones nest three deep."""


class Intervals(NamedTuple):
    """Calls or ranges, parallel int64 arrays: thread (any number of it), start_ns, end_ns (both inside)."""

    thread: Ints
    start_ns: Ints
    end_ns: Ints


def depths(calls: Intervals) -> Ints:
    """int64[n]: 0 for outermost intervals, 1 for those directly inside one, …"""
    parent = parents(calls)
    depth = np.zeros(len(parent), np.int64)
    above = parent
    for _ in range(MAX_DEPTH):
        inside = above >= 0
        if not inside.any():
            break
        depth += inside
        above = np.where(inside, parent[np.maximum(above, 0)], -1)
    return depth


def parents(calls: Intervals) -> Ints:
    """int64[n]: the row of the innermost interval of the same thread around each, -1 for outermost ones."""
    from nsight_parsers.intervals import enclosing

    return enclosing(calls.thread, calls.start_ns, calls.end_ns + 1)


class CallIndex:
    """Calls prepared for many searches; those of a thread must nest. ``depth``: that of each call, where it is known
    already (:func:`depths`)."""

    def __init__(self, calls: Intervals, depth: Ints | None = None) -> None:
        depth = depths(calls) if depth is None else depth
        self._calls = calls
        self._threads = np.unique(calls.thread)
        self._levels = []
        for level in range(int(depth.max(initial=-1)) + 1):
            rows = np.flatnonzero(depth == level)
            self._levels.append((rows, Timeline(calls.thread[rows], calls.start_ns[rows])))

    def innermost(self, thread: Ints, at_ns: Ints) -> Ints:
        """int64[n]: for each (thread, time) the row of the innermost call open then, -1 where none is."""
        found = np.full(len(at_ns), -1, np.int64)
        asked = np.flatnonzero(np.isin(thread, self._threads))
        for rows, timeline in self._levels:
            at = timeline.before(thread[asked], at_ns[asked])
            inside = at >= 0
            inside[inside] = self._calls.end_ns[rows[at[inside]]] >= at_ns[asked[inside]]
            asked, at = asked[inside], at[inside]  # what is in no call of this depth is in none below
            found[asked] = rows[at]
        return found


def nested_in(calls: Intervals, thread: Ints, at_ns: Ints) -> Ints:
    """:meth:`CallIndex.innermost` of a single search."""
    return CallIndex(calls).innermost(thread, at_ns)

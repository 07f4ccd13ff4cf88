"""Rule 3, window: same process, near in time. The weakest of the joins by time, never applied to what nests.

The windows and their widths are those of the source document: ±50 µs for kernel events, ±100 µs for GPU events, launch
latency included. Nearness proves nothing: a pair is *ambiguous* when several calls lie inside its window, and the share
that chance alone explains is taken off the confidence (:func:`beyond_chance`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from leakscope.correlate.joins.nesting import Intervals
from leakscope.correlate.joins.timeline import Ints, Timeline

KERNEL_WINDOW_NS = 50_000
GPU_WINDOW_NS = 100_000


class Near(NamedTuple):
    """For each event: the row of the nearest call within the window (-1 for none), how far it is in ns (0 inside it),
    and how many calls lie within the window."""

    row: Ints
    distance_ns: Ints
    candidates: Ints


class NearIndex:
    """Calls prepared for many searches; ``calls.thread`` holds processes here."""

    def __init__(self, calls: Intervals) -> None:
        self._calls = calls
        self._by_start, self._by_end = Timeline(calls.thread, calls.start_ns), Timeline(calls.thread, calls.end_ns)

    def near(self, process: Ints, at_ns: Ints, window_ns: int) -> Near:
        """The call of the same process that is nearest to each event."""
        row = np.full(len(at_ns), -1, np.int64)
        distance = np.full(len(at_ns), np.iinfo(np.int64).max, np.int64)
        begun = self._by_start.count_until(process, at_ns + window_ns)
        ended = self._by_end.count_until(process, at_ns - window_ns, inclusive=False)
        candidates = begun - ended
        asked = np.flatnonzero(candidates > 0)
        process, at_ns = process[asked], at_ns[asked]
        for candidate in (
            self._by_start.before(process, at_ns),  # may hold the event, or have ended before it
            self._by_start.after(process, at_ns),
            self._by_end.before(process, at_ns),
        ):
            known = np.flatnonzero(candidate >= 0)
            call, event = candidate[known], asked[known]
            start, end = self._calls.start_ns[call], self._calls.end_ns[call]
            far = np.maximum(np.maximum(start - at_ns[known], at_ns[known] - end), 0)
            nearer = far < distance[event]
            row[event[nearer]], distance[event[nearer]] = call[nearer], far[nearer]
        row[distance > window_ns] = -1
        return Near(row, distance, candidates)


def near_calls(calls: Intervals, process: Ints, at_ns: Ints, window_ns: int) -> Near:
    """:meth:`NearIndex.near` of a single search."""
    return NearIndex(calls).near(process, at_ns, window_ns)


def covered_share(calls: Intervals, process: int, from_ns: int, until_ns: int, window_ns: int) -> float:
    """Which share of a span of time lies within the window of some call of a process: what chance alone pairs."""
    own = calls.thread == process
    start, end = calls.start_ns[own] - window_ns, calls.end_ns[own] + window_ns
    if not len(start) or until_ns <= from_ns:
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = np.clip(start[order], from_ns, until_ns), np.clip(end[order], from_ns, until_ns)
    reached = np.concatenate([[from_ns], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(start, reached), 0).sum() / (until_ns - from_ns))


def beyond_chance(share: float, covered: float) -> float:
    """Confidence 0..1 of a window link: the share of events near calls, less what chance pairs, over what it could be
    (the form of Cohen's kappa)."""
    return 0.0 if covered >= 1.0 else max(0.0, (share - covered) / (1.0 - covered))

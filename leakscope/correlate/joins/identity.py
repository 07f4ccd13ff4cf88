"""One allocation seen by two sources: same process, address and size, near in time.

The strongest join across sources. It measures how well their clocks agree, and keeps each byte from being counted
twice. An address is handed out again after a free, so of several the nearest in time counts, and only when each is the
other's nearest. A recording knows the whole call, whose inner moment a report stamps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leakscope.correlate.joins.timeline import Ints, Timeline, combined

TOLERANCE_NS = 10_000_000
"""Beyond the error of the clocks: a call that allocates takes up to milliseconds, and sources stamp different ends."""


class Allocations(NamedTuple):
    """Parallel arrays: process (int64), address (uint64), size_bytes (int64), at_ns (int64). ``begin_ns``: where the
    call that allocated is known from begin to end (``at_ns``), its begin; a moment inside it is at no distance."""

    process: Ints
    address: npt.NDArray[np.uint64]
    size_bytes: Ints
    at_ns: Ints
    begin_ns: Ints | None = None

    @property
    def begins_ns(self) -> Ints:
        """``begin_ns``, or ``at_ns`` where calls are moments."""
        return self.at_ns if self.begin_ns is None else self.begin_ns


class Same(NamedTuple):
    """Pairs of rows, and how many left rows had a partner that another one is nearer to."""

    left: Ints
    right: Ints
    ambiguous: int


def same_allocations(left: Allocations, right: Allocations, tolerance_ns: int = TOLERANCE_NS) -> Same:
    """Pairs of rows of ``left`` and ``right`` that are one allocation; each row is in one pair at most."""
    keys = [combined(s.process, s.address, s.size_bytes) for s in (left, right)]
    to_right = _nearest(keys[0], left, keys[1], right, tolerance_ns)
    to_left = _nearest(keys[1], right, keys[0], left, tolerance_ns)
    rows = np.flatnonzero(to_right >= 0)
    mutual = to_left[to_right[rows]] == rows
    pairs = rows[mutual], to_right[rows[mutual]]
    equal = (left.address[pairs[0]] == right.address[pairs[1]]) & (
        left.size_bytes[pairs[0]] == right.size_bytes[pairs[1]]
    )
    equal &= left.process[pairs[0]] == right.process[pairs[1]]
    return Same(pairs[0][equal], pairs[1][equal], int((~mutual).sum()))


def seen_once_each(left: Allocations, right: Allocations) -> tuple[Ints, Ints]:
    """Pairs of rows whose (process, address, size) occurs exactly once on each side: sure whatever the clocks say."""
    keys = [combined(s.process, s.address, s.size_bytes) for s in (left, right)]
    firsts = []
    for key in keys:
        unique, first, count = np.unique(key, return_index=True, return_counts=True)
        firsts.append((unique[count == 1], first[count == 1]))
    _, in_left, in_right = np.intersect1d(firsts[0][0], firsts[1][0], assume_unique=True, return_indices=True)
    return firsts[0][1][in_left].astype(np.int64), firsts[1][1][in_right].astype(np.int64)


def _nearest(key: Ints, rows: Allocations, other_key: Ints, other: Allocations, tolerance_ns: int) -> Ints:
    """int64[n]: the row of ``other`` with the same key that is nearest in time, -1 beyond the tolerance."""
    timeline = Timeline(other_key, other.at_ns)
    best = np.full(len(key), -1, np.int64)
    distance = np.full(len(key), tolerance_ns + 1, np.int64)
    begin, end = rows.begins_ns, rows.at_ns
    for candidate in (timeline.before(key, end), timeline.after(key, end)):
        known = np.flatnonzero(candidate >= 0)
        found = candidate[known]
        far = np.maximum(begin[known] - other.at_ns[found], other.begins_ns[found] - end[known])
        far = np.maximum(far, 0)
        nearer = far < distance[known]
        best[known[nearer]], distance[known[nearer]] = found[nearer], far[nearer]
    return best

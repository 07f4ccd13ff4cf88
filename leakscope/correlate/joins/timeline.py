"""The one search of all joins: rows of many keys (a thread, a process, an address), each key's in order of time.

A (key, time) becomes one number, so that millions of questions are one ``searchsorted``. A range join would compare
every pair of a key; this takes n log m.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

CHUNK = 1 << 20
"""Questions answered at once: bounds the memory of the arrays in between."""


class Timeline:
    """``key`` and ``at_ns`` are parallel int64 arrays; answers are row numbers of them."""

    def __init__(self, key: Ints, at_ns: Ints) -> None:
        self._keys = _sorted_unique(key)
        self._times = _sorted_unique(at_ns)
        self._stride = len(self._times) + 1
        code = np.searchsorted(self._keys, key)
        self.order: Ints = np.lexsort((at_ns, code)).astype(np.int64)
        """Row numbers sorted by key and time: what positions point into."""
        self._place = (code * self._stride + np.searchsorted(self._times, at_ns))[self.order]

    def before(self, key: Ints, at_ns: Ints) -> Ints:
        """int64[n]: the last row of each key at or before each time, -1 for none."""
        return self._chunked(self._before, key, at_ns)

    def after(self, key: Ints, at_ns: Ints) -> Ints:
        """int64[n]: the first row of each key after each time, -1 for none."""
        return self._chunked(self._after, key, at_ns)

    def count_until(self, key: Ints, at_ns: Ints, inclusive: bool = True) -> Ints:
        """int64[n]: how many rows of each key lie at or before (``inclusive``) or before each time."""
        first, position = self._positions(key, at_ns, "right" if inclusive else "left")
        return np.where(first >= 0, position - first, 0)

    def _before(self, key: Ints, at_ns: Ints) -> Ints:
        first, position = self._positions(key, at_ns, "right")
        return self._rows(position - 1, (first >= 0) & (position > first))

    def _after(self, key: Ints, at_ns: Ints) -> Ints:
        first, position = self._positions(key, at_ns, "right")
        code = np.minimum(np.searchsorted(self._keys, key), max(len(self._keys) - 1, 0))
        end = np.searchsorted(self._place, (code + 1) * self._stride)
        return self._rows(position, (first >= 0) & (position < end))

    def _positions(self, key: Ints, at_ns: Ints, side: Any) -> tuple[Ints, Ints]:
        """(where the key's rows begin, -1 for an unknown key; where the time belongs among them)."""
        if not len(self._keys):
            none = np.full(len(key), -1, np.int64)
            return none, none
        code = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        known = self._keys[code] == key
        begin = np.searchsorted(self._place, np.arange(len(self._keys), dtype=np.int64) * self._stride)[code]
        position = np.searchsorted(self._place, code * self._stride + np.searchsorted(self._times, at_ns, side))
        return np.where(known, begin, -1), np.where(known, position, -1)

    def _rows(self, position: Ints, valid: npt.NDArray[np.bool_]) -> Ints:
        found = np.full(len(position), -1, np.int64)
        found[valid] = self.order[position[valid]]
        return found

    @staticmethod
    def _chunked(what: Callable[[Ints, Ints], Ints], key: Ints, at_ns: Ints) -> Ints:
        if len(key) <= CHUNK:
            return what(key, at_ns)
        pieces = [what(key[i : i + CHUNK], at_ns[i : i + CHUNK]) for i in range(0, len(key), CHUNK)]
        return np.concatenate(pieces)


def _sorted_unique(values: Ints) -> Ints:
    """As ``numpy.unique``, which hashes before it sorts: five times slower on distinct times."""
    ordered = np.sort(values)
    return ordered[np.concatenate([np.ones(min(len(ordered), 1), bool), ordered[1:] != ordered[:-1]])]


def combined(*columns: npt.NDArray[Any]) -> Ints:
    """int64[n]: one number for the values of several integer columns.

    Mixed as by splitmix64: different values share a number with a chance of about n² / 2^65, so a join on it compares
    the columns themselves afterwards.
    """
    with np.errstate(over="ignore"):
        mixed = np.zeros(len(columns[0]), np.uint64)
        for column in columns:
            mixed = mixed + column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed.view(np.int64)


def thread_key(pid: npt.NDArray[Any], tid: npt.NDArray[Any]) -> Ints:
    """int64[n]: one number for each thread of each process."""
    return (pid.astype(np.int64) << 32) | tid.astype(np.int64)

"""When processes ended: asked for each free of a recording, of as many processes as there are PIDs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt


class Exits:
    """The time at which the latest exit of each PID began, in nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._pids = np.empty(0, np.int64)  # in order
        self._times = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._pids)

    def add(self, ended: Mapping[int, int]) -> None:
        """Processes that ended: PID → time."""
        if not ended:
            return
        new = np.array(sorted(ended.items()), np.int64)
        kept = ~np.isin(self._pids, new[:, 0], assume_unique=True)
        pids, times = self._pids[kept], self._times[kept]
        at = np.searchsorted(pids, new[:, 0])
        self._pids, self._times = np.insert(pids, at, new[:, 0]), np.insert(times, at, new[:, 1])

    def times(self, pids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """int64 times for an array of PIDs, 0 for one that has not ended."""
        asked = np.asarray(pids)
        if not len(self._pids):
            return np.zeros(len(asked), np.int64)
        at = np.minimum(np.searchsorted(self._pids, asked), len(self._pids) - 1)
        return np.where(self._pids[at] == asked, self._times[at], 0)

    def forget(self, pids: Iterable[int]) -> None:
        """Drop processes of which nothing is live any more."""
        kept = ~np.isin(self._pids, np.fromiter(pids, np.int64))
        self._pids, self._times = self._pids[kept], self._times[kept]

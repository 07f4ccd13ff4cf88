"""Sites that free as much as they allocate leave the stacks that a CPU may take to slow and to growing sites."""

from __future__ import annotations

from collections import deque

import numpy as np

from leakscope.record.kernel.bpf import Map
from leakscope.record.records import OP_ALLOC

WINDOW_NS = 1_000_000_000
WINDOWS = 4
BUSY_PER_WINDOW = 2_000
"""Allocations of a busy site. Slower ones take all their stacks anyway."""
GROWTH_SHARE = 512
"""A site grows that keeps more than one in so many of its allocations, over all windows together."""
GROWTH_SLACK = 16
"""Objects: what is in flight at the ends of the windows looks kept, or freed once too often."""


class SettledSites:
    """Counts allocations and frees by site and tells the probes, once a window, which sites settled.

    Settled is a site that was busy in each of the last windows and kept next to nothing over all of them. One window
    of growth ends it. For use by one thread.
    """

    def __init__(self, settled: Map) -> None:
        """`settled`: the map of that name, u32 by site number less one."""
        self._map = settled
        self._ends_ns = 0
        self._counts = np.zeros((2, settled.entries + 1), np.int64)  # allocated and ended in this window, by site
        self._windows: deque[np.ndarray] = deque(maxlen=WINDOWS)
        self._settled = np.zeros(settled.entries + 1, bool)

    def follow(self, batch: np.ndarray, ts_ns: int) -> None:
        """Count a batch of MEM_RECORD that was drained at `ts_ns`."""
        sites = batch["site"].astype(np.int64)
        np.minimum(sites, self._map.entries, out=sites)
        ends = batch["op"] != OP_ALLOC
        counts = np.bincount(2 * sites + ends, minlength=2 * (self._map.entries + 1))
        self._counts += counts.reshape(-1, 2).T
        if ts_ns < self._ends_ns:
            return
        if self._ends_ns:
            self._windows.append(self._counts)
            self._counts = np.zeros_like(self._counts)
            self._decide()
        self._ends_ns = ts_ns + WINDOW_NS

    def _decide(self) -> None:
        allocated = np.array([window[0] for window in self._windows])
        kept = sum(window[0] - window[1] for window in self._windows)
        settled = (len(self._windows) == WINDOWS) & (allocated >= BUSY_PER_WINDOW).all(axis=0)
        settled &= kept <= np.maximum(allocated.sum(axis=0) // GROWTH_SHARE, GROWTH_SLACK)
        for site in np.flatnonzero(settled != self._settled).tolist():
            if site:  # numbers begin at 1
                self._map.update((site - 1).to_bytes(4, "little"), int(settled[site]).to_bytes(4, "little"))
        self._settled = settled

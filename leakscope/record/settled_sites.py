"""Sites that free as much as they allocate leave the stacks that a CPU may take to slow and to growing sites."""

from __future__ import annotations

from collections import deque

import numpy as np

from leakscope.record.kernel.bpf import Map
from leakscope.record.records import OP_ALLOC

WINDOW_NS = 1_000_000_000
BUSY_WINDOWS = 4
BUSY_PER_WINDOW = 1_000
"""Allocations of a busy site in each of the last windows. Slower ones take nearly all their stacks: these are few."""
HISTORY = 16
"""Windows that growth is looked for in."""
RECENT = 2
"""Windows at whose ends what was gained has to be live still; before, so much was not live at the end of any."""
GROWTH_SHARE = 512
"""A site grows that gains more than one in so many of the allocations of all these windows together."""
GROWTH_SLACK = 8
"""Objects: what is in flight at the ends of windows looks gained."""


class SettledSites:
    """Counts allocations and frees by site and tells the probes, once a window, which sites settled.

    Settled is a site that was busy in each of the last windows and does not grow: what is live at the ends of the last
    two is hardly more than the least that was live at the end of one before. For use by one thread.
    """

    def __init__(self, settled: Map) -> None:
        """`settled`: the map of that name, u32 by site number less one."""
        self._map = settled
        self._ends_ns = 0
        self._counts = np.zeros((2, settled.entries + 1), np.int64)  # allocated and ended in this window, by site
        self._live_now = np.zeros(settled.entries + 1, np.int64)  # less what was live at the start
        self._allocated: deque[np.ndarray] = deque(maxlen=HISTORY)
        self._live: deque[np.ndarray] = deque(maxlen=HISTORY)
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
            self._live_now = self._live_now + self._counts[0] - self._counts[1]
            self._allocated.append(self._counts[0])
            self._live.append(self._live_now)
            self._counts = np.zeros_like(self._counts)
            self._decide()
        self._ends_ns = ts_ns + WINDOW_NS

    def _decide(self) -> None:
        if len(self._live) < BUSY_WINDOWS:
            return
        allocated, live = np.array(self._allocated), np.array(self._live)
        gained = live[-RECENT:].min(axis=0) - live[:-RECENT].min(axis=0)
        settled = (allocated[-BUSY_WINDOWS:] >= BUSY_PER_WINDOW).all(axis=0)
        settled &= gained <= np.maximum(allocated.sum(axis=0) // GROWTH_SHARE, GROWTH_SLACK)
        for site in np.flatnonzero(settled != self._settled).tolist():
            if site:  # numbers begin at 1
                self._map.update((site - 1).to_bytes(4, "little"), int(settled[site]).to_bytes(4, "little"))
        self._settled = settled

"""How much sites gained in the last so many seconds."""

from __future__ import annotations

from collections import deque

import numpy as np

from leakscope.record.live.sites import IntArray, Keys

LEAST_S = 10.0
STEPS = 12
"""States that are remembered in a window."""


class GrowthWindow:
    """Compares sums by site with what they were a window ago; before the recording began, all were 0.

    The window is ``span_s``, at first the later half of the recording, so that a start-up soon lies before it, but
    LEAST_S at least.
    """

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        none = np.empty(0, np.int64)
        self._states: deque[tuple[float, Keys, IntArray]] = deque([(0.0, none.view(np.uint64), none)])

    def growth(self, elapsed_s: float, keys: Keys, kept: IntArray) -> tuple[IntArray, float]:
        """(what each site gained, over how many seconds). Sites that were not there before gained all they keep."""
        window_s = min(self.span_s, max(LEAST_S, elapsed_s / 2))
        states = self._states
        while len(states) > 1 and states[1][0] <= elapsed_s - window_s:
            states.popleft()
        then_s, then_keys, then = states[0]
        before = np.zeros(len(keys), np.int64)
        if len(then_keys):
            at = np.minimum(np.searchsorted(then_keys, keys), len(then_keys) - 1)
            known = then_keys[at] == keys
            before[known] = then[at[known]]
        if elapsed_s - states[-1][0] >= window_s / STEPS:
            order = np.argsort(keys)
            states.append((elapsed_s, keys[order], kept[order]))
        return kept - before, elapsed_s - then_s

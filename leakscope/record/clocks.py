"""Reading the clocks that anchor a recording to wall time."""

from __future__ import annotations

import time

from leakscope.model.manifest import ClockAnchor


def read_anchor() -> ClockAnchor:
    """REALTIME, MONOTONIC and BOOTTIME back to back; of five readings the one taken fastest."""
    best: tuple[int, ClockAnchor] | None = None
    for _ in range(5):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        realtime = time.clock_gettime_ns(time.CLOCK_REALTIME)
        boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        anchor = ClockAnchor(realtime, (before + after) // 2, boottime)
        if best is None or after - before < best[0]:
            best = (after - before, anchor)
    assert best is not None
    return best[1]


def monotonic_ns() -> int:
    """CLOCK_MONOTONIC, the clock of all events of a recording."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

"""The course of a counter in few points, and as a line of bars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = " .:-=+*#"
"""For terminals whose encoding has no blocks."""
MOST_POINTS = 256


class Course:
    """Readings of one counter over time. However long it goes on, it holds MOST_POINTS at most, evenly spread."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._values: list[float] = []
        self._gap_s = 0.0

    def add(self, elapsed_s: float, value: float) -> None:
        """Take a reading. The last point moves with the readings until it is a whole gap behind the one before."""
        if len(self._times) > 1 and elapsed_s - self._times[-2] < self._gap_s:
            self._times[-1], self._values[-1] = elapsed_s, value
            return
        self._times.append(elapsed_s)
        self._values.append(value)
        if len(self._times) > MOST_POINTS:
            self._gap_s = 2 * (self._times[-1] - self._times[0]) / MOST_POINTS
            last = self._times[-1], self._values[-1]
            self._times, self._values = [*self._times[:-1:2], last[0]], [*self._values[:-1:2], last[1]]

    @property
    def values(self) -> tuple[float, ...]:
        """The points, oldest first."""
        return tuple(self._values)

    def change(self, window_s: float) -> tuple[float, float]:
        """(what it gained, in how many seconds) since the last point that is a window old, or the first."""
        if not self._times:
            return 0.0, 0.0
        since = self._times[-1] - window_s
        at = max(0, int(np.searchsorted(self._times, since, "right")) - 1)
        return self._values[-1] - self._values[at], self._times[-1] - self._times[at]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(times, values) as float64[n]."""
        return np.array(self._times), np.array(self._values)


def sparkline(values: Sequence[float], width: int | None = None, bars: str = BARS) -> str:
    """A bar a value, from the least to the greatest; flat where they are the same.

    :param width: most bars; where there are more values, each bar is the last of its share.
    """
    if not values or (width is not None and width <= 0):
        return ""
    if width is not None and len(values) > width:
        values = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    low, high = min(values), max(values)
    if high <= low:
        return bars[0] * len(values)
    return "".join(bars[min(7, int((v - low) / (high - low) * 8))] for v in values)

"""When a long recording is read out and written: often at first, ever more rarely, so that its size stays bounded."""

from __future__ import annotations

from dataclasses import dataclass

EARLY_READOUTS = 100
"""Readouts at a tenth of the interval, at first: a short recording has enough of them to be judged."""
MOST_READOUTS = 1000
"""From then on the gap is this part of the time recorded: each factor of e in time adds as many readouts."""
MOST_PARTS = 500
"""The same for parts of a table: 72 hours make some 3,000."""


@dataclass(frozen=True)
class Schedule:
    """Gaps of a recording that is read out each `interval_s` seconds and written each `flush_s`."""

    interval_s: float
    flush_s: float

    def readout_gap_s(self, elapsed_s: float) -> float:
        """Seconds from a readout to the next."""
        if elapsed_s < self.interval_s * EARLY_READOUTS / 10:
            return self.interval_s / 10
        return max(self.interval_s, elapsed_s / MOST_READOUTS)

    def write_gap_s(self, elapsed_s: float) -> float:
        """Seconds from a write to the next: the most that kill -9 loses besides a readout."""
        return max(self.flush_s, elapsed_s / MOST_PARTS)

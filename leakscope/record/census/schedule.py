"""When a long recording is read out and written: often at first, ever more rarely, so that its size stays bounded."""

from __future__ import annotations

from dataclasses import dataclass

EARLY_READOUTS = 100
"""Readouts at a tenth of the interval, at first: a short recording has enough of them to be judged."""
MOST_READOUTS = 1000
"""From then on the gap is this part of the time recorded: each factor of e in time adds as many readouts."""
WRITE_SHARE = 0.01
LONGEST_WRITE_GAP_S = 300.0
"""Parts are written when this share of the time recorded has passed since the last, or the time: 72 hours make some
1,500 of each table."""


@dataclass(frozen=True)
class Schedule:
    """Gaps of a recording that is read out each `interval_s` seconds and written each `flush_s`; `steady`: it is read
    out as often after days."""

    interval_s: float
    flush_s: float
    steady: bool = False

    def readout_gap_s(self, elapsed_s: float) -> float:
        """Seconds from a readout to the next."""
        if elapsed_s < self.interval_s * EARLY_READOUTS / 10:
            return self.interval_s / 10
        return self.interval_s if self.steady else max(self.interval_s, elapsed_s / MOST_READOUTS)

    def write_gap_s(self, elapsed_s: float) -> float:
        """Seconds from a write to the next: the most that kill -9 loses."""
        return max(self.flush_s, min(elapsed_s * WRITE_SHARE, LONGEST_WRITE_GAP_S))

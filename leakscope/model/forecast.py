"""When memory runs out, in the shape that reports render."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Forecast:
    """When a limit is reached if growth goes on: seconds from now, from the ends of the rate's interval.

    ``latest_s`` None: the interval reaches down to no growth, so it may never be.
    """

    counter: str
    level_bytes: float
    limit_bytes: float
    expected_s: float
    earliest_s: float
    latest_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "counter": self.counter,
            "level_bytes": round(self.level_bytes),
            "limit_bytes": round(self.limit_bytes),
            "expected_s": round(self.expected_s, 1),
            "earliest_s": round(self.earliest_s, 1),
            "latest_s": None if self.latest_s is None else round(self.latest_s, 1),
        }

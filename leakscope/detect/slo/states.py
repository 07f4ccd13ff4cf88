"""The two-threshold table: each objective's value is normal, suspected or critical, or unknown where there is none.

The three states share their two bounds, so no value lies between them. A state gets worse as soon as a bound is
reached, and better only when the value has gone past a second bound a tenth beyond it (hysteresis): a value that
trembles around a bound changes the state once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NORMAL, SUSPECTED, CRITICAL, UNKNOWN = "normal", "suspected", "critical", "unknown"
STATES = (NORMAL, SUSPECTED, CRITICAL, UNKNOWN)
LEVELS = (NORMAL, SUSPECTED, CRITICAL)
"""Better ones first."""
HYSTERESIS = 0.1


@dataclass(frozen=True)
class Objective:
    """One objective. ``goal`` is what it asks for, ``suspected`` and ``critical`` are the bounds of its states.

    Of objectives whose values are better low (``low_is_good``) a value at a bound is beyond it; of others it is not.
    ``goal_met_at``: whether the goal itself still meets it. ``unit``: of the value, for people.
    """

    name: str
    help: str
    unit: str
    goal: float
    suspected: float
    critical: float
    low_is_good: bool = True
    goal_met_at: bool = False

    def met(self, value: float | None) -> bool | None:
        """Whether ``value`` meets the goal; None for an unknown one."""
        if _unknown(value):
            return None
        assert value is not None
        if value == self.goal:
            return self.goal_met_at
        return (value < self.goal) == self.low_is_good

    def state(self, value: float | None, before: str = NORMAL) -> str:
        """The state of ``value``, one of :data:`STATES`; ``before``: the last one that was not unknown."""
        if _unknown(value):
            return UNKNOWN
        assert value is not None
        entered = self._level(value, 0.0)
        stays = self._level(value, HYSTERESIS)
        last = LEVELS.index(before) if before in LEVELS else 0
        return LEVELS[max(entered, min(last, stays))]

    def _level(self, value: float, eased: float) -> int:
        """How many bounds ``value`` is beyond, each eased by a share of it."""
        if self.low_is_good:
            return sum(value >= bound * (1 - eased) for bound in (self.suspected, self.critical))
        return sum(value < bound * (1 + eased) for bound in (self.suspected, self.critical))


def _unknown(value: float | None) -> bool:
    return value is None or math.isnan(value)


P99_JITTER = Objective(
    "p99_jitter", "Standard deviation over mean of the P99 latencies of 5 minutes", "ratio",
    goal=0.3, suspected=0.25, critical=0.35, goal_met_at=True,
)  # fmt: skip
P99_JITTER_ROBUST = Objective(
    "p99_jitter_robust", "Median absolute deviation (x 1.4826) over median of the same P99 latencies", "ratio",
    goal=0.3, suspected=0.25, critical=0.35, goal_met_at=True,
)  # fmt: skip
HIDDEN_GROWTH_RATIO = Objective(
    "hidden_growth_ratio", "(growth of RSS - growth of used memory) / growth of used memory, over 2 minutes", "ratio",
    goal=0.2, suspected=0.2, critical=0.5,
)  # fmt: skip
HIDDEN_GROWTH = Objective(
    "hidden_growth", "Lower end of the interval of the growth of RSS - used, of the median RSS, an hour", "ratio",
    goal=0.01, suspected=0.01, critical=0.05,
)  # fmt: skip
HIT_RATIO = Objective(
    "hit_ratio", "Hits of all lookups of 5 minutes", "ratio",
    goal=0.75, suspected=0.75, critical=0.5, low_is_good=False, goal_met_at=True,
)  # fmt: skip
HIT_RATIO_RELATIVE = Objective(
    "hit_ratio_relative", "Hit ratio over that of an infinite cache for the same keys", "ratio",
    goal=0.75, suspected=0.75, critical=0.5, low_is_good=False, goal_met_at=True,
)  # fmt: skip
LATENCY_P95 = Objective(
    "latency_p95", "95th percentile of the latencies of the cache in 5 minutes", "seconds",
    goal=0.008, suspected=0.008, critical=0.016,
)  # fmt: skip
STALE_RATIO = Objective(
    "stale_ratio", "Objects past their time to live that are still there, or lookups that met one", "ratio",
    goal=0.005, suspected=0.005, critical=0.01,
)  # fmt: skip

OBJECTIVES = (
    P99_JITTER, P99_JITTER_ROBUST, HIDDEN_GROWTH_RATIO, HIDDEN_GROWTH,
    HIT_RATIO, HIT_RATIO_RELATIVE, LATENCY_P95, STALE_RATIO,
)  # fmt: skip

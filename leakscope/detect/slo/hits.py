"""Hits of a cache: of all lookups, and of those that any cache could have answered."""

from __future__ import annotations

MIN_LOOKUPS = 100


def hit_ratio(hits: float, lookups: float) -> float | None:
    """None with fewer than :data:`MIN_LOOKUPS`."""
    return hits / lookups if lookups >= MIN_LOOKUPS else None


def relative_hit_ratio(ratio: float | None, bound: float | None) -> float | None:
    """``ratio`` over ``bound``, the hit ratio of an infinite cache for the same keys; None where one is unknown or the
    bound is 0. Above 1 the keys are not those of the cache."""
    return ratio / bound if ratio is not None and bound else None


def bound_of_events(hits: float, lookups: float, repeated: float) -> float | None:
    """The hit ratio of an infinite cache, from the lookups that missed an object which had been there before
    (``repeated``): it would have had these hits too. None with fewer than :data:`MIN_LOOKUPS`."""
    return min(1.0, (hits + repeated) / lookups) if lookups >= MIN_LOOKUPS else None

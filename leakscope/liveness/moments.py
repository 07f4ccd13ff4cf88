"""What is known of cache objects at one time: counts, ages, holds, and which of these have grown stale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leakscope.liveness.classes import Facts, classify
from leakscope.liveness.holds import KINDS, Holds
from leakscope.liveness.lives import CacheLives
from leakscope.model.words import NEVER

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MIN_GIVEN_UP = 5
"""Fewer holds that were given up say nothing of how long holds last."""
USUAL_FACTOR = 2.0
USUAL_QUANTILE = 0.99
MAX_USUAL_SHARE = 0.5
DEFAULT_STALE_NS = 30_000_000_000


class Usual(NamedTuple):
    """How long holds of a kind last: one in flight does not exceed ``limit_ns``; ``given_up`` of them say so."""

    limit_ns: float
    given_up: int


def usual_holds(of: CacheLives, kind: str, fallback_ns: float) -> Usual:
    """Twice what 99 % of the holds of ``kind`` that were given up took, at most half of the time that was seen.

    ``fallback_ns`` where fewer than MIN_GIVEN_UP were given up. Of views those count that hold their own life.
    """
    chosen = (of.holds.kind == KINDS.index(kind)) & (of.holds.view < 0) & of.holds.given_up
    took = (of.ts_ns[of.holds.until_row[chosen]] - of.ts_ns[of.holds.from_row[chosen]]).astype(np.float64)
    span = float(of.ts_ns[-1] - of.ts_ns[0]) if len(of.ts_ns) else 0.0
    if len(took) < MIN_GIVEN_UP:
        return Usual(fallback_ns, len(took))
    limit = min(USUAL_FACTOR * float(np.quantile(took, USUAL_QUANTILE)), MAX_USUAL_SHARE * span)
    return Usual(limit, len(took))


class OpenHolds(NamedTuple):
    """Holds that are open at a time; equally long arrays. ``position``: of their object in :class:`Moment`.
    ``used_ns``: last use by who holds. ``stale``: longer ago than holds of the kind last."""

    holds: Holds
    position: Int64
    from_ns: Int64
    used_ns: Int64
    stale: Bool

    def take(self, rows: npt.NDArray[np.generic]) -> OpenHolds:
        """Some of them, by rows or mask."""
        rest = (column[rows] for column in self[1:])
        return OpenHolds(self.holds.take(rows), *rest)


@dataclass(frozen=True)
class Moment:
    """One time. ``rows``: the lives that are live; ``facts``, ``classes`` and ``last_use_ns`` (0 = not seen) in their
    order; ``holds``: the open holds on them."""

    ts_ns: int
    rows: Int64
    facts: Facts
    classes: npt.NDArray[np.int8]
    holds: OpenHolds
    last_use_ns: Int64


def moment(of: CacheLives, ts_ns: int, stale_after_ns: Mapping[str, float], default_stale_ns: float) -> Moment:
    """The objects of ``of`` at a time. ``stale_after_ns``: by kind of hold (0 where it is left out);
    ``default_stale_ns`` for objects of which only a count is known."""
    row = of.row_at(ts_ns)
    rows = of.alive(ts_ns)
    position = np.full(len(of.lives.object), -1, np.int64)
    position[rows] = np.arange(len(rows))
    last_use = _last_use(of, rows, row)
    holds = _open_holds(of, position, row, ts_ns, stale_after_ns)
    refcount, held = _counts(of, rows, row, holds)
    age = np.where(last_use > 0, (ts_ns - last_use).astype(np.float64), np.nan)
    stale = np.zeros(len(rows), bool)
    stale[holds.position[holds.stale]] = True
    only_counted = np.ones(len(rows), bool)
    only_counted[holds.position] = False
    with np.errstate(invalid="ignore"):
        stale |= only_counted & (refcount > 0) & (age > default_stale_ns)
    facts = Facts(refcount, held, age, stale, _ttl_left(of, rows, ts_ns))
    return Moment(ts_ns, rows, facts, classify(facts), holds, last_use)


def _last_use(of: CacheLives, rows: Int64, row: int) -> Int64:
    used_row, _ = of.uses.find(rows, row)
    used = np.where(used_row >= 0, of.ts_ns[np.maximum(used_row, 0)], 0) if len(of.ts_ns) else used_row
    told_row, told = of.last_access.find(rows, row)
    return np.where(told_row >= 0, np.maximum(used, told.astype(np.int64)), used)


def _open_holds(
    of: CacheLives, position: Int64, row: int, ts_ns: int, stale_after_ns: Mapping[str, float]
) -> OpenHolds:
    holds = of.holds
    holds = holds.take((holds.from_row <= row) & (holds.until_row > row) & (position[holds.life] >= 0))
    from_ns = of.ts_ns[holds.from_row]
    used = from_ns
    if len(of.accesses):
        of_life = holds.life.astype(np.int64) * (len(of.owners) + 1)
        own_row, _ = of.accesses.find(of_life + holds.owner + 1, row)
        anyone, _ = of.accesses.find(of_life, row)
        last = np.maximum(own_row, anyone)
        used = np.maximum(used, np.where(last >= 0, of.ts_ns[np.maximum(last, 0)], 0))
    limits = np.array([stale_after_ns.get(kind, 0.0) for kind in KINDS])
    return OpenHolds(holds, position[holds.life], from_ns, used, (ts_ns - used) > limits[holds.kind])


def _counts(of: CacheLives, rows: Int64, row: int, holds: OpenHolds) -> tuple[npt.NDArray[np.float64], Bool]:
    """(reference count of each live object, NaN = not known; whether it is known to be held)."""
    if of.counts_holds:
        seen = holds.position[holds.holds.kind != KINDS.index("inferred")]
        counts = np.bincount(seen, minlength=len(rows)).astype(np.float64)
    else:
        counts = np.full(len(rows), np.nan)
    gaps = of.gap_rows[of.gap_rows <= row]
    last_gap = int(gaps[-1]) if len(gaps) else -1
    counts[of.lives.born_row[rows] < last_gap] = np.nan  # a hold or its release may be among what was lost
    if len(of.counts):
        counted_row, counted = of.counts.find(rows, row)
        # What the source counts holds until a later hold or release that it says nothing about.
        since = np.full(len(of.lives.object), -1, np.int64)
        for changed_row in (of.holds.from_row, of.holds.until_row):
            changed = np.flatnonzero(changed_row <= row)
            np.maximum.at(since, of.holds.life[changed], changed_row[changed])
        newer = (counted_row >= 0) & (counted_row >= since[rows]) & (counted_row > last_gap)
        counts = np.where(newer, counted.astype(np.float64), counts)
    held = np.zeros(len(rows), bool)
    held[holds.position[holds.holds.from_row > last_gap]] = True
    held[holds.position[holds.holds.kind == KINDS.index("inferred")]] = True
    return counts, held & ~(counts == 0)


def _ttl_left(of: CacheLives, rows: Int64, ts_ns: int) -> npt.NDArray[np.float64]:
    expires = of.lives.expires_ns[rows]
    left = np.where(expires == 0, np.nan, np.where(expires == NEVER, np.inf, (expires - ts_ns).astype(np.float64)))
    invalid = of.lives.invalid_ns[rows] <= ts_ns
    return np.where(invalid, np.minimum(np.nan_to_num(left, nan=0.0, posinf=0.0), 0.0), left)

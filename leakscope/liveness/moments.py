"""What is known of cache objects at one time: counts, ages, holds, and which of these have grown stale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.liveness.classes import Facts, classify
from leakscope.liveness.lives import HOLDS, OPEN, CacheLives, Int64
from leakscope.model.words import NEVER

MIN_GIVEN_UP = 5
"""Fewer holds that were given up say nothing of how long holds last."""
USUAL_FACTOR = 2.0
USUAL_QUANTILE = 0.99
MAX_USUAL_SHARE = 0.5
DEFAULT_STALE_NS = 30_000_000_000


class Usual(NamedTuple):
    """How long holds of a kind last: ``limit_ns`` is what one in flight does not exceed; ``given_up`` how many say so."""

    limit_ns: float
    given_up: int


def usual_holds(of: CacheLives, kind: str, fallback_ns: float) -> Usual:
    """Twice what 99 % of the holds of ``kind`` that were given up took, at most half of the time that was seen.

    ``fallback_ns`` where fewer than MIN_GIVEN_UP were given up. Of views those count that hold their own life.
    """
    holds = of.holds[(of.holds["kind"] == kind) & (of.holds["view"] < 0)]
    released = holds[holds["until_ns"] != OPEN]
    if kind in HOLDS:  # an eviction ends a hold, but nobody gave it up
        released = released[released["until_row"].to_numpy() != of.lives["died_row"].to_numpy()[released["life"]]]
    took = (released["until_ns"] - released["from_ns"]).to_numpy(np.float64)
    span = float(of.ts_ns[-1] - of.ts_ns[0]) if len(of.ts_ns) else 0.0
    if len(took) < MIN_GIVEN_UP:
        return Usual(fallback_ns, len(took))
    limit = min(USUAL_FACTOR * float(np.quantile(took, USUAL_QUANTILE)), MAX_USUAL_SHARE * span)
    return Usual(limit, len(took))


@dataclass(frozen=True)
class Moment:
    """One time. ``rows``: the lives that are live (rows of ``lives.lives``); ``facts`` and ``classes`` in their order.

    ``holds``: the open holds on them: those of ``lives.holds`` with ``position`` (in ``rows``), ``used_ns`` (last use
    by the holder) and ``stale``. ``last_use_ns``: int64, 0 = not seen.
    """

    ts_ns: int
    rows: Int64
    facts: Facts
    classes: npt.NDArray[np.int8]
    holds: pd.DataFrame
    last_use_ns: Int64


def moment(of: CacheLives, ts_ns: int, stale_after_ns: dict[str, float], default_stale_ns: float) -> Moment:
    """The objects of ``of`` at a time. ``stale_after_ns``: by kind of hold (pin, ref, view); ``default_stale_ns`` for
    objects of which only a count is known."""
    row = of.row_at(ts_ns)
    rows = of.alive(ts_ns)
    position = np.full(len(of.lives), -1, np.int64)
    position[rows] = np.arange(len(rows))
    last_use = _last_use(of, rows, row)
    holds = _open_holds(of, position, row, ts_ns, stale_after_ns)
    refcount, held = _counts(of, rows, row, holds)
    age = np.where(last_use > 0, (ts_ns - last_use).astype(np.float64), np.nan)
    stale = np.zeros(len(rows), bool)
    stale[holds.loc[holds["stale"], "position"]] = True
    only_counted = np.ones(len(rows), bool)
    only_counted[holds["position"]] = False
    with np.errstate(invalid="ignore"):
        stale |= only_counted & (refcount > 0) & (age > default_stale_ns)
    facts = Facts(refcount, held, age, stale, _ttl_left(of, rows, ts_ns))
    return Moment(ts_ns, rows, facts, classify(facts), holds, last_use)


def _last_use(of: CacheLives, rows: Int64, row: int) -> Int64:
    used_row, _ = of.uses.find(rows, row)
    used = np.where(used_row >= 0, of.ts_ns[np.maximum(used_row, 0)], 0) if len(of.ts_ns) else used_row
    told_row, told = of.last_access.find(rows, row)
    if told is None or not len(told):
        return used
    return np.where(told_row >= 0, np.maximum(used, told.astype(np.int64)), used)


def _open_holds(
    of: CacheLives, position: Int64, row: int, ts_ns: int, stale_after_ns: dict[str, float]
) -> pd.DataFrame:
    holds = of.holds
    is_open = (holds["from_row"] <= row) & (holds["until_row"] > row) & (position[holds["life"]] >= 0)
    holds = holds[is_open.to_numpy()].reset_index(drop=True)
    life, owner = holds["life"].to_numpy(np.int64), holds["owner"].to_numpy(np.int64)
    used = holds["from_ns"].to_numpy(np.int64)
    if len(of.accesses):
        own_row, _ = of.accesses.find(life * (len(of.owners) + 1) + owner + 1, row)
        anyone, _ = of.accesses.find(life * (len(of.owners) + 1), row)
        last = np.maximum(own_row, anyone)
        used = np.maximum(used, np.where(last >= 0, of.ts_ns[np.maximum(last, 0)], 0))
    limit = holds["kind"].map(stale_after_ns).to_numpy(np.float64)
    return holds.assign(position=position[life], used_ns=used, stale=(ts_ns - used) > limit)


def _counts(of: CacheLives, rows: Int64, row: int, holds: pd.DataFrame) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """(reference count of each live object, NaN = not known; whether it is known to be held)."""
    seen = np.bincount(holds["position"], minlength=len(rows)).astype(np.float64)
    counts = seen if of.counts_holds else np.full(len(rows), np.nan)
    gaps = of.gap_rows[of.gap_rows <= row]
    last_gap = int(gaps[-1]) if len(gaps) else -1
    born = of.lives["born_row"].to_numpy()[rows]
    counts = np.where(born < last_gap, np.nan, counts)  # a hold or its release may be among what was lost
    counted_row, counted = of.counts.find(rows, row)
    if counted is not None and len(counted):
        # What the source counts holds until a later hold or release that it says nothing about.
        since = np.full(len(of.lives), -1, np.int64)
        for column in ("from_row", "until_row"):
            changed = of.holds[of.holds[column].to_numpy() <= row]
            np.maximum.at(since, changed["life"].to_numpy(np.int64), changed[column].to_numpy(np.int64))
        since = since[rows]
        newer = (counted_row >= since) & (counted_row > last_gap)
        counts = np.where((counted_row >= 0) & newer, counted.astype(np.float64), counts)
    after_gap = np.zeros(len(rows), bool)
    after_gap[holds.loc[holds["from_row"] > last_gap, "position"]] = True
    return counts, after_gap


def _ttl_left(of: CacheLives, rows: Int64, ts_ns: int) -> npt.NDArray[np.float64]:
    expires = of.lives["expires_ns"].to_numpy()[rows]
    left = np.where(expires == 0, np.nan, np.where(expires == NEVER, np.inf, (expires - ts_ns).astype(np.float64)))
    invalid = of.lives["invalid_ns"].to_numpy()[rows] <= ts_ns
    return np.where(invalid, np.minimum(np.nan_to_num(left, nan=0.0, posinf=0.0), 0.0), left)

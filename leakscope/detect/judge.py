"""Judging holdings: which (site, process) keeps growing, which has levelled off, which cannot be told.

The first, event-based form of the verdict. A holding is a leak when, after the warm-up of its process and
from where its kept memory begins to rise: at least :data:`MIN_KEPT_OBJECTS` more objects are kept, the
interval of its rate excludes zero, its floor rises in each of the disjoint parts of the time, and the loss
of frees cannot explain what is kept.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.sites import Holdings
from leakscope.detect import growth
from leakscope.model.words import KINDS_NOT_ADDED

FloatArray = npt.NDArray[np.float64]

NOT_JUDGED = (KINDS_NOT_ADDED - {"heap"}) | {"heap_backing", "pool_segment"}
"""Kinds that never lead to a finding of their own. Where malloc is recorded, its blocks are judged in place of the maps
that back them: those grow with whoever happens to need more. So do segments of a caching allocator; its blocks are
live tensors, which only the comparison of equal iterations makes a leak."""

MIN_KEPT_OBJECTS = 10
MIN_KEPT_SHARE = 0.0005
"""Kept objects after the warm-up as a share of all allocated: below it a few late frees explain them."""
MIN_FLOOR_SHARE = 0.4
"""The floors of the first and last part must carry this share of the growth (a line carries 0.75)."""
MIN_POOL_SHARE = 0.5
"""All kept objects of a call site must rise by this share of what its sampled stacks make of one holding."""
MIN_RISE_TO_FALL = 1.5
"""The rise against the deepest fall within it: frees in batches make a saw-tooth, whose last tooth is no leak."""
CONFIRMED_SHARE = 0.8
"""A counter that grew by this share of what a holding keeps confirms it independently of lost events."""


class State(IntEnum):
    """What a holding is, by rising severity."""

    STEADY = 0  # nothing worth naming is kept after the warm-up
    PLATEAU = 1  # grew and levelled off
    UNCLEAR = 2  # grows, but not provably
    LEAK = 3


def judge(
    holdings: Holdings,
    lives: pd.DataFrame,
    visible: npt.NDArray[np.bool_],
    hidden: npt.NDArray[np.float64],
    confirmed: npt.NDArray[np.bool_],
    warm_up_s: float | None = None,
) -> pd.DataFrame:
    """Judge every holding with a curve, visible frees and a kind that counts in its layer.

    Returns one row each: holding, site, life, state, rate, low, high (bytes/s), kept_bytes and kept_objects
    at the end, more_objects (kept after the warm-up), start_bin, lost_objects (frees that may be unseen),
    withheld (a leak but for the losses), confirmed, half_width (of the interval, bytes/s).

    ``visible``: by site number, whether its frees can be seen. ``hidden``: by site number, frees that may
    be unseen (:func:`leakscope.detect.losses.hidden_frees_of_sites`). ``confirmed``: by site number, whether an
    independent counter grew by as much as the site keeps. ``warm_up_s`` replaces the fifth of each life
    that is warm-up.
    """
    rows = holdings.table.iloc[holdings.curve_rows].reset_index(drop=True)
    kept = ~rows["kind"].isin(NOT_JUDGED).to_numpy() & visible[rows["site"].to_numpy()]
    rows = rows[kept].reset_index(drop=True)
    kept_bytes, kept_objects = holdings.kept_bytes[kept], holdings.kept_objects[kept]
    pool_objects = holdings.pool_objects[kept]
    bins = kept_bytes.shape[1]
    windows = lives.drop_duplicates("life").set_index("life")
    bin_s = windows.loc[rows["life"], "bin_ns"].to_numpy(np.float64) / 1e9
    warm = growth.warm_up_bins(bins, bin_s * bins, warm_up_s)
    rates = growth.rates(kept_bytes, warm, bin_s)

    # Only what keeps enough objects after the warm-up is worth the slower look.
    before = kept_objects[np.arange(len(rows)), np.maximum(warm - 1, 0)]
    more = kept_objects[:, -1] - np.where(warm > 0, before, 0.0)
    # Of allocations that were sampled, as many recorded ones are asked for.
    least = np.maximum(
        MIN_KEPT_OBJECTS * rows["stands_for"].to_numpy(), MIN_KEPT_SHARE * rows["alloc_objects"].to_numpy()
    )
    grew = np.flatnonzero(more >= least)
    start = np.zeros(len(rows), np.int64)
    start[grew] = growth.leak_start_bins(kept_objects[grew])
    since = np.minimum(np.maximum(warm, start), bins - 2 * growth.PARTS)
    late = np.flatnonzero(since > warm)
    later = growth.rates(kept_bytes[late], since[late], bin_s[late])
    for all_rates, late_rates in zip(rates, later, strict=True):
        all_rates[late] = late_rates

    state = np.full(len(rows), State.STEADY, np.int64)
    steady = growth.persistence(kept_objects[grew], since[grew])
    floor_rise = steady.steps[:, :-1].sum(axis=1)
    slope = growth.theil_sen(kept_objects[grew], since[grew], bin_s[grew])
    span_s = (bins - since[grew]) * bin_s[grew]
    since_objects = np.where(since[grew] > 0, kept_objects[grew, np.maximum(since[grew] - 1, 0)], 0.0)
    risen = kept_objects[grew, -1] - since_objects
    # Stacks are sampled less while a site is busy: what has own stacks may rise although all of it does not.
    pool_since = np.where(since[grew] > 0, pool_objects[grew, np.maximum(since[grew] - 1, 0)], 0.0)
    pool_risen = pool_objects[grew, -1] - pool_since
    with np.errstate(invalid="ignore"):
        alone = ~(pool_risen < MIN_POOL_SHARE * risen)
    fallen = growth.largest_fall(kept_objects[grew], since[grew])
    grows = (
        steady.steady
        & (risen >= least[grew])
        & (floor_rise >= MIN_FLOOR_SHARE * risen)
        & (slope >= growth.MIN_MEDIAN_SLOPE * risen / span_s)
        & (rates.low[grew] > 0)
        & alone
        & (risen >= MIN_RISE_TO_FALL * fallen)
    )
    state[grew] = np.where(grows, State.LEAK, np.where(steady.plateau | ~alone, State.PLATEAU, State.UNCLEAR))
    noise = (state == State.UNCLEAR) & (rates.low <= 0)
    state[noise] = State.STEADY

    lost = hidden[rows["site"].to_numpy()]
    sure = confirmed[rows["site"].to_numpy()]
    withheld = (state == State.LEAK) & ~sure & (more <= lost)
    state[withheld] = State.UNCLEAR
    size = rows["live_bytes"].to_numpy() / np.maximum(1, rows["live_objects"].to_numpy())
    doubt = np.where(sure, 0.0, np.minimum(lost, more) * size / (bins * bin_s))
    return pd.DataFrame(
        {
            "holding": rows["holding"],
            "site": rows["site"],
            "life": rows["life"],
            "state": state,
            "rate": rates.mean,
            "low": rates.low - doubt,
            "high": rates.high,
            "kept_bytes": kept_bytes[:, -1],
            "kept_objects": kept_objects[:, -1],
            "more_objects": more,
            "start_bin": start,
            "lost_objects": lost,
            "withheld": withheld,
            "confirmed": sure,
            "half_width": (rates.high - rates.low) / 2 + doubt,
        }
    )

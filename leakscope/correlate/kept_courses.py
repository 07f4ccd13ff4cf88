"""What sites keep over time, on one axis: the curves of their process lives put together."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from leakscope.correlate.lives import BINS
from leakscope.correlate.sites import Holdings
from leakscope.model.results import KeptCourse


def kept_courses(held: Holdings, lives: pd.DataFrame, sites: Iterable[int]) -> dict[int, KeptCourse]:
    """Number of a site → its course, for those of ``sites`` that keep something.

    ``lives``: of :func:`leakscope.correlate.lives.process_lives`, with ``source_start_ns``. A life counts with its last
    value after its end: what it kept when its exit began.
    """
    rows = held.table.iloc[held.curve_rows]
    window = lives.drop_duplicates("life").set_index("life")
    found = {}
    for site in dict.fromkeys(sites):
        chosen = np.flatnonzero((rows["site"] == site).to_numpy())
        if not len(chosen):
            continue
        of = window.loc[rows["life"].to_numpy()[chosen]]
        start_s = (of["from_ns"] - of["source_start_ns"]).to_numpy(np.float64) / 1e9
        bin_s = of["bin_ns"].to_numpy(np.float64) / 1e9
        first, last = float(start_s.min()), float((start_s + bin_s * BINS).max())
        step_s = (last - first) / BINS
        at = first + step_s * np.arange(1, BINS + 1)
        # The bin that ended last before each time; a rounding error is no earlier bin.
        ended = np.floor((at[None, :] - start_s[:, None]) / bin_s[:, None] + 1e-6).astype(np.int64)
        curves = held.kept_bytes[chosen]
        kept = np.take_along_axis(curves, np.clip(ended - 1, 0, BINS - 1), axis=1)
        total = np.where(ended > 0, kept, 0.0).sum(axis=0)
        found[site] = KeptCourse(first, step_s, tuple(total.tolist()))
    return found

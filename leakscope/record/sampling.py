"""Sampling by bytes: the gaps between samples that the probes draw from, and what a sample stands for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from leakscope.record.kernel.bpf import Map
from leakscope.record.records import SAMPLE_GAPS


def gaps(mean_bytes: int) -> npt.NDArray[np.uint64]:
    """Quantiles of the exponential distribution of a mean, at the middles of 4,096 equal steps: uint64[4096].

    Their own mean is 0.9999 of it: the integral of -ln(1 - q) is 1, and the midpoint rule misses ln(2) / 2 of its last
    step.
    """
    middles = (np.arange(SAMPLE_GAPS) + 0.5) / SAMPLE_GAPS
    return np.maximum(1, np.round(-mean_bytes * np.log1p(-middles))).astype(np.uint64)


def fill_gaps(sample_gaps: Map, mean_bytes: int) -> None:
    """Hand the gaps to the probes."""
    for index, gap in enumerate(gaps(mean_bytes).tolist()):
        sample_gaps.update(index.to_bytes(4, "little"), gap.to_bytes(8, "little"))

"""Histograms of latencies in a text of Prometheus's exposition format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from leakscope.errors import BadInputError

SERVICE_LATENCY = ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds")
"""Histograms of whole requests by engine."""
MAX_BUCKETS = 1000


def histogram_of(
    text: str, names: Sequence[str], shown: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """(upper bounds, observations in each bucket alone) of the first histogram of ``names`` that is there, summed over
    its labels; float64[n] each, bounds rising, the last one infinite.

    None where there is none. Raises BadInputError for a text that is none, or buckets that are none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[float, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.name not in names:
                continue
            buckets = found.setdefault(family.name, {})
            for sample in family.samples:
                if sample.name == f"{family.name}_bucket" and math.isfinite(sample.value):
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
    except (ValueError, IndexError, KeyError, TypeError, RecursionError):
        raise BadInputError(f"{shown}: its answer is no Prometheus text") from None
    buckets = next((found[name] for name in names if found.get(name)), {})
    if not buckets:
        return None
    bounds = np.array(sorted(buckets))
    cumulative = np.array([buckets[bound] for bound in bounds.tolist()])
    counts = np.diff(cumulative, prepend=0.0)
    if len(bounds) > MAX_BUCKETS or np.isnan(bounds).any() or (counts < 0).any():
        raise BadInputError(f"{shown}: a histogram of its latencies is none")
    return bounds, counts

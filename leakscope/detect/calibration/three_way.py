"""Resident, virtual and device memory, each against what measures the same from another side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leakscope.detect.calibration import robust, z_rule
from leakscope.detect.series.counters import Counter
from leakscope.model.calibration import Calibrated

FloatArray = npt.NDArray[np.float64]

REFERENCES: dict[str, tuple[str, ...]] = {
    "rss": ("cgroup_anon", "cgroup", "pss", "rss_anon"),
    "vss": ("rss",),
    "gpu_used": ("gpu_device_used", "gpu_reserved", "gpu_allocated"),
}
"""What each dimension is held against, the best first."""
MIN_READINGS = 2 * z_rule.WINDOW


@dataclass(frozen=True)
class Dimension:
    """One dimension: ``t_s``, ``value`` and ``reference``, float64[n] in bytes; ``reference_name`` '' and
    ``reference`` None where nothing measures the same."""

    name: str
    t_s: FloatArray
    value: FloatArray
    reference_name: str = ""
    reference: FloatArray | None = None


def dimensions(counters: Sequence[Counter]) -> list[Dimension]:
    """The dimensions of a table of counters, paired at the times when both sides were read; those with fewer than two
    windows of readings are left out."""
    by_name: Mapping[str, Counter] = {counter.name: counter for counter in counters}
    found = []
    for name, references in REFERENCES.items():
        counter = by_name.get(name)
        if counter is None or len(counter.t_s) < MIN_READINGS:
            continue
        paired = _paired(counter, [by_name[r] for r in references if r in by_name])
        found.append(paired or Dimension(name, counter.t_s, counter.value))
    return found


def _paired(counter: Counter, references: Sequence[Counter]) -> Dimension | None:
    for reference in references:
        times, ours, theirs = np.intersect1d(counter.t_s, reference.t_s, return_indices=True)
        if len(times) >= MIN_READINGS and (reference.value[theirs] > 0).all():
            return Dimension(counter.name, times, counter.value[ours], reference.name, reference.value[theirs])
    return None


def calibrate(dimension: Dimension) -> Calibrated:
    """Both forms on one dimension. What is calibrated is the difference to the reference; without one, the difference
    to the median of the readings that the robust form is calibrated on.
    """
    value, reference = dimension.value, dimension.reference
    level = float(np.median(value))
    if reference is None:
        own = robust.calibrate_once(value, level)
        reference = np.full(len(value), max(own.bytes, 1.0))
    difference = value - reference
    baseline, rebaselines, alarms = z_rule.follow(dimension.t_s, difference)
    offset = robust.calibrate_once(difference, level)
    frozen, diverged = robust.divergences(dimension.t_s, difference, level, offset)
    return Calibrated(
        dimension.name,
        dimension.reference_name,
        len(value),
        _deviation(difference, reference),
        _deviation(difference - baseline, reference),
        _deviation(difference - frozen, reference),
        alarms,
        rebaselines,
        offset.bytes,
        offset.mad,
        float(dimension.t_s[offset.begin]),
        float(dimension.t_s[offset.end - 1]),
        offset.settled,
        diverged,
    )


def _deviation(difference: FloatArray, reference: FloatArray) -> float:
    return float(np.mean(np.abs(difference) / np.maximum(reference, 1.0)))

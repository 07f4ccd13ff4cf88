"""Clocks: what to add to the times of one source so that they are those of another, and how wrong that may be.

Recordings run on CLOCK_MONOTONIC and hold readings of CLOCK_REALTIME, CLOCK_MONOTONIC and CLOCK_BOOTTIME taken back to
back (*anchors*). Nsight Systems of 2025.6 and later says when its capture began on the system's clock
(``systemClockNs``): MONOTONIC or BOOTTIME of the same boot. Older exports and PyTorch know UTC only. Nsight Compute
has no time of a launch at all and is never aligned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from leakscope.correlate.joins.timeline import Ints
from leakscope.model.manifest import Source

SAME_BOOT_NS = 60_000_000_000
"""REALTIME less MONOTONIC of one boot moves by steps of the wall clock alone; of another boot it differs by hours."""
SYSTEM_CLOCK_ERROR_NS = 1_000
UTC_ERROR_NS = 1_000_000
"""UTC in a report is that of the tool's own conversion: PyTorch derives it from the CPU's cycle counter."""
NO_START = "it does not say when it began"
MIN_PAIRS = 3
AGREE_NS = 1_000_000
"""Differences that agree this well (median absolute deviation) give an offset by themselves."""


@dataclass(frozen=True)
class Alignment:
    """``offset_ns`` is added to times of the source, ``error_ns`` bounds what is left (None: unbounded). ``refused``
    says why there is no alignment. ``residual_ns``: median and 99th percentile of |difference| over ``seen_twice``
    events, measured after the offset."""

    offset_ns: int = 0
    error_ns: int | None = None
    how: str = ""
    refused: str = ""
    residual_ns: tuple[int, int] | None = None
    seen_twice: int = 0
    refined: bool = False  # the offset is that of the events seen by both


def align(reference: Source, source: Source) -> Alignment:
    """The alignment of ``source`` onto the clock of ``reference`` (monotonic), by what they say of themselves."""
    if reference.clock != "monotonic":
        return Alignment(refused=f"{reference.name} has no monotonic clock to align with")
    if source.clock == "none":
        return Alignment(refused="its rows have no times")
    if source.clock == "relative":
        return Alignment(refused=NO_START)
    if source.clock == "utc":
        return _by_utc(reference)
    if source.boot_id and reference.boot_id:
        if source.boot_id != reference.boot_id:
            return Alignment(refused="it was recorded in another boot")
        return Alignment(0, SYSTEM_CLOCK_ERROR_NS, "the same clock of the same boot")
    return _by_system_clock(reference, source)


def _by_system_clock(reference: Source, source: Source) -> Alignment:
    """``anchors`` of an imported export hold UTC and the system's clock at its start, both as the export says."""
    if not source.anchors or not reference.anchors:
        return Alignment(0, None, "the target's system clock; nothing tells whether it is of the same boot")
    ahead = source.anchors[0].realtime_ns - source.anchors[0].monotonic_ns
    ours = reference.anchors[0]
    if abs(ahead - (ours.realtime_ns - ours.monotonic_ns)) <= SAME_BOOT_NS:
        asleep = ours.boottime_ns - ours.monotonic_ns if ours.boottime_ns else 0
        to_boot = abs(ahead - (ours.realtime_ns - ours.boottime_ns)) if asleep else SAME_BOOT_NS
        if to_boot < abs(ahead - (ours.realtime_ns - ours.monotonic_ns)):
            return Alignment(-asleep, SYSTEM_CLOCK_ERROR_NS, "the target's system clock (CLOCK_BOOTTIME), same boot")
        return Alignment(0, SYSTEM_CLOCK_ERROR_NS, "the target's system clock (CLOCK_MONOTONIC), same boot")
    asleep = ours.boottime_ns - ours.monotonic_ns if ours.boottime_ns else 0
    if asleep and abs(ahead - (ours.realtime_ns - ours.boottime_ns)) <= SAME_BOOT_NS:
        return Alignment(-asleep, SYSTEM_CLOCK_ERROR_NS, "the target's system clock (CLOCK_BOOTTIME), same boot")
    return Alignment(refused="its system clock is of another boot or host")


def _by_utc(reference: Source) -> Alignment:
    """The mean of the anchors at start and end; a step of the wall clock between them is part of the error."""
    if not reference.anchors:
        return Alignment(refused=f"{reference.name} has no readings of the wall clock")
    offsets = [anchor.monotonic_ns - anchor.realtime_ns for anchor in (reference.anchors[0], reference.anchors[-1])]
    offset = (offsets[0] + offsets[1]) // 2
    error = UTC_ERROR_NS + (abs(offsets[0] - offsets[1]) + 1) // 2
    return Alignment(offset, error, "UTC, through the recording's readings of the wall clock")


def measured(alignment: Alignment, reference_ns: Ints, source_ns: Ints) -> Alignment:
    """``alignment`` with its residual over events seen by both; ``source_ns`` are times of the source as they stand.

    The offset is replaced by the median difference where the sources gave none, or one that is coarser than what the
    differences agree to: where at least MIN_PAIRS of them agree, events outrank what a source says of its clock.
    """
    if not len(reference_ns):
        return alignment
    difference = reference_ns - source_ns
    first = int(difference[0])  # medians are floating point: keep the numbers small
    median = first + int(np.median(difference - first))
    spread = int(np.median(np.abs(difference - median)))
    enough = len(difference) >= MIN_PAIRS and spread <= AGREE_NS
    result = alignment
    if alignment.refused and alignment.refused != NO_START:
        return alignment
    if alignment.refused or alignment.error_ns is None:
        if not enough:
            return alignment
        result = Alignment(median, 2 * spread + AGREE_NS, f"the {len(difference):,} events seen by both", refined=True)
    elif abs(median - alignment.offset_ns) > alignment.error_ns + AGREE_NS and enough:
        off_ms = (median - alignment.offset_ns) / 1e6
        how = f"the {len(difference):,} events seen by both; by its own word it would be {off_ms:+,.3f} ms off"
        result = Alignment(median, 2 * spread + SYSTEM_CLOCK_ERROR_NS, how, refined=True)
    elif enough and (alignment.error_ns >= UTC_ERROR_NS or alignment.refined):
        how = alignment.how.split(", refined by")[0] + f", refined by {len(difference):,} events seen by both"
        result = Alignment(median, 2 * spread + SYSTEM_CLOCK_ERROR_NS, how, refined=True)
    left = np.abs(difference - result.offset_ns)
    residual = int(np.median(left)), int(np.percentile(left, 99))
    return replace(result, residual_ns=residual, seen_twice=len(difference))

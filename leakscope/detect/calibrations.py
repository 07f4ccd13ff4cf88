"""The calibration of a capture's counters: of its recordings together, and of each table of counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from leakscope.detect.calibration import calibrate, dimensions
from leakscope.detect.counters import COUNTER_KINDS, counters_of
from leakscope.detect.recorded import Subject
from leakscope.detect.recorded_lives import Recorded
from leakscope.detect.series.counters import Counter
from leakscope.model.calibration import Calibrated
from leakscope.model.manifest import Source

if TYPE_CHECKING:
    import duckdb


def calibrations(
    con: duckdb.DuckDBPyConnection, sources: Sequence[Source], recorded: Recorded | None
) -> list[Calibrated]:
    """One row a dimension that was read for two windows at least; [] where none was."""
    found: list[Calibrated] = []
    subjects = recorded.subjects if recorded is not None else []
    for subject in subjects:
        if subject.kind == "service":
            found += map(calibrate, dimensions([*subject.counters, *_device(subjects)]))
    for source in sources:
        if source.kind in COUNTER_KINDS and source.clock != "none":
            found += map(calibrate, dimensions(counters_of(con, source)))
    return found


def _device(found: Sequence[Subject]) -> list[Counter]:
    """Device memory in use as the device tells it, where there is one device: the reference of what processes use."""
    devices = [counter for one in found if one.kind == "device" for counter in one.counters]
    return [replace(devices[0], name="gpu_device_used")] if len(devices) == 1 else []

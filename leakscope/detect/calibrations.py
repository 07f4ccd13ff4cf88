"""The calibration of a capture's counters: of its recordings together, and of each table of counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leakscope.detect.calibration import calibrate, dimensions
from leakscope.detect.calibration.three_way import MIN_READINGS
from leakscope.detect.counters import COUNTER_KINDS, counters_of
from leakscope.detect.recorded import Readings, subjects
from leakscope.detect.recorded_lives import recorded_lives, recorded_readings
from leakscope.detect.series.counters import Counter
from leakscope.model.calibration import Calibrated
from leakscope.model.manifest import Source

if TYPE_CHECKING:
    import duckdb


def calibrations(con: duckdb.DuckDBPyConnection, sources: Sequence[Source]) -> list[Calibrated]:
    """One row a dimension that was read for two windows at least; [] where none was."""
    found: list[Calibrated] = []
    recordings = [source for source in sources if source.kind == "recording"]
    if recordings:
        found += _of_recordings(con, recordings)
    for source in sources:
        if source.kind in COUNTER_KINDS and source.clock != "none":
            found += [calibrate(one) for one in dimensions(counters_of(con, source))]
    return found


def _of_recordings(con: duckdb.DuckDBPyConnection, recordings: Sequence[Source]) -> list[Calibrated]:
    times = con.execute(
        "SELECT count(DISTINCT ts_ns) FROM samples WHERE scope = 'process' AND list_contains(?, source_id)",
        [[source.id for source in recordings]],
    ).fetchone()
    if not times or times[0] < MIN_READINGS:
        return []
    readings, lives = recorded_readings(con, recordings), recorded_lives(con, recordings)
    scope = recordings[-1].scope
    everyone, cgroup = bool(scope.get("host_wide")), str(scope.get("cgroup", ""))
    found = subjects(readings, lives, everyone=everyone, cgroup=cgroup)
    service = next((one.counters for one in found if one.kind == "service"), [])
    return [calibrate(one) for one in dimensions([*service, *_device(readings)])]


def _device(readings: Readings) -> list[Counter]:
    """Device memory in use as the device tells it, where there is one device: the reference of what processes use."""
    devices = [of["gpu_used"] for of in readings.of_scope("device").values() if "gpu_used" in of]
    return [Counter("gpu_device_used", *devices[0], True)] if len(devices) == 1 else []

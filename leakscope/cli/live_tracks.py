"""The counters of a live view over time: live bytes by layer, resident sets, the control group, device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from leakscope.model.forecast import Forecast
from leakscope.model.live import LiveReading, Track
from leakscope.report.live.course import Course

if TYPE_CHECKING:
    import pyarrow as pa

WINDOW_S = 60.0
LEAST_POINTS = 30
"""Readings before a forecast is made."""
_SHOWN = frozenset(
    {"rss", "cgroup", "cgroup_limit", "gpu_used", "gpu_total", "meminfo_MemTotal", "meminfo_MemAvailable"}
)
_LAYERS = ("kernel", "host", "gpu")
_ORDER = (*_LAYERS, "rss", "host used", "cgroup", "gpu used")


class Tracks:
    """Takes readings as they come. :meth:`take` may be called from another thread than the rest."""

    def __init__(self, everyone: bool) -> None:
        """:param everyone: the whole host is recorded: its memory is shown, not the sum of all resident sets."""
        self._everyone = everyone
        self._latest: dict[tuple[str, str], dict[str, float]] = {}
        self._courses: dict[str, Course] = {}

    def take(self, rows: pa.Table) -> None:
        """Take one reading of the samplers: rows of `samples`."""
        counter = rows["counter"].combine_chunks()
        wanted = [code for code, word in enumerate(counter.dictionary.to_pylist()) if word in _SHOWN]
        at = np.flatnonzero(np.isin(counter.indices.to_numpy(zero_copy_only=False), wanted))
        columns = rows.select(["scope", "scope_id", "counter", "value"]).take(at).to_pydict()
        latest: dict[tuple[str, str], dict[str, float]] = {}
        for scope, scope_id, name, value in zip(*columns.values(), strict=True):
            latest.setdefault((scope, scope_id), {})[name] = value
        # A process that is not read any more has ended; counters of the host that did not change are left out.
        kept = {key: of for key, of in self._latest.items() if key[0] != "process"}
        for key, of in latest.items():
            kept[key] = {**kept.get(key, {}), **of}
        self._latest = kept

    def add(self, reading: LiveReading) -> tuple[Track, ...]:
        """The tracks with the figures of now. A layer in which nothing was ever live has none."""
        courses = self._courses
        for layer in _LAYERS:
            value = float(reading.live_bytes.get(layer, 0))
            if value and layer not in courses:
                courses[layer] = Course()
                courses[layer].add(0.0, 0.0)  # what was there before the recording does not count
            if layer in courses:
                courses[layer].add(reading.elapsed_s, value)
        for name, value in self._sampled().items():
            courses.setdefault(name, Course()).add(reading.elapsed_s, value)
        return tuple(self._track(name, courses[name]) for name in _ORDER if name in courses)

    def _track(self, name: str, course: Course) -> Track:
        change, window_s = course.change(WINDOW_S)
        return Track(name, course.values[-1], change, window_s, course.values)

    def _sampled(self) -> dict[str, float]:
        latest = self._latest
        found = {}
        if self._everyone:
            host = next((of for (scope, _), of in latest.items() if scope == "host"), {})
            if {"meminfo_MemTotal", "meminfo_MemAvailable"} <= host.keys():
                found["host used"] = host["meminfo_MemTotal"] - host["meminfo_MemAvailable"]
        elif sets := [of["rss"] for (scope, _), of in latest.items() if scope == "process" and "rss" in of]:
            found["rss"] = sum(sets)
        if group := self._only("cgroup", "cgroup"):
            found["cgroup"] = group["cgroup"]
        devices = [of["gpu_used"] for (scope, _), of in latest.items() if scope == "device" and "gpu_used" in of]
        if devices:
            found["gpu used"] = sum(devices)
        return found

    def _only(self, scope: str, counter: str) -> dict[str, float] | None:
        """The counters of the one thing of a scope; None where there are none, or several."""
        found = [of for (of_scope, _), of in self._latest.items() if of_scope == scope and counter in of]
        return found[0] if len(found) == 1 else None

    def forecast(self) -> Forecast | None:
        """When the control group or the device reaches its limit, by what it did so far: the trend by the rules of
        :mod:`leakscope.detect.series.trend`, from LEAST_POINTS readings on. A view judges nothing else."""
        for name, scope, counter, limit in (
            ("cgroup", "cgroup", "cgroup", "cgroup_limit"),
            ("gpu used", "device", "gpu_used", "gpu_total"),
        ):
            limits, course = self._only(scope, counter), self._courses.get(name)
            if limits is None or limit not in limits or course is None:
                continue
            t_s, value = course.arrays()
            if len(t_s) < LEAST_POINTS:
                continue
            from leakscope.detect.forecast import forecast
            from leakscope.detect.series.counters import Counter
            from leakscope.detect.series.trend import Course as Shape
            from leakscope.detect.series.trend import trend
            from leakscope.model.results import Growth

            found = trend(t_s, value)
            if found.course is Shape.RISING and found.rate > 0:
                growth = Growth(counter, found.rate, found.low, found.high)
                return forecast([Counter(counter, t_s, value, True)], growth, limits[limit])
        return None

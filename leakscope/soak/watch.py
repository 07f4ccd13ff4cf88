"""The readings of a soak as they come, its looks at the hours, and what the screen shows. Live or replayed."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from leakscope.detect.forecast import forecast
from leakscope.detect.looks import Interim, Looks, judge_interim
from leakscope.detect.recorded import Key, Life, Readings, generations, settled, subjects
from leakscope.detect.series.counters import PROCESS_START, Counter
from leakscope.model.forecast import Forecast
from leakscope.model.soak import CounterState, Happening, Look, SoakState
from leakscope.record.processes import Process
from leakscope.soak.totals import Restarts, Totals

FloatArray = npt.NDArray[np.float64]

MIN_LOOK_S = 600.0
MIN_LOOK_READINGS = 40
"""No look before so many readings, nor so soon: start-up takes as long."""
SHOWN = ("rss", "rss_anon", "pss", "vss", "gpu_used", "cgroup", "cgroup_anon", "heap_inuse", "fds", "threads")
COURSE_POINTS = 40
HOUR_S = 3600.0


@dataclass
class Plan:
    """What a soak watches for: ``duration_s`` is the horizon over which alpha holds."""

    target: str
    output: str
    duration_s: float
    look_every_s: float = HOUR_S
    limit_bytes: float | None = None
    everyone: bool = False
    cgroup: str = ""
    total_alpha: float = 0.05
    scale: float | None = None


@dataclass
class _Store:
    """Readings that grow: doubles in C arrays, 16 bytes each."""

    times: dict[Key, array[float]] = field(default_factory=dict)
    values: dict[Key, array[float]] = field(default_factory=dict)
    declared: frozenset[str] | None = None
    version: int = 0

    def add(self, key: Key, t_s: float, value: float) -> None:
        """Add a reading; one that is not later than the last is left out."""
        times = self.times.get(key)
        if times is None:
            times = self.times[key] = array("d")
            self.values[key] = array("d")
        if not times or t_s > times[-1]:
            times.append(t_s)
            self.values[key].append(value)
            self.version += 1

    def extend(self, key: Key, t_s: FloatArray, values: FloatArray) -> None:
        """Add many readings, in their order."""
        for at, value in zip(t_s.tolist(), values.tolist(), strict=True):
            self.add(key, at, value)

    def hold(self, key: Key, value: float) -> None:
        """Give a series that was never read one value at all times of the first counter of its scope."""
        like = next((times for of, times in self.times.items() if of[:2] == key[:2]), None)
        if like is not None and key not in self.times:
            for at in list(like):
                self.add(key, at, max(value, -1e9))

    def until(self, t_s: float) -> Readings:
        """Readings up to a time, as arrays of their own."""
        found = Readings(declared=self.declared)
        for key, times in self.times.items():
            at = np.array(times)
            count = int(np.searchsorted(at, t_s, "right"))
            if count:
                found.series[key] = (at[:count], np.array(self.values[key])[:count])
        return found


class Watch:
    """Takes readings (any thread), looks when it is time (:meth:`advance`), says how things stand (:meth:`state`)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.looks: list[Look] = []
        self.happenings: list[Happening] = []
        self._spending = Looks(plan.total_alpha, plan.duration_s)
        self._interim: Interim | None = None
        self._next_look_s = plan.look_every_s
        self._lock = threading.Lock()
        self._store = _Store()
        self._totals = Totals()
        self._restarts = Restarts()
        self._shown: tuple[int, tuple[CounterState, ...]] = (-1, ())

    def load(self, readings: Readings, lives: Sequence[Life]) -> None:
        """Take the readings of earlier recordings of the same capture, or of one that is replayed."""
        known = settled(readings, lives)
        roots = [life for life in known if life.root]
        service = next((one for one in subjects(readings, known) if one.kind == "service"), None)
        with self._lock:
            self._store.declared = readings.declared
            for counter in service.counters if service is not None else []:
                if not counter.name.startswith("cgroup") or ("service", "", counter.name) in readings.series:
                    self._store.extend(("service", "", counter.name), counter.t_s, counter.value)
            for key, (t, v) in readings.series.items():
                if key[0] in ("cgroup", "device"):
                    self._store.extend(key, t, v)
            begun = generations(roots)
            self._restarts.load(begun, roots)
            self._store.hold(("service", "", PROCESS_START), begun[0].start_s if begun else 0.0)

    def add(self, rows: pa.Table, zero_ns: int, lives: Sequence[Life]) -> None:
        """Take one reading of the samplers: rows of `samples`, and the processes so far."""
        columns = rows.select(["ts_ns", "scope", "scope_id", "counter", "value"]).to_pydict()
        read = list(zip(*columns.values(), strict=True))
        if not read:
            return
        at = (max(row[0] for row in read) - zero_ns) / 1e9
        with self._lock:
            self._restarts.add(lives)
            totals = self._totals.add(row[1:] for row in read)
            if totals and self._restarts.begun:
                totals[PROCESS_START] = max(self._restarts.begun[-1].start_s, -1e9)
            for counter, value in totals.items():
                self._store.add(("service", "", counter), at, value)
            for ts_ns, scope, scope_id, counter, value in read:
                if scope in ("cgroup", "device"):
                    self._store.add((scope, scope_id, counter), (ts_ns - zero_ns) / 1e9, value)

    def add_values(self, at_s: float, values: Mapping[str, float]) -> None:
        """Take one reading of counters that a service itself tells; :meth:`declare` says which are bytes."""
        with self._lock:
            for counter, value in values.items():
                self._store.add(("service", "", counter), at_s, value)

    def declare(self, byte_counters: Iterable[str]) -> None:
        """Name the counters that are in bytes, where their names do not say it."""
        with self._lock:
            self._store.declared = frozenset(byte_counters)

    def tell(self, elapsed_s: float, what: str, text: str) -> None:
        """Something happened that the report must tell."""
        with self._lock:
            self.happenings.append(Happening(elapsed_s, what, text))

    def end_lives(self, elapsed_s: float) -> None:
        """A recording ended: of whom nothing more is read, nothing more is known."""
        with self._lock:
            self._restarts.end(elapsed_s)

    def counters(self, until_s: float = float("inf")) -> list[Counter]:
        """The counters of the recorded processes together, up to a time."""
        with self._lock:
            readings = self._store.until(until_s)
        found = subjects(readings, [], everyone=self.plan.everyone, cgroup=self.plan.cgroup)
        return next((one.counters for one in found if one.kind == "service"), [])

    def advance(self, elapsed_s: float) -> list[Look]:
        """Take all looks that are due by now, each at the readings up to its own time; those that were taken.

        A soak that was interrupted takes its earlier looks again, and so stands where it stood.
        """
        taken = []
        while self._next_look_s <= elapsed_s:
            at, self._next_look_s = self._next_look_s, self._next_look_s + self.plan.look_every_s
            if (look := self._look(at)) is not None:
                taken.append(look)
        return taken

    def _look(self, at_s: float) -> Look | None:
        counters = self.counters(at_s)
        longest = max((len(counter.t_s) for counter in counters), default=0)
        if at_s < MIN_LOOK_S or longest < MIN_LOOK_READINGS:
            return None
        before = self._interim
        self._interim = interim = judge_interim(counters, self._spending, at_s, before)
        verdict = interim.judged.verdict
        growing = verdict.growth if interim.candidate_since_s is not None else None
        look = Look(
            at_s,
            interim.alpha,
            verdict,
            interim.alarm,
            interim.candidate_since_s,
            interim.score,
            interim.needed,
            forecast(counters, growing, self.plan.limit_bytes),
        )
        alarmed = bool(self.looks and self.looks[-1].alarm)
        self.looks.append(look)
        if look.alarm and not alarmed:
            self.tell(at_s, "alarm", "; ".join(verdict.reasons[:2]))
        elif alarmed and not look.alarm:
            self.tell(at_s, "withdrawn", "withdrawn: the growth did not go on")
        return look

    @property
    def first_alarm_s(self) -> float | None:
        """When the first look alarmed."""
        return next((look.elapsed_s for look in self.looks if look.alarm), None)

    def forecast(self) -> Forecast | None:
        """Of the last look."""
        return self.looks[-1].forecast if self.looks else None

    def restarts(self, until_s: float = float("inf")) -> list[Happening]:
        """Each time when all targets had ended and others began in their place."""
        with self._lock:
            begun = self._restarts.begun[1:]
        return [
            Happening(
                life.start_s, "target", f"the target was started again: {life.name or 'process'} (PID {life.pid})"
            )
            for life in begun
            if life.start_s <= until_s
        ]

    def history(self, until_s: float = float("inf")) -> list[Happening]:
        """All that happened, in order."""
        with self._lock:
            told = [one for one in self.happenings if one.elapsed_s <= until_s]
        return sorted([*told, *self.restarts(until_s)], key=lambda one: one.elapsed_s)

    def state(self, elapsed_s: float, lost: int = 0) -> SoakState:
        """How things stand."""
        version = self._store.version
        if self.plan.scale is not None or self._shown[0] != version:
            counters = {counter.name: counter for counter in self.counters(elapsed_s)}
            self._shown = version, tuple(_shown(counters[name]) for name in SHOWN if name in counters)
        alive = len(self._totals)
        history = self.history(elapsed_s)
        return SoakState(
            self.plan.target,
            self.plan.output,
            elapsed_s,
            self.plan.duration_s,
            self._shown[1],
            alive,
            1 + sum(one.what == "target" for one in history),
            len(self.looks),
            self.looks[-1] if self.looks else None,
            self._next_look_s,
            self.forecast(),
            tuple(history[-5:]),
            lost,
            self.plan.scale,
        )


def _shown(counter: Counter) -> CounterState:
    t, v = counter.t_s, counter.value
    since = int(np.searchsorted(t, t[-1] - HOUR_S, "right")) - 1
    last_hour = float(v[-1] - v[since]) if since >= 0 else None
    picked = np.unique(np.linspace(0, len(v) - 1, min(COURSE_POINTS, len(v))).astype(int))
    return CounterState(counter.shown, float(v[-1]), counter.in_bytes, last_hour, tuple(v[picked].tolist()))


def lives_of(processes: Sequence[Process], zero_ns: int) -> list[Life]:
    """Processes of a recording on the axis of a soak."""
    return [
        Life(
            process.pid,
            process.name,
            (process.start_ns - zero_ns) / 1e9 if process.start_ns else float("-inf"),
            (process.exit_ns - zero_ns) / 1e9 if process.exit_ns else float("inf"),
            process.role == "root",
        )
        for process in processes
    ]

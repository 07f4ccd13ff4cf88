"""Counters of live recordings, put in order for the series engine: whose they are, on one axis of time.

A recording samples processes, groups, devices and the host. What is judged is a *subject*: the recorded processes
together (with their group's and device's figures where those are theirs alone), each process or worker by itself, and
what they share with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from leakscope.detect.series.counters import PROCESS_START, Counter, counts_bytes

FloatArray = npt.NDArray[np.float64]
Key = tuple[str, str, str]
"""(scope, scope_id, counter), as in the table `samples`."""

MAX_PROCESSES = 32
"""Processes (or chains of them under one name) that are judged by themselves, the largest first."""
MIN_READINGS = 8
OWN_SHARE = (0.8, 1.25)
"""A group whose anonymous memory is that of the recorded processes, within this share, is theirs alone."""
MIN_HOST_GAIN_BYTES = 1 << 20
"""Host-wide counters that gained less are not judged: there are some 300 of them, and most never move."""
SILENT_READINGS = 3.0
"""A process that was not read for so many intervals while others were has ended."""
NOT_SUMMED = ("_peak",)
"""Ends of names of running maxima: they rise by construction."""
SUMMED_AS = {"gpu_process_used": "gpu_used"}
SAME_START_S = 1.0
"""Starts of one process as two recordings tell them: /proc counts in hundredths of a second."""
START_ERROR_S = 0.02
"""The start of a process is read in hundredths of a second, its end to the nanosecond."""
BRIEF_PID = -1
"""Stands for all processes that were read too few times to be told apart: their readings are sums."""
_GAUGES = frozenset({"threads", "fds"})


@dataclass(frozen=True)
class Life:
    """One process from start to end, in seconds on the axis of the readings; ``end_s`` infinite: still alive."""

    pid: int
    name: str = ""
    start_s: float = float("-inf")
    end_s: float = float("inf")
    root: bool = True


@dataclass(frozen=True)
class Subject:
    """What one judgement is about. ``kind``: service, process, cgroup, device or host. ``shared``: others are counted
    in it as well, so that its growth need not be the recorded processes'."""

    kind: str
    name: str
    counters: list[Counter]
    shared: bool = False


@dataclass
class Readings:
    """All readings of a recording: times in seconds since its zero (rising) and values, by whose they are."""

    series: dict[Key, tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    declared: frozenset[str] | None = None  # names of counters in bytes, where the source says so

    def of_scope(self, scope: str) -> dict[str, dict[str, tuple[FloatArray, FloatArray]]]:
        """scope_id → counter → (times, values)."""
        found: dict[str, dict[str, tuple[FloatArray, FloatArray]]] = {}
        for (of, scope_id, counter), values in self.series.items():
            if of == scope and len(values[0]):
                found.setdefault(scope_id, {})[counter] = values
        return found

    def span_s(self) -> float:
        """From the first reading to the last."""
        times = [t for t, _ in self.series.values() if len(t)]
        return float(max(t[-1] for t in times) - min(t[0] for t in times)) if times else 0.0


def readings_of(
    rows: Mapping[str, npt.NDArray[np.generic]], zero_ns: Mapping[int, int], texts: Mapping[str, Sequence[str]]
) -> Readings:
    """Readings of columns of `samples`: source_id, ts_ns, value, and scope, scope_id and counter as codes into
    ``texts``. ``zero_ns``: the time of a source's clock that is zero on the common axis."""
    order = np.lexsort((rows["ts_ns"], rows["source_id"], rows["counter"], rows["scope_id"], rows["scope"]))
    code = {name: np.asarray(rows[name])[order].astype(np.int64) for name in ("scope", "scope_id", "counter")}
    source, ts_ns = np.asarray(rows["source_id"])[order], np.asarray(rows["ts_ns"])[order].astype(np.int64)
    zeros = np.zeros(len(order), np.int64)
    for number, zero in zero_ns.items():
        zeros[source == number] = zero
    t_s, value = (ts_ns - zeros) / 1e9, np.asarray(rows["value"])[order].astype(np.float64)
    changes = np.zeros(len(order), bool)
    for column in code.values():
        changes[1:] |= column[1:] != column[:-1]
    edges = [*np.flatnonzero(changes).tolist(), len(order)] if len(order) else []
    readings, begin = Readings(), 0
    for end in edges:
        key = tuple(texts[name][int(code[name][begin])] for name in ("scope", "scope_id", "counter"))
        times, values = t_s[begin:end], value[begin:end]
        if (np.diff(times) <= 0).any():  # of several sources, or two readings of one moment
            times, first = np.unique(times, return_index=True)
            values = values[first]
        readings.series[key[0], key[1], key[2]] = (times, values)
        begin = end
    return readings


def subjects(readings: Readings, lives: Sequence[Life], *, everyone: bool = False, cgroup: str = "") -> list[Subject]:
    """What to judge, the recorded processes together first.

    :param everyone: the whole host was recorded, so nobody else is counted in its figures.
    :param cgroup: the group that was recorded ('' for none), as its path ends.
    """
    processes = [(life, of) for life, of in _of_lives(readings, settled(readings, lives)) if of]
    found: list[Subject] = []
    grid = _grid(processes)
    totals = _totals(processes, grid) if len(grid) else {}
    begun = generations([life for life, _ in processes if life.root])
    if len(begun) > 1 and len(grid):
        totals[PROCESS_START] = (grid, _process_start(grid, [life.start_s for life in begun]))
    totals |= readings.of_scope("service").get("", {})
    theirs, others = _groups(readings, totals, grid, everyone=everyone, cgroup=cgroup)
    device, shared_device = _devices(readings, totals, everyone=everyone)
    own = {**totals, **theirs, **device}
    if own:
        found.append(Subject("service", "the recorded processes", _counters(own, readings.declared)))
    found += _single(processes) if len(processes) > 1 else []
    found += [Subject("cgroup", name, _counters(of), True) for name, of in others.items()]
    found += [Subject("device", name, _counters(of), True) for name, of in shared_device.items()]
    if host := _host(readings):
        found.append(Subject("host", "the host", host, not everyone))
    return found


def settled(readings: Readings, lives: Sequence[Life]) -> list[Life]:
    """The processes with ends and starts that their recorder could not tell, as it was killed or began later: from the
    first reading of each to its last, where others were read before or after."""
    # Maxima are told of processes that are gone already.
    read_of = {
        scope_id: [t for name, (t, _) in of.items() if not name.endswith(NOT_SUMMED)]
        for scope_id, of in readings.of_scope("process").items()
    }
    spans = {
        scope_id: (min(float(t[0]) for t in times), max(float(t[-1]) for t in times))
        for scope_id, times in read_of.items()
        if times
    }
    read = [t for times in read_of.values() for t in times]
    times = np.unique(np.concatenate(read)) if read else np.empty(0)
    if len(times) < 2:
        return list(lives)
    silence = SILENT_READINGS * float(np.median(np.diff(times)))
    last_of = {life.pid: life for life in sorted(lives, key=lambda one: one.start_s)}
    made = []
    for life in lives:
        span = spans.get(str(life.pid))
        if span is not None:
            start, end = life.start_s, life.end_s
            if end == float("inf") and last_of[life.pid] is life and span[1] + silence < times[-1]:
                end = span[1]
            if max(start, times[0]) + silence < span[0]:
                start = span[0]  # it joined a group long after it began
            life = Life(life.pid, life.name, start, end, life.root)
        made.append(life)
    return made


def _of_lives(
    readings: Readings, lives: Sequence[Life]
) -> Iterator[tuple[Life, dict[str, tuple[FloatArray, FloatArray]]]]:
    """Each process with its readings; a PID that was given out twice is two of them."""
    by_pid: dict[int, list[Life]] = {}
    for life in sorted(lives, key=lambda one: one.start_s):
        by_pid.setdefault(life.pid, []).append(life)
    for scope_id, counters in readings.of_scope("process").items():
        pid = int(scope_id) if scope_id.isdigit() else BRIEF_PID
        known = by_pid.get(pid, [Life(pid, root=False)])
        bounds = [life.start_s for life in known[1:]]
        for number, life in enumerate(known):
            low = bounds[number - 1] if number else float("-inf")
            high = bounds[number] if number < len(bounds) else float("inf")
            part = {}
            for name, (t, v) in counters.items():
                if name.endswith(NOT_SUMMED):
                    continue
                inside = (t >= low) & (t < high)
                if inside.any():
                    part[name] = (t[inside], v[inside])
            yield life, part


def _grid(processes: Sequence[tuple[Life, Mapping[str, tuple[FloatArray, FloatArray]]]]) -> FloatArray:
    """Times at which any process was read."""
    times = [t for _, of in processes for name, (t, _) in of.items() if name in ("rss", "vss", "gpu_process_used")]
    return np.unique(np.concatenate(times)) if times else np.empty(0)


def _totals(
    processes: Sequence[tuple[Life, Mapping[str, tuple[FloatArray, FloatArray]]]], grid: FloatArray
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Sums over processes at the times of ``grid``: of each its last reading, from its first one to its last."""
    sums: dict[str, FloatArray] = {}
    read: dict[str, npt.NDArray[np.bool_]] = {}
    count = np.zeros(len(grid))
    for life, counters in processes:
        first, last = len(grid), 0
        for name, (t, v) in counters.items():
            if life.pid == BRIEF_PID:  # sums of others each time: none is held until the next
                at = np.searchsorted(grid, t)
                total = sums.setdefault(SUMMED_AS.get(name, name), np.zeros(len(grid)))
                total[at] += v
                read.setdefault(SUMMED_AS.get(name, name), np.zeros(len(grid), bool))[at] = True
                continue
            begin, end = int(np.searchsorted(grid, t[0])), int(np.searchsorted(grid, t[-1], "right"))
            if begin >= end:
                continue
            name = SUMMED_AS.get(name, name)
            total = sums.setdefault(name, np.zeros(len(grid)))
            held = v[np.searchsorted(t, grid[begin:end], "right") - 1]
            total[begin:end] += held
            read.setdefault(name, np.zeros(len(grid), bool))[begin:end] = True
            first, last = min(first, begin), max(last, end)
        count[first:last] += 1
    totals = {name: (grid[read[name]], total[read[name]]) for name, total in sums.items()}
    if len(processes) > 1 and np.ptp(count):
        totals["num_processes"] = (grid[count > 0], count[count > 0])
    return totals


def generations(roots: Sequence[Life]) -> list[Life]:
    """The first process of the recording, and each that began when all before it had ended."""
    first: list[Life] = []
    until = float("-inf")
    for life in sorted(roots, key=lambda one: one.start_s):
        if not first or life.start_s + START_ERROR_S >= until:
            first.append(life)
        until = max(until, life.end_s)
    return first


def _process_start(at: FloatArray, starts: Sequence[float]) -> FloatArray:
    """The start of the process that ran at each time: a change is a restart."""
    started: FloatArray = np.array([max(starts[0], -1e9), *starts[1:]])
    return started[np.searchsorted(np.array(starts[1:]), at, "right")]


def _groups(
    readings: Readings,
    totals: Mapping[str, tuple[FloatArray, FloatArray]],
    grid: FloatArray,
    *,
    everyone: bool,
    cgroup: str,
) -> tuple[dict[str, tuple[FloatArray, FloatArray]], dict[str, dict[str, tuple[FloatArray, FloatArray]]]]:
    """(counters of the one group that is the recorded processes' own, those of the other groups)."""
    groups = readings.of_scope("cgroup")
    if everyone:
        return {}, groups
    place = "/" + cgroup.strip("/")
    own = next((name for name in groups if cgroup and name != "/" and place.endswith(name)), "")
    if not own and len(groups) == 1:
        (name,) = groups
        anon, total = groups[name].get("cgroup_anon"), totals.get("rss_anon")
        if anon is not None and total is not None:
            level = float(np.median(total[1]))
            if level > 0 and OWN_SHARE[0] <= float(np.median(anon[1])) / level <= OWN_SHARE[1]:
                own = name
    others = {name: of for name, of in groups.items() if name != own and not (own and name.startswith(own + "/"))}
    return groups.get(own, {}), others


def _devices(
    readings: Readings, totals: Mapping[str, tuple[FloatArray, FloatArray]], *, everyone: bool
) -> tuple[dict[str, tuple[FloatArray, FloatArray]], dict[str, dict[str, tuple[FloatArray, FloatArray]]]]:
    """(device memory that is the recorded processes' alone, devices that they may share)."""
    devices = {
        name: {"gpu_used": of["gpu_used"]} for name, of in readings.of_scope("device").items() if "gpu_used" in of
    }
    if everyone and len(devices) == 1 and "gpu_used" not in totals:
        return next(iter(devices.values())), {}
    return {}, devices


def _single(processes: Sequence[tuple[Life, Mapping[str, tuple[FloatArray, FloatArray]]]]) -> list[Subject]:
    """Each process by itself; one that began under the name of one that had ended continues it."""
    chains: dict[str, list[list[tuple[Life, Mapping[str, tuple[FloatArray, FloatArray]]]]]] = {}
    for life, of in sorted(processes, key=lambda one: (one[0].start_s, one[0].pid)):
        if life.pid == BRIEF_PID:
            continue
        of_name = chains.setdefault(life.name or f"PID {life.pid}", [])
        free = next((chain for chain in of_name if chain[-1][0].end_s <= life.start_s), None)
        if free is None:
            of_name.append([(life, of)])
        else:
            free.append((life, of))
    made = []
    for name, of_name in chains.items():
        for chain in of_name:
            merged: dict[str, tuple[FloatArray, FloatArray]] = {}
            for counter in {c for _, of in chain for c in of}:
                parts = [of[counter] for _, of in chain if counter in of]
                t, v = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
                merged[SUMMED_AS.get(counter, counter)] = (t, v)
            times = merged.get("rss", next(iter(merged.values())))[0]
            if len(times) < MIN_READINGS:
                continue
            counters = _counters(merged)
            if len(chain) > 1:
                starts = _process_start(times, [life.start_s for life, _ in chain])
                counters.append(Counter(PROCESS_START, times, starts, False))
            label = f"{name} (PID {chain[-1][0].pid})" if not name.startswith("PID") else name
            size = float(merged["rss"][1][-1]) if "rss" in merged else 0.0
            made.append((size, Subject("process", label, counters)))
    made.sort(key=lambda pair: -pair[0])
    return [subject for _, subject in made[:MAX_PROCESSES]]


def _host(readings: Readings) -> list[Counter]:
    """Slab caches and lines of meminfo that grew, at the times when the host was read.

    Samplers leave out readings that repeat; straight lines between the rows give back what was read.
    """
    host = readings.of_scope("host").get("", {})
    if not host:
        return []
    grid = np.unique(np.concatenate([t for t, _ in host.values()]))
    kept = {}
    for name, (t, v) in host.items():
        edge = max(1, len(v) // 10)
        gained = abs(float(np.median(v[-edge:]) - np.median(v[:edge])))
        if name.endswith("_num") or gained < MIN_HOST_GAIN_BYTES:
            continue
        times = grid[(grid >= t[0]) & (grid <= t[-1])]
        kept[_host_name(name)] = (times, np.interp(times, t, v))
    return _counters(kept)


def _host_name(name: str) -> str:
    """Lines of meminfo in small letters, as in tables of counters: `meminfo_active_file`."""
    if not name.startswith("meminfo_"):
        return name
    return name.lower().replace("(", "_").replace(")", "")


def _counters(of: Mapping[str, tuple[FloatArray, FloatArray]], declared: frozenset[str] | None = None) -> list[Counter]:
    return [
        Counter(name, t, v, name not in _GAUGES and counts_bytes(name, declared))
        for name, (t, v) in sorted(of.items())
        if len(t)
    ]

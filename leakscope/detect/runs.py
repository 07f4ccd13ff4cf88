"""What a capture's run did: its length, its work, the courses of its counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from leakscope.correlate.lives import BINS
from leakscope.detect import growth
from leakscope.detect.attribution import EVENTS_ZERO_NS
from leakscope.detect.counters import FROM_ZERO, counters_of
from leakscope.detect.series.counters import COLLECTIONS, EVICTIONS, TEARDOWN, Counter
from leakscope.model.manifest import Manifest, Source
from leakscope.model.runs import CounterCourse, Run

if TYPE_CHECKING:
    import duckdb

MAX_MARKS = 1000
"""Names of ranges that are kept, the most frequent ones."""
MIN_READINGS = 10
TENTH = 0.1


def run_of(con: duckdb.DuckDBPyConnection, manifest: Manifest) -> Run:
    """The run that a capture is of; ``con`` has a view for each of its tables. Raises duckdb.Error."""
    starts, ends, zeros = [], [], []
    bounds = {
        int(source): (int(first), int(last))
        for source, first, last in con.execute(
            "SELECT source_id, min(ts_ns), max(ts_ns) FROM mem_events GROUP BY source_id ORDER BY source_id"
        ).fetchall()
    }
    for source in manifest.sources:
        start, end = source.start_ns, source.end_ns
        if source.id in bounds:  # a recording that was killed has no end
            start, end = min(start or bounds[source.id][0], bounds[source.id][0]), max(end, bounds[source.id][1])
        if end > start:
            starts.append(start)
            ends.append(end)
            zeros.append(_zero(source, start))
    totals: dict[str, float] = {}
    courses = []
    for counter in (c for source in manifest.sources if source.clock != "none" for c in counters_of(con, source)):
        if counter.name.endswith("_total"):
            if not_work(counter.name):
                continue
            steps = np.diff(counter.value[np.isfinite(counter.value)])
            totals[counter.name] = totals.get(counter.name, 0.0) + float(steps[steps > 0].sum())  # restarts fall
        elif (course := course_of(counter)) is not None:
            courses.append(course)
    marks = con.execute(
        "SELECT name, count(*) FROM marks GROUP BY name ORDER BY count(*) DESC, name LIMIT ?", [MAX_MARKS]
    ).fetchall()
    longest = max(range(len(starts)), key=lambda i: ends[i] - starts[i], default=None)
    return Run(
        zero_ns=zeros[longest] if longest is not None else 0,
        start_ns=starts[longest] if longest is not None else 0,
        end_ns=ends[longest] if longest is not None else 0,
        totals=dict(sorted(totals.items())),
        marks={str(name): int(count) for name, count in sorted(marks)},
        counters=tuple(sorted(courses, key=lambda c: c.name)),
    )


def not_work(name: str) -> bool:
    """Whether a running count is of housekeeping (collections, evictions, re-creations), not of work."""
    return any(pattern.fullmatch(name) for pattern in (TEARDOWN, COLLECTIONS, EVICTIONS))


def _zero(source: Source, start_ns: int) -> int:
    """Time zero of a source: that of event files is fixed, tables of counters have their own, else the start."""
    if source.kind == "events":
        return min(EVENTS_ZERO_NS, start_ns)
    return 0 if source.clock == FROM_ZERO else start_ns


def course_of(counter: Counter, warm_up_share: float = growth.WARM_UP_SHARE) -> CounterCourse | None:
    """How a counter went; None without a finite reading. The first fifth of the time is warm-up."""
    good = np.isfinite(counter.value) & np.isfinite(counter.t_s)
    at, value = counter.t_s[good], counter.value[good]
    if not len(value):
        return None
    after = at >= at[0] + warm_up_share * (at[-1] - at[0])
    span = float(at[-1] - at[0])
    rate = None
    rise = float(value[-1] - value[0])
    if after.sum() >= MIN_READINGS and span > 0:
        warm = value[after]
        tenth = max(1, int(TENTH * len(warm)))
        rise = float(np.median(warm[-tenth:]) - np.median(warm[:tenth]))
        edges = np.linspace(at[after][0], at[-1], BINS + 1)[1:]
        curve = np.interp(edges, at[after], warm)[None, :] - warm[0]
        seconds = np.array([(at[-1] - at[after][0]) / BINS])
        found = growth.rates(curve, np.zeros(1, np.int64), seconds)
        rate = (float(found.low[0]), float(found.mean[0]), float(found.high[0]))
    return CounterCourse(
        counter.name, float(value[0]), float(value[-1]), float(value.max()), rise, rate, counter.in_bytes
    )


def joined(runs: Sequence[Run]) -> Run:
    """Several captures as one run: counts add up, the longest gives the time, a counter's courses stay apart."""
    if not runs:
        return Run()
    totals: dict[str, float] = {}
    marks: dict[str, int] = {}
    for run in runs:
        for name, value in run.totals.items():
            totals[name] = totals.get(name, 0.0) + value
        for name, count in run.marks.items():
            marks[name] = marks.get(name, 0) + count
    longest = max(runs, key=lambda run: run.duration_s)
    return Run(
        longest.zero_ns,
        longest.start_ns,
        longest.end_ns,
        dict(sorted(totals.items())),
        dict(sorted(marks.items())),
        tuple(counter for run in runs for counter in run.counters),
    )

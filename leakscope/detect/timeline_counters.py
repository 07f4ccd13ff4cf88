"""Counters over time, for reports that draw them: which of them, in how many points, with which slope."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from leakscope.detect.counters import counters_of
from leakscope.detect.recorded_lives import Recorded, recorded_subjects, zeros_ns
from leakscope.detect.series.book import Book
from leakscope.detect.series.counters import Counter, layer_of
from leakscope.detect.series.judge import MIN_SPAN_S
from leakscope.detect.series.trend import Course
from leakscope.model.manifest import Source
from leakscope.model.results import Report
from leakscope.model.timeline import COUNTER, MAX_POINTS, Moment, Series, Slope

if TYPE_CHECKING:
    import duckdb

FloatArray = npt.NDArray[np.float64]

MAIN = {
    "rss": "RSS",
    "pss": "PSS",
    "vss": "VSS",
    "rss_anon": "RSS, anonymous",
    "cgroup": "control group",
    "gpu_used": "GPU memory in use",
    "gpu_reserved": "held by the GPU allocator",
    "gpu_allocated": "used in the GPU allocator",
}
"""Counters that are drawn wherever they are there, and what they are called."""
NAMES = MAIN | {
    "rss_file": "RSS, files",
    "shared_clean": "shared with others, clean",
    "page_tables": "page tables",
    "cgroup_anon": "control group, anonymous",
    "cgroup_file": "control group, page cache",
    "meminfo_sunreclaim": "SUnreclaim",
    "gpu_process_used": "GPU memory of the processes",
}
MAX_COUNTERS = 16
"""Counters that are drawn: the main ones, those that verdicts name, then those that gained most."""
MIN_SHARE_OF_GAIN = 0.2
"""Counters that no verdict names are drawn from this share of what the first of them gained on."""
LEAST_SPAN_SHARE = 0.9
"""Of the time that counters must be read for: their floor begins and ends a window later and earlier."""
NO_LINE = (Course.RETURNED, Course.SHORT)


@dataclass(frozen=True)
class ReadCounter:
    """A counter, whose it is, and whether others are counted in it."""

    counter: Counter
    of: str = ""
    shared: bool = False


def read_counters(
    con: duckdb.DuckDBPyConnection, sources: Sequence[Source], recorded: Recorded | None
) -> list[ReadCounter]:
    """All counters of the sources, those of recorded processes together summed over them."""
    if sources[0].kind != "recording":
        return [ReadCounter(counter) for counter in counters_of(con, sources[0])]
    found = recorded.subjects if recorded else []
    if recorded and not found:  # too short to be judged; not to be drawn
        found = recorded_subjects(con, sources)
    several = sum(subject.kind == "cgroup" for subject in found) > 1
    kinds = ("service", "cgroup", "device", "host")
    read = []
    for subject in found:
        name = subject.name if subject.kind == "cgroup" and several else ""
        if subject.kind in kinds:
            read += [ReadCounter(c, name, subject.shared) for c in subject.counters]
    return [*read, *_unreclaimable(con, sources, {one.counter.name for one in read})]


def _unreclaimable(con: duckdb.DuckDBPyConnection, sources: Sequence[Source], known: set[str]) -> Iterator[ReadCounter]:
    """SUnreclaim, which kernel memory is held against, however little it gained."""
    name = "meminfo_sunreclaim"
    if name in known:
        return
    zeros = zeros_ns(sources)
    rows = con.execute(
        "SELECT source_id, ts_ns, value FROM samples WHERE counter = 'meminfo_SUnreclaim' AND scope = 'host' "
        "AND list_contains(?, source_id) ORDER BY source_id, ts_ns",
        [list(zeros)],
    ).fetchall()
    if len(rows) > 1:
        times = np.array([(ts - zeros[source]) / 1e9 for source, ts, _ in rows])
        values = np.array([value for _, _, value in rows], np.float64)
        order = np.argsort(times, kind="stable")
        yield ReadCounter(Counter(name, times[order], values[order], True), shared=True)


def named_counters(report: Report) -> list[str]:
    """Counters that verdicts name, as ``samples`` calls them."""
    names = []
    for verdict in (report.verdict, *report.findings):
        named = [verdict.culprit.counter if verdict.culprit else "", verdict.growth.counter if verdict.growth else ""]
        names += [name for text in named for name in (text, text.removesuffix("_bytes")) if name]
    return list(dict.fromkeys(names))


def most_telling(read: Sequence[ReadCounter], wanted: Sequence[str], explained: Collection[str]) -> list[ReadCounter]:
    """What is drawn, at most :data:`MAX_COUNTERS`; what never was anything but zero is not. ``wanted``: named by
    verdicts; ``explained``: held against events."""
    moving = [one for one in read if len(one.counter.t_s) > 1 and np.isfinite(one.counter.value).all()]
    moving = [one for one in moving if np.any(one.counter.value) and not _of_work(one.counter)]

    def rank(one: ReadCounter) -> tuple[int, float]:
        name = one.counter.name
        if name in wanted:
            return 0, float(wanted.index(name))
        if name in MAIN or name in explained:
            return 1, 0.0
        gained = float(one.counter.value[-1] - one.counter.value[0]) if one.counter.in_bytes else 0.0
        return 2, -gained

    ranked = sorted(moving, key=rank)
    named = [one for one in ranked if rank(one)[0] < 2]
    more = [one for one in ranked if rank(one)[0] == 2 and not one.shared]
    least = max((-rank(one)[1] for one in more), default=0.0) * MIN_SHARE_OF_GAIN
    more = [one for one in more if -rank(one)[1] > least]
    return [*named, *more[: max(0, MAX_COUNTERS - len(named))]][:MAX_COUNTERS]


def _of_work(counter: Counter) -> bool:
    return counter.name.endswith("_total")


def series_of(one: ReadCounter) -> Series:
    """The counter with few enough points, and what people call it."""
    counter = one.counter
    label = NAMES.get(counter.name, counter.shown)
    if one.of:
        label = f"{label} of {one.of}"
    times, values = thinned(counter.t_s, counter.value)
    layer, count = layer_of(counter.name), len(counter.t_s)
    return Series(counter.name, label, COUNTER, layer, counter.in_bytes, times, values, count, one.shared)


def thinned(t_s: FloatArray, value: FloatArray, most: int = MAX_POINTS) -> tuple[FloatArray, FloatArray]:
    """At most ``most`` points: the first and the last, and of each of equal buckets of readings the least and the
    greatest value, in their order in time."""
    if len(t_s) <= most:
        return t_s, value
    buckets = (most - 2) // 2
    edges = np.linspace(0, len(t_s), buckets + 1).astype(np.int64)[:-1]
    bucket = np.searchsorted(edges, np.arange(len(t_s)), "right") - 1
    order = np.lexsort((value, bucket))
    last = np.r_[edges[1:], len(t_s)] - 1
    kept = np.unique(np.concatenate([order[edges], order[last], [0, len(t_s) - 1]]))
    return t_s[kept], value[kept]


def counter_slopes(drawn: Sequence[ReadCounter], starts: Sequence[Counter], wanted: Sequence[str]) -> list[Slope]:
    """The lines of counters that rise for good, and of those that verdicts name, through the floor that was fitted."""
    slopes = []
    counters = [one.counter for one in drawn]
    for name in dict.fromkeys(counter.name for counter in counters):
        book = Book([next(c for c in counters if c.name == name), *starts])
        course = book.course(name)
        base = course.floor
        if base is None or course.lives > 1 or not np.isfinite(course.rate):
            continue
        if base.t_s[-1] - base.t_s[0] < LEAST_SPAN_SHARE * MIN_SPAN_S:
            continue  # too short to prove anything
        if not course.rising and (name not in wanted or course.course in NO_LINE or course.low == course.high):
            continue
        inside = base.t_s >= course.start_s
        if inside.sum() < 2:
            continue
        middle = float(base.t_s[inside].mean())
        at = float(np.median(base.value[inside] - course.rate * (base.t_s[inside] - middle)))
        slopes.append(
            Slope(name, COUNTER, course.start_s, course.end_s, middle, at, course.rate, course.low, course.high)
        )
    return slopes


def restarts(starts: Sequence[Counter]) -> list[Moment]:
    """When the process began anew; ``starts``: the counter of its start, where there is one."""
    return [Moment(float(t), "restart", "the process restarts") for t in Book(starts).restarted_s]

"""What memory did over time, for reports that draw it: live bytes, counters, fitted slopes, what changed when.

The numbers are those of the judgement, thinned out to what a page can hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from leakscope.correlate.live_series import FINDINGS, WINDOWS, LiveBytes, live_bytes, remembered, survival
from leakscope.correlate.lives import BINS, FOLDED_PID
from leakscope.detect.attribution import EVENTS_ZERO_NS, Options
from leakscope.detect.counters import FROM_ZERO
from leakscope.detect.growth import PARTS, WARM_UP_SHARE
from leakscope.detect.recorded_lives import Recorded, zeros_ns
from leakscope.detect.series.counters import PROCESS_START
from leakscope.detect.timeline_caches import cache_series, cache_slopes
from leakscope.detect.timeline_counters import (
    NAMES,
    ReadCounter,
    counter_slopes,
    most_telling,
    named_counters,
    read_counters,
    restarts,
    series_of,
    thinned,
)
from leakscope.model.manifest import Manifest, Source
from leakscope.model.results import LayerTotal, Report, Verdict
from leakscope.model.timeline import (
    FINDING,
    LIVE,
    UNEXPLAINED,
    Moment,
    Series,
    Slope,
    Survival,
    Timeline,
)
from leakscope.model.words import KINDS_NOT_ADDED, LAYERS
from leakscope.quantities import counted

if TYPE_CHECKING:
    import duckdb

FloatArray = npt.NDArray[np.float64]

MAX_TIMELINES = 8
MAX_MOMENTS = 40
MAX_FINDINGS = 6
LAYER_NAMES = {"kernel": "kernel memory", "host": "host memory", "gpu": "GPU memory"}
EXPLAINS = {
    "rss": ("host", frozenset({"mmap_anon", "mmap_file", "brk"})),
    "vss": ("host", frozenset({"mmap_anon", "mmap_file", "brk", "mmap_reserve"})),
    "gpu_used": ("gpu", None),
    "meminfo_sunreclaim": ("kernel", frozenset({"kmalloc", "slab"})),
}
"""Counters that events must explain: layer and kinds (None: all that are added), as in the reconciliation."""


def timelines(
    con: duckdb.DuckDBPyConnection, manifest: Manifest, report: Report, options: Options, recorded: Recorded | None
) -> list[Timeline]:
    """One a source that has a course over time; recordings of one capture share theirs. At most
    :data:`MAX_TIMELINES`. ``con`` is as the attribution of ``report`` left it. Raises duckdb.Error."""
    bounds = {
        int(source): (int(start), int(end))
        for source, start, end in con.execute(
            f"SELECT source_id, from_ns, from_ns + {BINS} * bin_ns FROM lives WHERE pid = {FOLDED_PID} ORDER BY 1"
        ).fetchall()
    }
    with_events = {
        int(s) for (s,) in con.execute("SELECT DISTINCT source_id FROM summed JOIN lives USING (life)").fetchall()
    }
    recordings = [source for source in manifest.sources if source.kind == "recording"]
    groups = [recordings] if recordings else []
    groups += [[source] for source in manifest.sources if source.kind != "recording" and source.clock != "none"]
    found: list[Timeline] = []
    for group in groups:
        if len(found) == MAX_TIMELINES:
            break
        made = _timeline(con, group, bounds, with_events, report, options, recorded)
        if made.series:
            found.append(made)
    return found


def _timeline(
    con: duckdb.DuckDBPyConnection,
    sources: Sequence[Source],
    bounds: dict[int, tuple[int, int]],
    with_events: set[int],
    report: Report,
    options: Options,
    recorded: Recorded | None,
) -> Timeline:
    zeros = _zeros(sources, bounds)
    read = read_counters(con, sources, recorded)
    starts = [one.counter for one in read if one.counter.name == PROCESS_START]
    read = [one for one in read if one.counter.name != PROCESS_START]
    wanted = named_counters(report)
    drawn = most_telling(read, wanted, EXPLAINS)
    series = [series_of(one) for one in drawn]
    slopes = counter_slopes(drawn, starts[:1], wanted)
    moments = [] if sources[0].kind == "recording" else restarts(starts)
    survived: list[Survival] = []
    for source in sources:
        caches = cache_series(con, source.id)
        series += caches
        slopes += cache_slopes(caches, report)
    for source in sources:
        if source.id not in bounds or source.id not in with_events:
            continue
        live = live_bytes(con, source.id, bounds[source.id], options.layer, options.pid)
        window = _judged_window(con, source.id, zeros[source.id], options)
        of_source, slopes_of = _live_series(live, zeros[source.id], report.layers, window)
        of_findings, more = _findings(con, source.id, zeros[source.id], report, bounds[source.id], window)
        series += of_source + of_findings
        slopes_of += more
        if len(with_events) == 1:
            slopes += slopes_of
            moments.append(Moment(window[0], "warm-up", "end of the warm-up"))
        series += _unexplained(drawn, live, zeros[source.id])
        survived += _survival(con, source.id, bounds[source.id], zeros[source.id], live, options)
    if len(with_events) <= 1:
        moments += _leak_starts(report)
    moments += _processes(con, sources, zeros)
    moments = sorted(moments, key=lambda one: one.t_s)[:MAX_MOMENTS]
    times = [t for one in series for t in (one.t_s[0], one.t_s[-1])]
    left = len({one.counter.name for one in read}) - len({one.counter.name for one in drawn})
    return Timeline(
        " + ".join(source.name for source in sources),
        float(min(times, default=0.0)),
        float(max(times, default=0.0)),
        tuple(series),
        tuple(slopes),
        tuple(moments),
        tuple(survived),
        (f"{counted(left, 'more counter')} not drawn: less gained, and no verdict names them",) if left > 0 else (),
    )


def _zeros(sources: Sequence[Source], bounds: dict[int, tuple[int, int]]) -> dict[int, int]:
    """The time of each source's clock that is zero on the common axis (as ``leak_start_s`` has it)."""
    if len(sources) > 1:
        return zeros_ns(sources)
    source = sources[0]
    start = bounds.get(source.id, (source.start_ns, 0))[0]
    if source.kind == "events":
        return {source.id: min(EVENTS_ZERO_NS, start)}
    return {source.id: 0 if source.clock == FROM_ZERO and source.kind == "samples" else start}


def _judged_window(con: duckdb.DuckDBPyConnection, source: int, zero_ns: int, options: Options) -> tuple[float, float]:
    """(end of the warm-up, end of the evidence) of the process that allocated most, seconds since zero."""
    from_ns, bin_ns = con.execute(
        """
        WITH made AS (SELECT life, sum(bytes) AS bytes FROM summed WHERE event = 0 GROUP BY life)
        SELECT from_ns, bin_ns FROM lives JOIN made USING (life) WHERE source_id = ?
        ORDER BY bytes DESC, pid DESC LIMIT 1
        """,
        [source],
    ).fetchall()[0]
    window_s = BINS * bin_ns / 1e9
    share = WARM_UP_SHARE if options.warm_up_s is None else options.warm_up_s / max(window_s, 1e-9)
    start = (from_ns - zero_ns) / 1e9
    return start + min(share, 1 - PARTS / BINS) * window_s, start + window_s


def _live_series(
    live: LiveBytes, zero_ns: int, layers: Iterable[LayerTotal], window: tuple[float, float]
) -> tuple[list[Series], list[Slope]]:
    """Live bytes by layer, and their growth over the judged ``window``."""
    times = (live.ends_ns - zero_ns) / 1e9
    growth = {total.layer: total.growth for total in layers}
    series, slopes = [], []
    for layer in LAYERS:
        of_layer = {kind: value for (of, kind), value in live.kept.items() if of == layer}
        kept = [value for kind, value in of_layer.items() if kind not in KINDS_NOT_ADDED]
        if not kept:
            kinds = sorted(of_layer)  # all there is of the layer: shown, though no total counts it
            series += [
                Series(kind, f"live {kind}, by events", LIVE, layer, True, times, of_layer[kind].astype(np.float64))
                for kind in kinds
            ]
            continue
        value = np.sum(kept, axis=0) - live.hidden.get(layer, 0.0)
        series.append(Series(layer, f"live {LAYER_NAMES[layer]}, by events", LIVE, layer, True, times, value))
        rate = growth.get(layer)
        if rate is not None and rate.ci_low > 0:
            at = _held_at(times, value, window[0])
            slopes.append(Slope(layer, LIVE, *window, window[0], at, rate.bytes_per_s, rate.ci_low, rate.ci_high))
    return series, slopes


def _held_at(t_s: FloatArray, value: FloatArray, at_s: float) -> float:
    """The last value at or before a time; 0 before the first."""
    return float(np.r_[0.0, value][np.searchsorted(t_s, at_s + 1e-6, "right")])


def _findings(
    con: duckdb.DuckDBPyConnection,
    source: int,
    zero_ns: int,
    report: Report,
    bounds: tuple[int, int],
    window: tuple[float, float],
) -> tuple[list[Series], list[Slope]]:
    """What the sites of each finding keep over time, the leading findings first, and their growth."""
    kept = remembered(con, FINDINGS, source)
    series: list[Series] = []
    slopes: list[Slope] = []
    for verdict in (report.verdict, *report.findings):
        found = kept.get(verdict.sites[0]) if verdict.sites else None
        if found is None or len(series) == MAX_FINDINGS:
            continue
        ends = np.minimum(found[0], bounds[1])
        times = (np.r_[bounds[0], ends, bounds[1]] - zero_ns) / 1e9
        times, values = thinned(times, np.r_[0.0, found[1], found[1][-1]])
        series.append(Series(verdict.sites[0], _who(verdict), FINDING, verdict.layer, True, times, values))
        if verdict.growth is not None:
            rate, at = verdict.growth, _held_at(times, values, window[0])
            limits = (rate.bytes_per_s, rate.ci_low, rate.ci_high)
            slopes.append(Slope(verdict.sites[0], FINDING, *window, window[0], at, *limits))
    return series, slopes


def _unexplained(drawn: Sequence[ReadCounter], live: LiveBytes, zero_ns: int) -> list[Series]:
    """Growth of counters since their first reading less what events keep of it."""
    ends = (live.ends_ns - zero_ns) / 1e9
    series = []
    for one in drawn:
        name, counter = one.counter.name, one.counter
        if name not in EXPLAINS or (one.shared and name != "meminfo_sunreclaim"):
            continue
        layer, kinds = EXPLAINS[name]
        kept = [
            value
            for (of, kind), value in live.kept.items()
            if of == layer and (kind in kinds if kinds is not None else kind not in KINDS_NOT_ADDED)
        ]
        if not kept or len(counter.t_s) < 2:
            continue
        events = np.sum(kept, axis=0) - (live.hidden.get(layer, 0.0) if layer == "kernel" else 0.0)
        held = np.r_[0.0, events][np.searchsorted(ends, counter.t_s, "right")]
        rest = (counter.value - counter.value[0]) - (held - held[0])
        times, values = thinned(counter.t_s, rest)
        label = f"growth of {NAMES.get(name, name)} that events do not explain"
        series.append(Series(name, label, UNEXPLAINED, layer, True, times, values, len(counter.t_s), one.shared))
    return series


def _survival(
    con: duckdb.DuckDBPyConnection,
    source: int,
    bounds: tuple[int, int],
    zero_ns: int,
    live: LiveBytes,
    options: Options,
) -> list[Survival]:
    added = {layer for layer, kind in live.kept if kind not in KINDS_NOT_ADDED}
    left_out = [(layer, kind) for layer, kind in live.kept if layer in added and kind in KINDS_NOT_ADDED]
    rows = survival(con, source, bounds, left_out, options.layer, options.pid)
    edges = (bounds[0] - zero_ns + np.linspace(0, bounds[1] - bounds[0], WINDOWS + 1)) / 1e9
    found = []
    for layer in LAYERS:
        of_layer = rows[rows["layer"] == layer]
        if not len(of_layer):
            continue
        allocated, kept = np.zeros(WINDOWS, np.int64), np.zeros(WINDOWS, np.int64)
        allocated[of_layer["window"].to_numpy()] = of_layer["allocated"].to_numpy()
        kept[of_layer["window"].to_numpy()] = np.maximum(0, of_layer["kept"].to_numpy())
        found.append(Survival(layer, edges, allocated, kept))
    return found


def _leak_starts(report: Report) -> list[Moment]:
    found = []
    for verdict in (report.verdict, *report.findings):
        if verdict.verdict == "leak" and verdict.leak_start_s is not None:
            found.append(Moment(verdict.leak_start_s, "leak", f"begins to grow: {_who(verdict)}", verdict.layer))
    return found


def _who(verdict: Verdict) -> str:
    culprit = verdict.culprit
    return (culprit and (culprit.frame or culprit.counter or culprit.object)) or verdict.kind


def _processes(con: duckdb.DuckDBPyConnection, sources: Sequence[Source], zeros: dict[int, int]) -> list[Moment]:
    """When root processes ended or began after the start of the evidence."""
    rows = con.execute(
        "SELECT source_id, pid, name, start_ns, exit_ns FROM processes WHERE role = 'root' "
        "AND list_contains(?, source_id) ORDER BY start_ns, pid LIMIT 1000",
        [list(zeros)],
    ).fetchall()
    starts = {source.id: source.start_ns for source in sources}
    found = []
    for source, pid, name, start_ns, exit_ns in rows:
        who = f"{name} (PID {pid})" if name else f"PID {pid}"
        if start_ns > starts[source]:
            found.append(Moment((start_ns - zeros[source]) / 1e9, "start", f"{who} starts"))
        if exit_ns:
            found.append(Moment((exit_ns - zeros[source]) / 1e9, "exit", f"{who} exits"))
    return found

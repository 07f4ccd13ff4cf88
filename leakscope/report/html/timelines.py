"""Memory over time as figures: live bytes by events, counters, what stays unexplained, fitted slopes, what changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from leakscope.model.timeline import FINDING, LIVE, UNEXPLAINED, Moment, Series, Slope, Survival, Timeline
from leakscope.quantities import rate, size
from leakscope.report.cells import bare_frame
from leakscope.report.html.parts import Cell, Figure, Part, Section, Table, Text, Value, plot_text
from leakscope.report.html.units import byte_axis, duration_text, time_axis

NEAR_SHARE = 0.02
"""Moments nearer to each other than this share of the time share a label."""
MAX_MULTIPLES = 8
MULTIPLE_PX = 120
_COLOURS = {"kernel": "var(--kernel)", "host": "var(--host)", "gpu": "var(--gpu)"}
_LAYERS = {"host": "Host memory", "gpu": "GPU memory", "kernel": "Kernel memory"}
_SHORT = {"warm-up": "warm-up ends", "leak": "growth begins", "restart": "restart", "start": "start", "exit": "exit"}


def timeline_sections(timelines: Sequence[Timeline]) -> list[Section]:
    """One section with the figures of all timelines, and one with what survived of what was allocated when."""
    parts: list[Part] = []
    survived: list[Part] = []
    for number, timeline in enumerate(timelines):
        if len(timelines) > 1:
            parts.append(Text([f"From {timeline.name}:"]))
        parts += _panels(number, timeline)
        parts += [Text([f"{note}."]) for note in timeline.notes]
        survived += [_survival(f"survival-{number}-{one.layer}", one) for one in timeline.survival]
    sections = [Section("over-time", "Memory over time", parts)] if parts else []
    if survived:
        about = (
            "Each bar is the memory that was allocated in one part of the time; the filled part was still there at the "
            "end. Of a cache the first bars stay; of a leak every bar leaves the same share behind."
        )
        sections.append(Section("cohorts", "What survived, by time of birth", [Text([about]), *survived]))
    return sections


def _panels(number: int, timeline: Timeline) -> list[Part]:
    apart = {one.name for one in timeline.series if one.name == "vss"}
    own = [
        one
        for one in timeline.series
        if one.in_bytes and not one.shared and one.name not in apart and one.what != FINDING
    ]
    panels: list[tuple[str, str, list[Series]]] = [
        (f"time-{number}-{layer}", name, [one for one in own if one.layer == layer]) for layer, name in _LAYERS.items()
    ]
    space = [one for one in timeline.series if one.name in apart]
    panels.append((f"time-{number}-space", "Address space", space))
    made: list[Part] = []
    found = [one for one in timeline.series if one.what == FINDING]
    if found:
        made.append(_multiples(f"time-{number}-findings", "What the findings keep", found, timeline))
    made += [_figure(id_, name, series, timeline) for id_, name, series in panels if series]
    for id_, name, of in (
        ("shared", "Counters that others are counted in too", [s for s in timeline.series if s.in_bytes and s.shared]),
        ("counts", "Counters of other things than bytes", [s for s in timeline.series if not s.in_bytes]),
    ):
        if of:
            made.append(_multiples(f"time-{number}-{id_}", name, of[:MAX_MULTIPLES], timeline))
    return made


def _figure(id_: str, title: str, series: Sequence[Series], timeline: Timeline) -> Figure:
    time_unit, second = time_axis(timeline.end_s - timeline.start_s)
    unit, one = byte_axis(max(float(np.max(np.abs(s.value))) for s in series))
    layer = series[0].layer
    slopes = _slopes_of(series, timeline)
    data: list[dict[str, Any]] = []
    for slope in slopes:
        data += _cone(slope, second, one, next(of.label for of in series if _is_of(slope, of)))
    data += [_trace(s, n, second, one, unit, time_unit) for n, s in enumerate(series)]
    lines, labels = _marks(timeline, layer, second)
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"time since zero ({time_unit})"}, "range": _range(timeline, second)},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.22, "x": 0, "xanchor": "left"},
        "margin": {"t": 36},
        "shapes": lines,
        "annotations": labels,
    }
    return Figure(id_, title, data, layout, _words(series, slopes), 400, _numbers(title, series, slopes))


def _range(timeline: Timeline, second: float) -> list[float]:
    return [timeline.start_s / second, timeline.end_s / second]


def _trace(series: Series, number: int, second: float, one: float, unit: str, time_unit: str) -> dict[str, Any]:
    line: dict[str, Any] = {"width": 2}
    if series.what == LIVE:
        line |= {"color": _COLOURS.get(series.layer, "var(--series-8)"), "width": 3, "shape": "hv"}
    elif series.what == UNEXPLAINED:
        line |= {"color": "var(--muted)", "dash": "dot"}
    else:
        line |= {"color": f"var(--series-{4 + number % 5})"}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plot_text(series.label, 60),
        "x": np.round(series.t_s / second, 6).tolist(),
        "y": np.round(series.value / one, 6).tolist(),
        "line": line,
        "hovertemplate": f"%{{y:,.2f}} {unit}",
        "xhoverformat": ",.5~r",
    }


def _cone(slope: Slope, second: float, one: float, label: str) -> list[dict[str, Any]]:
    """The interval of a slope as an area, and its line."""
    ends = (slope.start_s, slope.end_s)
    upper = [max(slope.at(t, slope.low), slope.at(t, slope.high)) / one for t in ends]
    lower = [min(slope.at(t, slope.low), slope.at(t, slope.high)) / one for t in ends]
    middle = [t for t in (slope.at_s,) if ends[0] < t < ends[1]]  # where the lines cross
    times = [ends[0], *middle, ends[1]]
    pivot = [slope.value / one for _ in middle]
    x = [t / second for t in (*times, *reversed(times))]
    y = [upper[0], *pivot, upper[1], lower[1], *pivot, lower[0]]
    name = plot_text(f"fitted: {label}", 60)
    area = {
        "type": "scatter",
        "mode": "none",
        "fill": "toself",
        "fillcolor": "var(--bad-soft)",
        "x": x,
        "y": y,
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": name,
    }
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": f"{name}: {rate(slope.rate)}",
        "x": [t / second for t in ends],
        "y": [slope.at(t) / one for t in ends],
        "line": {"color": "var(--bad)", "dash": "dash", "width": 2},
        "hoverinfo": "skip",
        "legendgroup": name,
    }
    return [area, line]


def _marks(timeline: Timeline, layer: str, second: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Vertical lines where something changed, those near to each other with one label."""
    moments = [one for one in timeline.moments if one.layer in ("", layer) or not layer]
    near = NEAR_SHARE * (timeline.end_s - timeline.start_s)
    groups: list[list[Moment]] = []
    for moment in moments:
        if groups and moment.t_s - groups[-1][0].t_s <= near:
            groups[-1].append(moment)
        else:
            groups.append([moment])
    lines, labels = [], []
    for number, group in enumerate(groups):
        at = group[0].t_s / second
        colour = "var(--bad)" if any(one.what == "leak" for one in group) else "var(--soft)"
        lines.append(
            {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"color": colour, "width": 1, "dash": "dot"}}
        )  # fmt: skip
        labels.append(
            {"x": at, "y": 1, "yshift": 13 * (number % 2), "yref": "paper", "yanchor": "bottom", "showarrow": False,
             "text": _together(group), "font": {"size": 11, "color": colour}, "xanchor": "center"}
        )  # fmt: skip
    return lines, labels


def _together(group: Sequence[Moment]) -> str:
    counts: dict[str, int] = {}
    for one in group:
        counts[one.what] = counts.get(one.what, 0) + 1
    return ", ".join(f"{_SHORT.get(what, what)}{f' ×{n}' if n > 1 else ''}" for what, n in counts.items())


def _words(series: Sequence[Series], slopes: Sequence[Slope]) -> str:
    """What the figure shows, with its numbers: what grows first."""
    grows, rest = [], []
    for one in series:
        name = bare_frame(one.label)
        last = _shown(one, float(one.value[-1]))
        slope = next((s for s in slopes if _is_of(s, one)), None)
        if slope and one.in_bytes and slope.low <= 0:
            rest.append(f"{name}: {last} at the end, no sure trend ({size(slope.low)} … {rate(slope.high)})")
        elif slope and one.in_bytes:
            said = f"{name}: {last} at the end, growing by {rate(slope.rate)} ({size(slope.low)} … {rate(slope.high)})"
            grows.append(said)
        elif one.what == UNEXPLAINED:
            why = "not all that was mapped is touched" if one.name == "rss" else "events keep more than it grew by"
            rest.append(f"{name}: {last}" + (f" (below zero: {why})" if one.value[-1] < 0 else ""))
        else:
            rest.append(f"{name}: {_shown(one, float(one.value[0]))} at first, {last} at the end")
    return ". ".join([*grows, "; ".join(rest)] if rest else grows) + "."


def _shown(series: Series, value: float) -> str:
    return size(value) if series.in_bytes else f"{value:,.6g}"


def _numbers(title: str, series: Sequence[Series], slopes: Sequence[Slope]) -> Table:
    rows: list[list[Cell]] = []
    for one in series:
        slope = next((s for s in slopes if _is_of(s, one)), None)
        values = [one.value[0], one.value[-1], one.value.min(), one.value.max()]
        shown = [Value(_shown(one, value), value) for value in map(float, values)]
        about = Value(f"{rate(slope.rate)} ({size(slope.low)} … {rate(slope.high)})", slope.rate) if slope else None
        rows.append([one.label, *shown, about, one.readings or None])
    return Table(title, ("series", "first", "last", "least", "greatest", "fitted slope", "readings"), rows)


def _multiples(id_: str, title: str, series: Sequence[Series], timeline: Timeline) -> Figure:
    """One small figure a series below each other, each with its own axis: they have nothing in common but the time."""
    time_unit, second = time_axis(timeline.end_s - timeline.start_s)
    slopes = _slopes_of(series, timeline)
    data: list[dict[str, Any]] = []
    lines, labels = _marks(timeline, "", second)
    layout: dict[str, Any] = {"showlegend": False, "shapes": lines, "margin": {"t": 36}}
    share = 1 / len(series)
    for number, one in enumerate(series):
        unit, each = byte_axis(float(np.max(np.abs(one.value)))) if one.in_bytes else ("", 1.0)
        axis = {"yaxis": "y" if number == 0 else f"y{number + 1}"}
        data += [trace | axis for slope in slopes if _is_of(slope, one) for trace in _cone(slope, second, each, "")]
        trace = _trace(one, number, second, each, unit, time_unit)
        if one.what != UNEXPLAINED:
            trace["line"]["color"] = _COLOURS.get(one.layer, "var(--series-5)")
        data.append(trace | axis)
        top = 1 - number * share
        layout["yaxis" if number == 0 else f"yaxis{number + 1}"] = {
            "domain": [max(0.0, top - share), top - share * 0.3],
            "title": {"text": unit},
            "nticks": 4,
            "rangemode": "tozero" if one.what == FINDING else "normal",
        }
        labels.append(
            {"x": 0, "xshift": -44, "xref": "paper", "xanchor": "left", "y": top - share * 0.28, "yref": "paper",
             "yanchor": "bottom", "showarrow": False, "font": {"size": 12},
             "text": plot_text(bare_frame(one.label), 60)}
        )  # fmt: skip
    layout["annotations"] = labels
    last = "y" if len(series) == 1 else f"y{len(series)}"
    layout["xaxis"] = {
        "title": {"text": f"time since zero ({time_unit})"},
        "range": _range(timeline, second),
        "anchor": last,
    }
    numbers = _numbers(title, series, slopes)
    return Figure(id_, title, data, layout, _words(series, slopes), MULTIPLE_PX * len(series) + 90, numbers)


def _is_of(slope: Slope, series: Series) -> bool:
    return (slope.series, slope.what) == (series.name, series.what)


def _slopes_of(series: Sequence[Series], timeline: Timeline) -> list[Slope]:
    return [slope for slope in timeline.slopes if any(_is_of(slope, one) for one in series)]


def _survival(id_: str, one: Survival) -> Figure:
    time_unit, second = time_axis(float(one.edges_s[-1] - one.edges_s[0]))
    unit, each = byte_axis(float(one.allocated_bytes.max()))
    middle = (one.edges_s[:-1] + one.edges_s[1:]) / 2 / second
    share = one.kept_bytes / np.maximum(one.allocated_bytes, 1)
    colour = one.layer if one.layer in _COLOURS else "host"
    x, width = np.round(middle, 6).tolist(), float((one.edges_s[1] - one.edges_s[0]) / second) * 0.9
    windows = [f"{duration_text(a)} … {duration_text(b)}" for a, b in pairwise(one.edges_s.tolist())]
    bars = list(zip(windows, one.allocated_bytes.tolist(), one.kept_bytes.tolist(), share.tolist(), strict=True))
    hover = [f"born {born}: {size(made)} allocated, {size(kept)} kept ({part:.0%})" for born, made, kept, part in bars]
    bar: dict[str, Any] = {
        "type": "bar",
        "x": x,
        "width": width,
        "text": hover,
        "hoverinfo": "text",
        "textposition": "none",
    }
    data = [
        bar | {"name": "freed", "y": ((one.allocated_bytes - one.kept_bytes) / each).tolist(),
               "marker": {"color": f"var(--{colour}-soft)"}},
        bar | {"name": "kept", "y": (one.kept_bytes / each).tolist(), "marker": {"color": f"var(--{colour})"}},
    ]  # fmt: skip
    data.reverse()
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": f"allocated at ({time_unit})"}},
        "yaxis": {"title": {"text": unit}},
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        "margin": {"t": 8},
    }
    late = _late(one)
    rows: list[list[Cell]] = [
        [born, Value(size(made), made), Value(size(kept), kept), Value(f"{part:.0%}", part)]
        for born, made, kept, part in bars
    ]
    name = _LAYERS.get(one.layer, one.layer)
    table = Table(f"{name} by time of birth", ("born", "allocated", "kept", "share"), rows)
    return Figure(id_, name, data, layout, late, 280, table)


def _late(one: Survival) -> str:
    """How much survived of the first fifth, which is warm-up, and of the rest."""
    first = max(1, len(one.kept_bytes) // 5)
    parts = [(slice(0, first), "the first fifth of the time"), (slice(first, None), "the rest")]
    said = []
    for part, name in parts:
        made, kept = int(one.allocated_bytes[part].sum()), int(one.kept_bytes[part].sum())
        said.append(f"{size(kept)} of {size(made)} allocated in {name} were kept ({kept / max(made, 1):.0%})")
    return "; ".join(said) + "."


def moments_table(timelines: Iterable[Timeline]) -> Table | None:
    """When what changed."""
    rows: list[list[Cell]] = [
        [Value(duration_text(one.t_s), round(one.t_s, 6)), _SHORT.get(one.what, one.what), one.layer or None, one.label]
        for timeline in timelines
        for one in timeline.moments
    ]
    if not rows:
        return None
    return Table("What changed when", ("time", "what", "layer", "detail"), rows)

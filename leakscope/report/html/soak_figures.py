"""Figures of the page of ``leakscope soak``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from leakscope.model.forecast import Forecast
from leakscope.model.results import Growth
from leakscope.model.soak import Look, SoakSummary
from leakscope.model.soak_course import SoakCourse
from leakscope.model.timeline import COUNTER, Timeline
from leakscope.quantities import counted, rate, size
from leakscope.report.forecast import duration, forecast_line
from leakscope.report.html.page import Cell, Figure, Part, Table, Value, plot_text
from leakscope.report.html.units import byte_axis, bytes_cell, time_axis
from leakscope.report.soak import clock, look_line

_COLOURS = {"leak": "var(--unsure)", "inconclusive": "var(--muted)", "not_leak": "var(--good)"}
_LABEL = 50
LEAST_DRAWN = 0.1
"""Standard deviations of evidence below which a look is drawn here: the axis is logarithmic."""
LONGEST_SHARE = 3.0
"""A forecast is drawn at most so many times as far as the time that was watched."""


def looks_figure(summary: SoakSummary) -> Figure:
    """The evidence at each look against what it needed, and below the rate that it estimated."""
    looks = summary.looks
    unit, second = time_axis(looks[-1].elapsed_s)
    at = [look.elapsed_s / second for look in looks]
    alarms = [look for look in looks if look.alarm]
    said = [
        f"look {number} at {clock(look.elapsed_s)}: {plot_text(look_line(look))}"
        for number, look in enumerate(looks, 1)
    ]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines+markers", "name": "evidence at the look", "x": at,
            "y": [max(LEAST_DRAWN, round(look.score, 3)) for look in looks], "line": {"color": "var(--series-1)"},
            "marker": {
                "size": 9,
                "color": ["var(--bad)" if look.alarm else _COLOURS[look.verdict.verdict] for look in looks],
                "symbol": ["diamond" if look.alarm else "circle" for look in looks],
            },
            "text": said, "customdata": [f"{look.score:.2f}" for look in looks],
            "hovertemplate": "%{text}<br>%{customdata} σ<extra></extra>",
        },
        {
            "type": "scatter", "mode": "lines", "name": "needed for an alarm", "x": at,
            "y": [None if look.needed == float("inf") else round(look.needed, 3) for look in looks],
            "line": {"color": "var(--bad)", "dash": "dash", "shape": "hv"},
            "customdata": [f"{look.alpha:.2g}" for look in looks],
            "hovertemplate": "%{y:.2f}: chance %{customdata} of a false alarm<extra></extra>",
        },
    ]  # fmt: skip
    grown = [(look, look.verdict.growth) for look in looks if look.verdict.growth is not None]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"time since the start ({unit})"}, "anchor": "y2" if grown else "y"},
        "yaxis": {
            "title": {"text": "evidence (σ)"},
            "domain": [0.46, 1] if grown else [0, 1],
            "type": "log",
            "dtick": 1,
        },
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"t": 8},
    }
    if grown:
        data += _rates([(look, growth) for look, growth in grown if growth is not None], second, layout)
    first = summary.first_alarm
    spent = sum(look.alpha for look in looks)
    words = [
        f"{counted(len(looks), 'look')}, {len(alarms):,} alarmed"
        + (f", the first after {duration(first.elapsed_s)}" if first is not None else ""),
        f"the looks spent {spent:.2%} of the {summary.total_alpha:.0%} chance of a false alarm",
        f"the last one: {look_line(looks[-1])}",
    ]
    description = f"{'; '.join(words)}. Diamonds are alarms; evidence counts in standard deviations."
    return Figure("looks-figure", "What each look said", data, layout, description, 480 if grown else 320)


def _rates(grown: Sequence[tuple[Look, Growth]], second: float, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """The rate that each look estimated, with its interval; one colour a counter."""
    unit, one = byte_axis(3600 * max(abs(growth.bytes_per_s) for _, growth in grown))
    layout["yaxis2"] = {"title": {"text": f"{unit}/h"}, "domain": [0, 0.36], "zeroline": True, "anchor": "x"}
    per = 3600 / one
    traces = []
    for number, counter in enumerate(dict.fromkeys(growth.counter for _, growth in grown)):
        of = [(look, growth) for look, growth in grown if growth.counter == counter]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": f"rate of {plot_text(counter, _LABEL)}", "yaxis": "y2",
                "x": [look.elapsed_s / second for look, _ in of],
                "y": [growth.bytes_per_s * per for _, growth in of],
                "error_y": {
                    "type": "data", "symmetric": False, "thickness": 1.5, "width": 3,
                    "array": [max(0.0, growth.ci_high - growth.bytes_per_s) * per for _, growth in of],
                    "arrayminus": [max(0.0, growth.bytes_per_s - growth.ci_low) * per for _, growth in of],
                },
                "marker": {"color": f"var(--series-{2 + number % 6})", "size": 7},
                "text": [f"{rate(g.bytes_per_s)} ({rate(g.ci_low)} … {rate(g.ci_high)})" for _, g in of],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )  # fmt: skip
    return traces


def forecast_figure(forecast: Forecast, timelines: Sequence[Timeline], made_s: float) -> Figure:
    """The counter, and the cone in which it reaches its limit. ``made_s``: when the forecast was made."""
    series = next(
        (one for of in timelines for one in of.series if one.what == COUNTER and one.name == forecast.counter), None
    )
    now = made_s
    begin = float(series.t_s[0]) if series is not None else 0.0
    left = max(0.0, forecast.limit_bytes - forecast.level_bytes)
    far = max(now - begin, 1.0) * LONGEST_SHARE
    ahead = min(max(1.2 * forecast.expected_s, 0.2 * (now - begin)), far)
    time_unit, second = time_axis(now + ahead)
    unit, one = byte_axis(max(forecast.limit_bytes, forecast.level_bytes))

    def line(seconds: float | None) -> tuple[list[float], list[float]]:
        """From now up to the limit, or as far as it is drawn."""
        slope = left / seconds if seconds else (0.0 if seconds is None else float("inf"))
        end = ahead if seconds is None else min(ahead, seconds)
        top = forecast.level_bytes + (left if seconds is not None and seconds <= ahead else slope * ahead)
        times, values = [now, now + end], [forecast.level_bytes, top]
        if end < ahead:  # at the limit it stays
            times, values = [*times, now + ahead], [*values, forecast.limit_bytes]
        return times, values

    early, late, middle = line(forecast.earliest_s), line(forecast.latest_s), line(forecast.expected_s)
    data: list[dict[str, Any]] = []
    if series is not None:
        data.append(_trace(plot_text(series.label, _LABEL), series.t_s, series.value, second, one, "var(--series-1)"))
    data.append(
        {
            "type": "scatter", "mode": "none", "fill": "toself", "fillcolor": "var(--bad-soft)", "hoverinfo": "skip",
            "name": "95 % interval of the rate",
            "x": [t / second for t in [*early[0], *reversed(late[0])]],
            "y": [v / one for v in [*early[1], *reversed(late[1])]],
        }
    )  # fmt: skip
    data.append(
        _trace("if growth goes on", *middle, second, one, "var(--bad)")
        | {"line": {"color": "var(--bad)", "dash": "dash"}}
    )
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"time since the start ({time_unit})"},
                  "range": [begin / second, (now + ahead) / second]},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"t": 8},
        "shapes": [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": forecast.limit_bytes / one,
             "y1": forecast.limit_bytes / one, "line": {"color": "var(--ink)", "width": 2}},
            {"type": "line", "yref": "paper", "x0": now / second, "x1": now / second, "y0": 0, "y1": 1,
             "line": {"color": "var(--soft)", "width": 1, "dash": "dot"}},
        ],
        "annotations": [
            {"xref": "paper", "x": 0.01, "xanchor": "left", "y": forecast.limit_bytes / one, "yanchor": "bottom",
             "showarrow": False, "text": f"limit {size(forecast.limit_bytes)}"},
        ],
    }  # fmt: skip
    beyond = " The limit lies beyond what is drawn." if forecast.expected_s > ahead else ""
    rows: list[list[Cell]] = [
        ["level now", bytes_cell(round(forecast.level_bytes))],
        ["limit", bytes_cell(round(forecast.limit_bytes))],
        ["reached in", Value(duration(forecast.expected_s), round(forecast.expected_s, 1))],
        ["at the earliest", Value(duration(forecast.earliest_s), round(forecast.earliest_s, 1))],
        ["at the latest", "never" if forecast.latest_s is None else
         Value(duration(forecast.latest_s), round(forecast.latest_s, 1))],
    ]  # fmt: skip
    table = Table(f"Forecast of {forecast.counter}", ["", "value"], rows)
    return Figure(
        "forecast-figure", "Time to the limit", data, layout, f"{forecast_line(forecast)}.{beyond}", 340, table
    )


def _trace(
    name: str,
    t_s: Sequence[float] | np.ndarray,
    value: Sequence[float] | np.ndarray,
    second: float,
    one: float,
    colour: str,
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": np.round(np.asarray(t_s) / second, 6).tolist(),
        "y": np.round(np.asarray(value) / one, 6).tolist(),
        "line": {"color": colour, "width": 2},
        "hovertemplate": "%{y:,.2f}<extra></extra>",
    }


def processes_figure(course: SoakCourse, summary: SoakSummary) -> list[Part]:
    """From when to when each process was watched, and when nobody was."""
    processes = course.processes
    if not processes:
        return []
    end_s = max([summary.elapsed_s, *(one.end_s or 0.0 for one in processes)])
    unit, second = time_axis(end_s)
    names = [plot_text(f"{one.name or 'process'} ({one.pid})", _LABEL) for one in processes]
    begun = [max(0.0, one.start_s) for one in processes]
    ended = [end_s if one.end_s is None else one.end_s for one in processes]
    data = [
        {
            "type": "bar", "orientation": "h", "y": list(range(len(processes))), "base": [b / second for b in begun],
            "x": [max(0.0, e - b) / second for b, e in zip(begun, ended, strict=True)],
            "marker": {"color": ["var(--series-1)" if one.root else "var(--muted)" for one in processes]},
            "text": [f"{name}: {clock(b)} … {'the end' if one.end_s is None else clock(e)}"
                     for name, one, b, e in zip(names, processes, begun, ended, strict=True)],
            "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
        }
    ]  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"time since the start ({unit})"}, "range": [0, end_s / second]},
        "yaxis": {"autorange": "reversed", "tickmode": "array", "tickvals": list(range(len(names))), "ticktext": names},
        "shapes": [
            {"type": "rect", "x0": gap.from_s / second, "x1": gap.to_s / second, "y0": 0, "y1": 1, "yref": "paper",
             "fillcolor": "var(--unsure-soft)", "line": {"width": 0}}
            for gap in course.gaps
        ],
    }  # fmt: skip
    alive = sum(one.end_s is None for one in processes)
    left = course.processes_total - len(processes)
    words = f"{course.processes_total:,} process{'' if course.processes_total == 1 else 'es'}"
    roots = sum(one.root for one in processes)
    restarts = counted(summary.generations - 1, "time")
    description = f"{words}, {roots:,} of them targets, {alive:,} alive at the end; restarted {restarts}"
    description += f"; {counted(len(course.gaps), 'gap')} in which nobody recorded" if course.gaps else ""
    rows: list[list[Cell]] = [
        [
            one.pid, one.name, "target" if one.root else "child", Value(clock(b), round(b, 3)),
            "alive" if one.end_s is None else Value(clock(one.end_s), round(one.end_s, 3)),
        ]
        for one, b in zip(processes, begun, strict=True)
    ]  # fmt: skip
    note = f"{left:,} more, which lived shorter, are not listed." if left > 0 else ""
    table = Table("Processes", ["PID", "name", "is", "from", "to"], rows, note)
    height = 90 + 22 * len(processes)
    return [Figure("lives", "Who was watched when", data, layout, f"{description}.", height, table)]

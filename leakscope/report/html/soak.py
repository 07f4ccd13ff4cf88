"""The page of ``leakscope soak``: what each look said, counters with restarts and gaps, the forecast, the verdict."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from leakscope.model.results import Report
from leakscope.model.soak import SoakSummary
from leakscope.model.soak_course import Gap, SoakCourse
from leakscope.model.timeline import Moment, Timeline
from leakscope.quantities import counted
from leakscope.report.forecast import duration, forecast_line
from leakscope.report.html.attribution import SCRIPTS
from leakscope.report.html.attribution import sections as report_sections
from leakscope.report.html.cells import command
from leakscope.report.html.page import Cell, Figure, Finding, Headline, Part, Section, Table, Text, Value, page
from leakscope.report.html.soak_figures import forecast_figure, looks_figure, processes_figure
from leakscope.report.html.units import bytes_cell, duration_text, interval_text, rate_cell, time_axis
from leakscope.report.html.words import facts_of, next_steps, verdict_sentence
from leakscope.report.soak import clock, ended_because

_FURTHER = 4
_MAX_LOOKS = 400
_MAX_HAPPENINGS = 400
_TOLD = {
    "alarm": "alarm",
    "withdrawn": "alarm withdrawn",
    "gap": "nothing recorded",
    "culprit": "culprit",
    "target": "restart",
}


def soak_page(summary: SoakSummary, report: Report, course: SoakCourse, output: str) -> str:
    """The whole page. ``output``: the capture, as later commands take it."""
    told = replace(report, timelines=[_with_happenings(timeline, summary) for timeline in report.timelines])
    of_report = report_sections(told)
    over_time = [_with_gaps(one, told.timelines, course.gaps) for one in of_report if one.id == "over-time"]
    forecast = summary.forecast or report.verdict.forecast
    made_s = summary.looks[-1].elapsed_s if summary.forecast and summary.looks else summary.elapsed_s
    found = [
        Section("looks", "Interim verdicts", _looks(summary)),
        *over_time,
        Section(
            "forecast",
            "Forecast",
            [forecast_figure(forecast, report.timelines, made_s)] if forecast else [],
        ),
        Section("processes", "Lives of the processes", processes_figure(course, summary)),
        Section("happenings", "What happened when", _happenings(summary)),
        *(one for one in of_report if one.id != "over-time"),
    ]
    sections = [section for section in found if section.parts]
    return page(f"leakscope soak: {summary.target}", _headline(summary, report, output), sections, SCRIPTS)


def _headline(summary: SoakSummary, report: Report, output: str) -> Headline:
    verdict = report.verdict
    first = summary.first_alarm
    facts = [
        ("Watched", f"{duration(summary.elapsed_s)} of {summary.target} ({ended_because(summary.ended_by)})"),
        ("First alarm", f"after {duration(first.elapsed_s)}" if first is not None else "none"),
        ("Looks", f"{len(summary.looks):,}, {summary.total_alpha:.0%} of false alarms at most in all"),
        ("Restarts", f"{summary.generations - 1:,}"),
        *facts_of(verdict),
    ]
    forecast = summary.forecast
    if forecast is not None and verdict.forecast is None:
        facts.append(("Forecast", forecast_line(forecast)))
    further = [Finding(one.verdict, f"{verdict_sentence(one)}.") for one in report.findings[:_FURTHER]]
    steps = [step for step in next_steps(report) if not step.startswith("See who holds it")]
    if not any("leakscope attribute" in step for step in steps):
        steps.append(f"See chains and sites on a terminal: {command('leakscope', 'attribute', output)}")
    return Headline(verdict.verdict, f"{verdict_sentence(verdict)}.", facts, steps, further)


def _looks(summary: SoakSummary) -> list[Part]:
    if not summary.looks:
        return [Text(["No look was due: looks begin after ten minutes and 40 readings."])]
    rows: list[list[Cell]] = []
    for number, look in enumerate(summary.looks[:_MAX_LOOKS], 1):
        growth = look.verdict.growth
        rows.append(
            [
                number, _time(look.elapsed_s), "ALARM" if look.alarm else look.verdict.verdict, look.verdict.kind,
                round(look.score, 3), None if look.needed == float("inf") else round(look.needed, 3),
                round(look.alpha, 6), growth.counter if growth else None, rate_cell(growth),
                interval_text(growth) if growth else None,
                bytes_cell(None if look.forecast is None else round(look.forecast.level_bytes)),
                None if look.forecast is None else Value(duration(look.forecast.expected_s),
                                                         round(look.forecast.expected_s, 1)),
            ]
        )  # fmt: skip
    columns = ["look", "at", "said", "class", "evidence", "needed", "alpha", "counter", "rate", "95 % interval",
               "level", "limit reached in"]  # fmt: skip
    left = len(summary.looks) - _MAX_LOOKS
    note = f"{left:,} more looks stand in the output of --json." if left > 0 else ""
    return [replace(looks_figure(summary), table=Table("Every look", columns, rows, note))]


def _time(seconds: float) -> Value:
    return Value(clock(seconds), round(seconds, 1))


def _happenings(summary: SoakSummary) -> list[Part]:
    rows: list[list[Cell]] = [
        [_time(one.elapsed_s), _TOLD.get(one.what, one.what), one.text] for one in summary.happenings[:_MAX_HAPPENINGS]
    ]
    left = len(summary.happenings) - _MAX_HAPPENINGS
    note = f"{left:,} more stand in the output of --json." if left > 0 else ""
    return [Table("Happenings", ["at", "what", ""], rows, note)] if rows else []


def _with_happenings(timeline: Timeline, summary: SoakSummary) -> Timeline:
    """The timeline with what the soak told: alarms, gaps, restarts that are not in it."""
    known = {round(one.t_s, 1) for one in timeline.moments}
    told = [
        Moment(one.elapsed_s, _TOLD.get(one.what, one.what), one.text)
        for one in summary.happenings
        if one.what in ("alarm", "withdrawn", "gap") or (one.what == "target" and round(one.elapsed_s, 1) not in known)
    ]
    return replace(timeline, moments=tuple(sorted([*timeline.moments, *told], key=lambda one: one.t_s)))


def _with_gaps(section: Section, timelines: Sequence[Timeline], gaps: Sequence[Gap]) -> Section:
    """The figures with the stretches shaded in which nobody recorded, and no line across them."""
    if not gaps or not timelines:
        return section
    _, second = time_axis(timelines[0].end_s - timelines[0].start_s)
    return replace(section, parts=[_gapped(p, gaps, second) if isinstance(p, Figure) else p for p in section.parts])


def _gapped(figure: Figure, gaps: Sequence[Gap], second: float) -> Figure:
    shade = [
        {"type": "rect", "x0": gap.from_s / second, "x1": gap.to_s / second, "y0": 0, "y1": 1, "yref": "paper",
         "fillcolor": "var(--muted-soft)", "line": {"width": 0}, "layer": "below"}
        for gap in gaps
    ]  # fmt: skip
    data = [_broken(trace, gaps, second) for trace in figure.data]
    layout = {**figure.layout, "shapes": [*figure.layout.get("shapes", []), *shade]}
    hours = sum(gap.to_s - gap.from_s for gap in gaps)
    said = f"{figure.description} Shaded: {counted(len(gaps), 'gap')} of {duration_text(hours)} in all, not recorded."
    return replace(figure, data=data, layout=layout, description=said)


def _broken(trace: dict[str, Any], gaps: Sequence[Gap], second: float) -> dict[str, Any]:
    """A line with a hole at each gap."""
    if trace.get("mode") != "lines" or len(trace.get("x", ())) < 3:
        return trace
    x, y = list(trace["x"]), list(trace["y"])
    for gap in sorted(gaps, key=lambda one: -one.from_s):
        place = bisect.bisect_right(x, (gap.from_s + gap.to_s) / 2 / second)
        if 0 < place < len(x):
            x.insert(place, (gap.from_s + gap.to_s) / 2 / second)
            y.insert(place, None)
    return {**trace, "x": x, "y": y, "connectgaps": False}

"""Figures of the page of ``leakscope check``."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import numpy as np
import numpy.typing as npt

from leakscope.model.gate import Difference, Gate, SiteChange
from leakscope.model.results import KeptCourse, Report
from leakscope.quantities import counted, size
from leakscope.report.html.page import Cell, Figure, Part, Table, Value, cut, plot_text
from leakscope.report.html.units import byte_axis, bytes_cell, time_axis

FloatArray = npt.NDArray[np.float64]

_MAX_LINES = 8
_MAX_CHANGES = 15
_MAX_BUDGETS = 30
_COLOURS = {"fail": "var(--bad)", "inconclusive": "var(--unsure)", "pass": "var(--good)"}
_LABEL = 50


def budget_figure(gate: Gate) -> list[Part]:
    """How far each figure of a budget is from what is allowed, in percent of that."""
    rows = [
        (check, one) for check in gate.checks for one in check.measures if one.allowed is not None and one.allowed > 0
    ][:_MAX_BUDGETS]
    if not rows:
        return []
    share = [100 * one.value / (one.allowed or 1) for _, one in rows]
    data: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "y": [f"{plot_text(check.name.removeprefix('budget: '), _LABEL)}: {one.name}" for check, one in rows],
        "x": share,
        "marker": {"color": [_COLOURS[one.outcome] for _, one in rows]},
        "text": [f"{value:,.1f} %" for value in share],
        "textposition": "auto",
        "insidetextanchor": "start",
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [100 * max(0.0, one.high - one.value) / (one.allowed or 1) for _, one in rows],
            "arrayminus": [100 * max(0.0, one.value - one.low) / (one.allowed or 1) for _, one in rows],
            "visible": any(not one.exact for _, one in rows),
        },
        "hovertemplate": "%{y}: %{x:.1f} %<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "% of what is allowed"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed"},
        "shapes": [{"type": "line", "x0": 100, "x1": 100, "y0": 0, "y1": 1, "yref": "paper",
                    "line": {"color": "var(--bad)", "width": 2, "dash": "dash"}}],
    }  # fmt: skip
    said = [
        f"{check.name} uses {value:,.1f} % of its {one.name}" for (check, one), value in zip(rows, share, strict=True)
    ]
    over = sum(one.outcome != "pass" for _, one in rows)
    kept = f"{over:,} of {counted(len(rows), 'limit')} not kept" if over else f"{counted(len(rows), 'limit')}, all kept"
    description = f"{kept}. {'; '.join(said[:4])}."
    return [Figure("budgets", "Budgets", [data], layout, description, 90 + 32 * len(rows))]


def course_figure(report: Report, gate: Gate) -> list[Part]:
    """What the sites of each failing check keep over the run."""
    sites = {site.id: site for site in report.sites if site.course is not None}
    found = [(check, [sites[one] for one in check.sites if one in sites]) for check in gate.of("fail")]
    drawn = [(check, of_check) for check, of_check in found if of_check]
    if not drawn:
        return []
    left, drawn = drawn[_MAX_LINES:], drawn[:_MAX_LINES]
    courses = [_together([site.course for site in of_check if site.course]) for _, of_check in drawn]
    unit, one = byte_axis(max(float(kept.max()) for _, kept in courses))
    time_unit, second = time_axis(max(float(at[-1]) for at, _ in courses))
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": plot_text(check.name, _LABEL),
            "x": np.round(at / second, 6).tolist(),
            "y": np.round(kept / one, 6).tolist(),
            "line": {"width": 2, "color": f"var(--series-{number % 8 + 1})", "shape": "hv"},
            "hovertemplate": f"%{{y:,.3f}} {unit}",
        }
        for number, ((check, _), (at, kept)) in enumerate(zip(drawn, courses, strict=True))
    ]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"time since the start of the run ({time_unit})"}},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"t": 8},
        "showlegend": True,
    }
    said, rows = [], []
    for (check, of_check), (_, kept) in zip(drawn, courses, strict=True):
        quarters = [float(kept[(len(kept) - 1) * part // 4]) for part in (1, 2, 3, 4)]
        objects = sum(site.live_objects for site in of_check)
        size_bytes = sum(site.live_bytes for site in of_check)
        said.append(
            f"{check.name}: {size(quarters[1])} after half of the run, {size(size_bytes)} in "
            f"{counted(objects, 'object')} at the end"
        )
        parts: list[Cell] = [bytes_cell(round(value)) for value in quarters]
        rows.append([check.name, *parts, bytes_cell(size_bytes), objects, len(of_check)])
    columns = ["check", "after ¼ of the run", "½", "¾", "at the end", "kept", "objects", "sites"]
    note = f"{len(left):,} more failing checks are not drawn." if left else ""
    table = Table("Kept by the sites of failing checks", columns, rows, note)
    return [Figure("courses", "Kept by the sites that fail", data, layout, f"{'; '.join(said)}.", 320, table)]


def _together(courses: Sequence[KeptCourse]) -> tuple[FloatArray, FloatArray]:
    """(times in s, kept bytes) of sites together, from the start of the first to the end of the last."""
    first = min(course.start_s for course in courses)
    last = max(course.start_s + course.step_s * len(course.kept_bytes) for course in courses)
    at = np.linspace(first, last, max(len(course.kept_bytes) for course in courses) + 1)
    total = np.zeros(len(at))
    for course in courses:
        # The step that ended last before each time; a rounding error is no earlier step.
        ended = np.floor((at - course.start_s) / course.step_s + 1e-6).astype(np.int64)
        total += np.r_[0.0, course.kept_bytes][np.clip(ended, 0, len(course.kept_bytes))]
    return at, total


def work_figure(difference: Difference) -> list[Part]:
    """What each unit of work leaves behind, in the baseline and in head, at the sites that changed."""
    changes = [c for c in difference.changes if c.kept_bytes or c.expected_bytes][:_MAX_CHANGES]
    if not changes or not difference.head_work:
        return []
    work = difference.head_work
    one_of = difference.unit if difference.unit == "seconds" else f"unit of {difference.unit}"
    names = [
        "<br>".join(plot_text(line) for line in wrap(f"{cut(_site(change), 90)} ({change.what})", 34)[:3])
        for change in changes
    ]
    pairs = [(change.expected_bytes / work, change.kept_bytes / work) for change in changes]
    unit, one = byte_axis(max(max(pair) for pair in pairs))
    bars = (("baseline", 0, "var(--muted)"), ("head", 1, "var(--series-1)"))
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": list(range(len(pairs))),
            "x": [pair[place] / one for pair in pairs],
            "text": [_bytes(pair[place]) for pair in pairs],
            "textposition": "auto",
            "marker": {"color": colour},
            "hovertemplate": f"{name}: %{{text}}<extra></extra>",
        }
        for name, place, colour in bars
    ]
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": f"{unit} for each {plot_text(one_of, 40)}"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "tickmode": "array", "tickvals": list(range(len(pairs))), "ticktext": names},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"t": 8},
    }
    said = [
        f"{_site(change)}: {_bytes(before)} before, {_bytes(after)} now"
        for change, (before, after) in zip(changes[:3], pairs, strict=False)
    ]
    description = f"Kept for each {one_of}. {'; '.join(said)}."
    rows: list[list[Cell]] = [
        [_site(change), change.what, *(Value(_bytes(value), value) for value in (before, after, after - before))]
        for change, (before, after) in zip(changes, pairs, strict=True)
    ]
    table = Table(f"Kept for each {one_of}", ["site", "change", "baseline", "head", "more"], rows)
    height = 110 + 58 * len(changes)
    return [Figure("work", "Growth for each unit of work", data, layout, description, height, table)]


def _site(change: SiteChange) -> str:
    return f"{change.layer}: {' → '.join(change.frames[-3:]) or change.kind}"


def _bytes(value: float) -> str:
    """Parts of a byte too: a unit of work may leave less than one behind."""
    return size(value) if abs(value) >= 100 or not value else f"{value:.3g} B"

"""Figures of the page of ``leakscope check``."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from leakscope.model.gate import Difference, Gate, SiteChange
from leakscope.model.results import Report, Site
from leakscope.quantities import counted, size
from leakscope.report.html.page import Cell, Figure, Part, Table, Value, cut, plot_text
from leakscope.report.html.units import byte_axis, bytes_cell, time_axis
from leakscope.report.html.words import short_frame

_MAX_SITES = 8
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
    description = f"{counted(over, 'limit')} of {len(rows):,} not kept. {'; '.join(said[:4])}."
    return [Figure("budgets", "Budgets", [data], layout, description, 90 + 32 * len(rows))]


def course_figure(report: Report, gate: Gate) -> list[Part]:
    """What the sites of failing checks keep over the run, and what the baseline would keep for the same work."""
    ids = list(dict.fromkeys(site for check in gate.of("fail") for site in check.sites))
    sites = {site.id: site for site in report.sites if site.course is not None}
    drawn = [sites[one] for one in ids if one in sites][:_MAX_SITES]
    if not drawn:
        return []
    unit, one = byte_axis(max(max(site.course.kept_bytes) for site in drawn if site.course))
    ends = [site.course.start_s + site.course.step_s * len(site.course.kept_bytes) for site in drawn if site.course]
    time_unit, second = time_axis(max(ends))
    data = [_course(site, number, unit, one, second) for number, site in enumerate(drawn)]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"time since the start of the run ({time_unit})"}},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"t": 8},
    }
    said, rows = [], []
    for site in drawn:
        growth = site.growth
        per_s = f", {size(growth.bytes_per_s)}/s ({size(growth.ci_low)} … {size(growth.ci_high)}/s)" if growth else ""
        said.append(f"{_name(site)} keeps {size(site.live_bytes)} in {counted(site.live_objects, 'object')}{per_s}")
        kept = site.course.kept_bytes if site.course else ()
        parts: list[Cell] = (
            [bytes_cell(round(kept[len(kept) * part // 4 - 1])) for part in (1, 2, 3, 4)] if kept else []
        )
        rows.append([_name(site), site.layer, site.kind, *parts, bytes_cell(site.live_bytes), site.live_objects])
    columns = [
        "site",
        "layer",
        "kind",
        "after a quarter",
        "after a half",
        "after three",
        "at the end",
        "kept",
        "objects",
    ]
    left = len([one for one in ids if one in sites]) - len(drawn)
    note = f"{left:,} more sites of failing checks are not drawn." if left > 0 else ""
    table = Table("Kept by the sites of failing checks", columns, rows, note)
    return [Figure("courses", "Kept by the sites that fail", data, layout, f"{'; '.join(said)}.", 340, table)]


def _course(site: Site, number: int, unit: str, one: float, second: float) -> dict[str, Any]:
    assert site.course is not None
    course = site.course
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plot_text(_name(site), _LABEL),
        "x": [round((course.start_s + course.step_s * i) / second, 6) for i in range(len(course.kept_bytes) + 1)],
        "y": [0, *(round(value / one, 6) for value in course.kept_bytes)],
        "line": {"width": 2, "color": f"var(--series-{number % 8 + 1})", "shape": "hv"},
        "hovertemplate": f"%{{y:,.3f}} {unit}",
    }


def _name(site: Site) -> str:
    what = site.slab_cache or site.kind
    return f"{short_frame(site.culprit_frame)}: {what}" if site.culprit_frame else what


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

"""Figures of the page of ``leakscope liveness``."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from leakscope.model.liveness import CLASSES, SourceLiveness, Step, Why
from leakscope.model.liveness_overview import HeldClass, IdleTime, Tree, TreeNode
from leakscope.quantities import counted, size
from leakscope.report.cells import bare_frame
from leakscope.report.html.cells import time_cell
from leakscope.report.html.page import Cell, Figure, Table, cut, plot_text
from leakscope.report.html.units import byte_axis, bytes_cell, duration_text, time_axis
from leakscope.report.text import printable

COLOURS = {
    "strong": "var(--series-1)",
    "weak": "var(--series-5)",
    "normal": "var(--good)",
    "held-stale": "var(--bad)",
    "immortal": "var(--unsure)",
    "zombie": "var(--series-6)",
    "idle-cached": "var(--series-8)",
    "unknown-ref": "var(--series-4)",
    "": "var(--muted)",
}
MEANINGS = {
    "strong": "two references or more, in use",
    "weak": "one reference, its TTL nearly over",
    "normal": "held, in use",
    "held-stale": "held by somebody who does not use it any more",
    "immortal": "nobody holds it, no TTL",
    "zombie": "its end has passed and it is still there",
    "idle-cached": "nobody holds it, evictable",
    "unknown-ref": "nothing tells whether it is held",
}
_LABEL = 72
_LINE = 26
_MARGIN = {"l": 8, "r": 8, "t": 8, "b": 8}


def tree_figure(tree: Tree) -> Figure:
    """The leading part of the dominator tree as a treemap: the area is what a node retains."""
    by_bytes = tree.by == "bytes"
    value = [node.retained_bytes if by_bytes else node.retained_objects for node in tree.nodes]
    parents = {node.parent for node in tree.nodes}
    labels = [_label(node, node.id in parents) for node in tree.nodes]
    data = {
        "type": "treemap",
        "ids": [str(node.id) for node in tree.nodes],
        "parents": ["" if node.parent < 0 else str(node.parent) for node in tree.nodes],
        "labels": labels,
        "values": value,
        "branchvalues": "total",
        "maxdepth": 4,
        "marker": {"colors": [COLOURS[node.cls] for node in tree.nodes], "pad": {"t": 22, "l": 3, "r": 3, "b": 3}},
        "text": [_facts(node) for node in tree.nodes],
        "textinfo": "label+text",
        "hovertemplate": "%{label}<br>%{text}<extra></extra>",
        "tiling": {"pad": 1},
        "pathbar": {"thickness": 22},
        "root": {"color": "rgba(0,0,0,0)"},
    }
    rest = sum(node.others for node in tree.nodes)
    leading = max(tree.nodes[1:], key=_weight(by_bytes), default=None)
    description = f"{tree.drawn - 1:,} of {tree.total - 1:,} nodes are drawn, those that retain most"
    description += f"; the other {rest:,} stand in one grey node for each parent." if rest else "."
    if leading is not None:
        description += f" The largest is {leading.kind} {leading.name}: {_facts(leading)}."
    description += " Area: what would go if a node alone let go. What several hold stands beside them. Click to zoom."
    rows: list[list[Cell]] = [
        [
            f"{node.others:,} others" if node.others else node.name, node.kind, node.cls, node.objects,
            bytes_cell(node.bytes), node.retained_objects, bytes_cell(node.retained_bytes),
        ]
        for node in tree.nodes[1:]
    ]  # fmt: skip
    layout = {"margin": {**_MARGIN, "t": 30}, "uniformtext": {"minsize": 10, "mode": "hide"}}
    table = Table("Nodes", ["name", "kind", "class", "objects", "bytes", "retains objects", "retains"], rows)
    return Figure("tree", "What goes when somebody lets go", [data], layout, description, 480, table)


def _weight(by_bytes: bool) -> Any:
    return lambda node: (node.retained_bytes if by_bytes else node.retained_objects, -node.id)


def _label(node: TreeNode, has_parts: bool) -> str:
    """On one line above its parts, else in several."""
    if node.others:
        return counted(node.others, "more node")
    if node.parent < 0:
        return "everything that is kept"
    name = cut(printable(bare_frame(node.name)), _LABEL)
    return plot_text(name) if has_parts else "<br>".join(plot_text(line) for line in wrap(name, _LINE))


def _facts(node: TreeNode) -> str:
    amount = size(node.retained_bytes) if node.retained_bytes else counted(node.retained_objects, "object")
    if node.retained_bytes and node.retained_objects > 1:
        amount += f" in {node.retained_objects:,} objects"
    return f"{amount}, {node.cls}" if node.cls else amount


def holders_figure(held: Sequence[HeldClass]) -> Figure:
    """Who holds objects of which class, as flows."""
    by_bytes = any(row.bytes for row in held)
    who = list(dict.fromkeys((row.kind, row.name, row.others) for row in held))
    classes = [cls for cls in CLASSES if any(row.cls == cls for row in held)]
    labels = [f"{others:,} other holders" if others else plot_text(name, _LABEL) for _, name, others in who]
    flow = [row.bytes if by_bytes else row.objects for row in held]
    data = {
        "type": "sankey",
        "arrangement": "fixed",
        "node": {
            "label": [*labels, *classes],
            "color": [*(["var(--muted)"] * len(who)), *(COLOURS[cls] for cls in classes)],
            "pad": 14,
            "thickness": 16,
            "hovertemplate": "%{label}<extra></extra>",
        },
        "link": {
            "source": [who.index((row.kind, row.name, row.others)) for row in held],
            "target": [len(who) + classes.index(row.cls) for row in held],
            "value": flow,
            "color": ["var(--bad-soft)" if row.cls == "held-stale" else "var(--muted-soft)" for row in held],
            "customdata": [f"{size(row.bytes)} in {counted(row.objects, 'object')}" for row in held],
            "hovertemplate": "%{source.label} → %{target.label}<br>%{customdata}<extra></extra>",
        },
    }
    said = [f"{row.name or f'{row.others:,} others'} {size(row.bytes)} {row.cls}" for row in held[:3]]
    if not by_bytes:
        said = [f"{row.name or f'{row.others:,} others'} {row.objects:,} {row.cls}" for row in held[:3]]
    description = f"{'; '.join(said)}. What several hold counts with each of them."
    rows: list[list[Cell]] = [
        [row.name or f"{row.others:,} others", row.kind, row.cls, row.objects, bytes_cell(row.bytes)] for row in held
    ]
    table = Table("Holds by class", ["who", "kind", "class", "objects", "bytes"], rows)
    height = max(220, min(560, 60 + 34 * len(who)))
    return Figure("holders", "Who holds what", [data], {"margin": _MARGIN}, description, height, table)


def classes_figure(source: SourceLiveness, number: int) -> Figure:
    """Objects and bytes of each class of one source."""
    rows = [row for row in source.classes if row.objects]
    measures = [("bytes", [row.bytes for row in rows])] if any(row.bytes for row in rows) else []
    measures.append(("objects", [row.objects for row in rows]))
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"barmode": "stack", "showlegend": False, "margin": {"l": 100, "r": 24, "t": 30, "b": 20}}
    for place, (name, values) in enumerate(measures, 1):
        axis = "" if place == 1 else str(place)
        shown = [size(v) if name == "bytes" else counted(v, "object") for v in values]
        data.append(
            {
                "type": "bar", "orientation": "h", "y": [row.name for row in rows], "x": values,
                "marker": {"color": [COLOURS[row.name] for row in rows]}, "xaxis": f"x{axis}", "yaxis": f"y{axis}",
                "text": shown, "textposition": "auto", "cliponaxis": False,
                "customdata": [MEANINGS[row.name] for row in rows],
                "hovertemplate": "%{y}: %{text}<br>%{customdata}<extra></extra>",
            }
        )  # fmt: skip
        half = [0, 1] if len(measures) == 1 else [0, 0.48] if place == 1 else [0.52, 1]
        layout[f"xaxis{axis}"] = {"domain": half, "showticklabels": False, "showgrid": False, "zeroline": False,
                                  "title": {"text": name}, "side": "top", "anchor": f"y{axis}"}  # fmt: skip
        layout[f"yaxis{axis}"] = {"autorange": "reversed", "anchor": f"x{axis}", "showticklabels": place == 1}
    leading = max(rows, key=lambda row: (row.bytes, row.objects), default=None)
    objects, total = sum(row.objects for row in rows), sum(row.bytes for row in rows)
    description = (
        f"{source.source}, {source.kind}: {counted(objects, 'object')}, {size(total) if total else 'no sizes'}"
    )
    if leading is not None:
        description += f"; {leading.share:.1%} of the objects of {leading.name} ({MEANINGS[leading.name]})"
    description += f". Stale: longer than {duration_text(source.stale_after_s)} ({source.stale_because})."
    cells: list[list[Cell]] = [
        [row.name, row.objects, round(row.share, 6), bytes_cell(row.bytes), MEANINGS[row.name]] for row in rows
    ]
    table = Table(f"Classes of {source.source}", ["class", "objects", "share", "bytes", "means"], cells)
    height = 90 + 32 * len(rows)
    return Figure(f"classes-{number}", f"Classes: {source.source}", data, layout, description, height, table)


def course_figure(source: SourceLiveness, number: int) -> Figure | None:
    """The classes over time; None where there are not two times."""
    windows = source.windows
    if len(windows) < 2:
        return None
    by_bytes = any(any(window.bytes) for window in windows)
    unit, length = time_axis(windows[-1].t_s)
    amount, scale = byte_axis(max(sum(w.bytes) for w in windows)) if by_bytes else ("objects", 1.0)
    data = []
    for place, cls in enumerate(CLASSES):
        values = [(window.bytes if by_bytes else window.objects)[place] for window in windows]
        if any(values):
            shown = [size(v) if by_bytes else f"{v:,}" for v in values]
            data.append(
                {
                    "type": "scatter", "mode": "lines", "stackgroup": "one", "name": cls, "customdata": shown,
                    "x": [window.t_s / length for window in windows], "y": [v / scale for v in values],
                    "line": {"color": COLOURS[cls]},
                    "hovertemplate": f"{cls}: %{{customdata}}<extra></extra>",
                }
            )  # fmt: skip
    layout = {
        "hovermode": "x unified",
        "xaxis": {"title": {"text": f"{unit} since the start of the source"}},
        "yaxis": {"title": {"text": amount}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "margin": {"t": 40},
    }
    first, last = (
        dict(zip(CLASSES, w.bytes if by_bytes else w.objects, strict=True)) for w in (windows[0], windows[-1])
    )
    moved = max(CLASSES, key=lambda cls: abs(last[cls] - first[cls]))
    told = [size(v[moved]) if by_bytes else f"{v[moved]:,}" for v in (first, last)]
    times = [duration_text(window.t_s) for window in (windows[0], windows[-1])]
    description = f"{moved} went from {told[0]} at {times[0]} to {told[1]} at {times[1]}."
    rows: list[list[Cell]] = [
        [time_cell(round(w.t_s, 3)), *(bytes_cell(v) if by_bytes else v for v in (w.bytes if by_bytes else w.objects))]
        for w in windows
    ]
    table = Table(f"Classes of {source.source} over time", ["at", *CLASSES], rows)
    return Figure(f"course-{number}", f"Classes over time: {source.source}", data, layout, description, 320, table)


def idle_figure(idle: Sequence[IdleTime]) -> Figure:
    """How long ago things were last used."""
    by_bytes = any(row.bytes for row in idle)
    names = [_idle_name(row) for row in idle]
    shown = [size(row.bytes) if by_bytes else f"{row.objects:,}" for row in idle]
    amount, scale = byte_axis(max((row.bytes for row in idle), default=0)) if by_bytes else ("objects", 1.0)
    data = [
        {
            "type": "bar", "x": names, "y": [(row.bytes if by_bytes else row.objects) / scale for row in idle],
            "text": shown,
            "textposition": "auto", "customdata": [counted(row.objects, "object") for row in idle],
            "marker": {"color": ["var(--muted)" if row.from_s is None else "var(--series-1)" for row in idle]},
            "hovertemplate": "%{x}: %{text}, %{customdata}<extra></extra>",
        }
    ]  # fmt: skip
    unseen = next((row for row in idle if row.from_s is None), None)
    seen = [row for row in idle if row.from_s is not None]
    parts = []
    if seen:
        oldest = seen[-1]
        parts.append(f"Longest unused: {_amount(oldest)}, {_idle_name(oldest)}")
    if unseen is not None:
        parts.append(f"no use was seen of {_amount(unseen)}, which is no proof of disuse")
    guessed = sum(row.approximate for row in idle)
    if guessed:
        parts.append(f"{counted(guessed, 'object')} may have been used later than is known")
    rows: list[list[Cell]] = [[_idle_name(row), row.objects, bytes_cell(row.bytes), row.approximate] for row in idle]
    table = Table("Objects by the time since their last use", ["last use", "objects", "bytes", "perhaps later"], rows)
    layout = {"yaxis": {"title": {"text": amount}}, "xaxis": {"type": "category"}}
    return Figure(
        "idle", "Time since the last use", data, layout, f"{'; '.join(parts) or 'Nothing is kept'}.", 300, table
    )


def _amount(row: IdleTime) -> str:
    return f"{size(row.bytes)} in {counted(row.objects, 'object')}" if row.bytes else counted(row.objects, "object")


def _idle_name(row: IdleTime) -> str:
    if row.from_s is None:
        return "no use seen"
    if row.to_s is None:
        return f"{_step(row.from_s)} ago or longer"
    return f"{_step(row.from_s)} to {_step(row.to_s)} ago" if row.from_s else f"less than {_step(row.to_s)} ago"


def _step(seconds: float) -> str:
    """``10 s``, ``1 min``, ``6 h``, ``1 d``."""
    return next((f"{seconds / n:g} {unit}" for unit, n in (("d", 86_400), ("h", 3600), ("min", 60)) if seconds >= n),
                f"{seconds:g} s")  # fmt: skip


def why_figure(whys: Sequence[Why]) -> Figure:
    """The paths of several objects as flows from who holds to what is held."""
    places: dict[tuple[str, str], int] = {}
    labels: list[str] = []
    colours: list[str] = []
    links: dict[tuple[int, int], dict[str, Any]] = {}

    def place(step: Step, cls: str = "") -> int:
        key = (step.kind, step.name)
        if key not in places:
            places[key] = len(labels)
            labels.append(plot_text(f"{step.kind} {step.name}", _LABEL))
            colours.append(COLOURS[cls])
        elif cls:
            colours[places[key]] = COLOURS[cls]
        return places[key]

    for why in whys:
        for path in why.paths:
            steps = [place(step, why.cls if step is path[-1] else "") for step in path]
            for tail, head, step in zip(steps, steps[1:], path[1:], strict=False):
                link = links.setdefault((tail, head), {"value": 0, "text": _edge(step)})
                link["value"] += max(1, why.bytes)
    data = {
        "type": "sankey",
        "node": {
            "label": labels,
            "color": colours,
            "pad": 18,
            "thickness": 14,
            "hovertemplate": "%{label}<extra></extra>",
        },
        "link": {
            "source": [tail for tail, _ in links],
            "target": [head for _, head in links],
            "value": [link["value"] for link in links.values()],
            "color": "var(--muted-soft)",
            "customdata": [link["text"] for link in links.values()],
            "hovertemplate": "%{source.label} → %{target.label}<br>%{customdata}<extra></extra>",
        },
    }
    first = whys[0]
    way = " → ".join(f"{step.kind} {step.name}" for step in (first.paths[0] if first.paths else ()))
    alone = f"{first.dominator} alone could let it go" if first.dominator else "nobody alone could let it go"
    description = f"{first.name} ({first.cls or 'keeps others'}, {size(first.bytes)}): {way}; {alone}."
    height = max(240, min(640, 80 + 46 * len(whys)))
    return Figure("paths", "Paths to the leading suspects", [data], {"margin": _MARGIN}, description, height)


def _edge(step: Step) -> str:
    held = f" for {duration_text(step.held_s)}" if step.held_s is not None else ""
    return plot_text(f"{step.edge}{f' ×{step.count:,}' if step.count > 1 else ''}{held}")

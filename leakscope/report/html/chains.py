"""The chain of a finding as a figure: from application code down to the bytes, with the evidence on each link.

A chain is a path, and a sankey diagram of a path is one band: it shows nothing of the evidence. So a chain is drawn as
a ladder: what is linked on the right, how the link is known on the left, and surer links in stronger lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leakscope.model.results import Chain, ChainLink
from leakscope.quantities import size
from leakscope.report.cells import bare_frame
from leakscope.report.html.parts import Cell, Code, Figure, Table, Value, plot_text

FRAMES_AROUND = 5
"""Frames of a chain that are drawn: the culprit's and those around it; the table has all."""
ROW_PX = 30
LEFT, RIGHT, BRANCH = 0.0, 1.0, 0.03
NODE = 0.27
SURE, LIKELY = 0.9, 0.5
_COLOURS = {
    "range": "var(--series-4)",
    "frame": "var(--series-1)",
    "call": "var(--gpu)",
    "syscall": "var(--kernel)",
    "slab_cache": "var(--kernel)",
    "kind": "var(--kernel)",
    "map": "var(--host)",
    "device": "var(--gpu)",
    "launches": "var(--series-6)",
}
_NAMES = {
    "range": "NVTX range",
    "frame": "frame",
    "call": "call",
    "syscall": "syscall",
    "slab_cache": "slab cache",
    "kind": "kernel memory",
    "map": "mapping",
    "device": "device memory",
    "launches": "kernel launches",
    "profile": "profiled kernel",
}

_RULES = {"recorded on the thread": "thread"}  # short forms for the figure; the table has the words


def chain_figure(id_: str, title: str, description: str, chain: Chain, culprit: str) -> Figure:
    """``chain`` as a figure and a table; ``culprit`` is the frame that is pointed at."""
    shown = _around(chain.links, culprit)
    rows = [(link, NODE) for link in shown] + [(link, NODE + BRANCH) for link in chain.detail]
    depth = {id(link): number for number, (link, _) in enumerate(rows) if link is not None}
    call = next((depth[id(link)] for link in shown if link is not None and link.what == "call"), max(0, len(shown) - 1))
    data = [*_edges(rows, len(shown), call), _nodes(rows, culprit), _evidence(rows)]
    layout: dict[str, Any] = {
        "xaxis": {"visible": False, "range": [LEFT, RIGHT], "fixedrange": True},
        "yaxis": {"visible": False, "range": [-(len(rows) - 0.4), 0.6], "fixedrange": True},
        "showlegend": False,
        "hovermode": "closest",
        "margin": {"l": 4, "r": 4, "t": 24, "b": 4},
        "annotations": [_head("known by", NODE - 0.015, "right"), _head("link", NODE + 0.015, "left")],
        "dragmode": False,
    }
    return Figure(
        id_, title, data, layout, description, ROW_PX * len(rows) + 40, _table(chain), "ladder", {"node": NODE}
    )


def _head(text: str, x: float, side: str) -> dict[str, Any]:
    return {"x": x, "y": 1, "yref": "paper", "xanchor": side, "yanchor": "bottom", "showarrow": False, "text": text,
            "font": {"size": 11, "color": "var(--soft)"}}  # fmt: skip


def _around(links: Sequence[ChainLink], culprit: str) -> list[ChainLink | None]:
    """The links with few frames, None where some are left out."""
    frames = [number for number, link in enumerate(links) if link.what == "frame"]
    if len(frames) <= FRAMES_AROUND + 1:
        return list(links)
    at = next((i for i in reversed(range(len(frames))) if links[frames[i]].name == culprit), len(frames) - 1)
    first = min(max(0, at - FRAMES_AROUND // 2), len(frames) - FRAMES_AROUND)
    kept = set(frames[first : first + FRAMES_AROUND])
    shown: list[ChainLink | None] = []
    for number, link in enumerate(links):
        if link.what != "frame" or number in kept:
            shown.append(link)
        elif shown[-1:] != [None]:
            shown.append(None)
    return shown


def _edges(rows: Sequence[tuple[ChainLink | None, float]], main: int, call: int) -> list[dict[str, Any]]:
    """Lines between neighbours, and from the call to what it allocated in the kernel; one trace a strength."""
    strengths: dict[str, list[tuple[Sequence[float], Sequence[float]]]] = {}
    for number, (link, x) in enumerate(rows):
        if number == 0:
            continue
        sure = 1.0 if link is None else link.confidence
        style = "solid" if sure >= SURE else "dash" if sure >= LIKELY else "dot"
        way = ([NODE, x], [1 - number, -number]) if number < main else ([NODE, NODE, x], [-call, -number, -number])
        strengths.setdefault(style, []).append(way)
    traces = []
    for style, ways in sorted(strengths.items()):
        across: list[float | None] = [value for xs, _ in ways for value in (*xs, None)]
        down: list[float | None] = [value for _, ys in ways for value in (*ys, None)]
        traces.append(
            {"type": "scatter", "mode": "lines", "x": across, "y": down, "hoverinfo": "skip",
             "line": {"color": "var(--muted)", "width": 2, "dash": style}}
        )  # fmt: skip
    return traces


def _nodes(rows: Sequence[tuple[ChainLink | None, float]], culprit: str) -> dict[str, Any]:
    links = [link for link, _ in rows]
    pointed = next((n for n in reversed(range(len(links))) if (link := links[n]) and link.name == culprit), -1)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [x for _, x in rows],
        "y": [-n for n in range(len(rows))],
        "text": [_node_text(link, n == pointed) for n, link in enumerate(links)],
        "hovertext": [_hover(link) for link in links],
        "hoverinfo": "text",
        "textposition": "middle right",
        "cliponaxis": False,
        "marker": {
            "size": [16 if n == pointed else 11 for n in range(len(links))],
            "color": ["var(--bad)" if n == pointed else _colour(link) for n, link in enumerate(links)],
            "line": {"width": 0},
        },
    }


def _colour(link: ChainLink | None) -> str:
    return "var(--line)" if link is None else _COLOURS.get(link.what, "var(--series-8)")


def _node_text(link: ChainLink | None, pointed: bool) -> str:
    if link is None:
        return "…"
    name = plot_text(bare_frame(link.name), 90)
    name = f"<b>{name}</b>" if pointed else name
    ends = {"slab_cache", "kind", "map", "device"}
    return f"  {name}  {size(link.bytes)}" if link.what in ends else f"  {name}"


def _hover(link: ChainLink | None) -> str:
    if link is None:
        return "frames left out here; the table below has them"
    how = f"known by: {link.rule}, confidence {link.confidence:.2f}"
    what = f"{_NAMES.get(link.what, link.what)}: {plot_text(link.name, 200)}"
    return f"{what}<br>{how}<br>{link.count:,}, {size(link.bytes)} in all"


def _evidence(rows: Sequence[tuple[ChainLink | None, float]]) -> dict[str, Any]:
    """How each link is known, to its left."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": [NODE - 0.015] * len(rows),
        "y": [-n for n in range(len(rows))],
        "text": [
            "" if link is None else plot_text(f"{_RULES.get(link.rule, link.rule)} {link.confidence:.2f}")
            for link, _ in rows
        ],
        "textposition": "middle left",
        "textfont": {"size": 11, "color": "var(--soft)"},
        "hoverinfo": "skip",
        "cliponaxis": False,
    }


def _known_by(link: ChainLink) -> str:
    return plot_text(f"{_RULES.get(link.rule, link.rule)} {link.confidence:.2f}")


def _table(chain: Chain) -> Table:
    rows: list[list[Cell]] = [
        [_NAMES.get(link.what, link.what), Code(link.name), link.rule, round(link.confidence, 3), link.count,
         Value(size(link.bytes), link.bytes)]
        for link in (*chain.links, *chain.detail)
    ]  # fmt: skip
    note = "The last rows are kernel memory that these calls keep." if chain.detail else ""
    return Table("Chain, outermost first", ("what", "name", "known by", "confidence", "count", "bytes"), rows, note)

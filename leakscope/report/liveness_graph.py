"""The liveness graph as a file: all of it as GraphML, the part that retains most as DOT, a small one as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np

from leakscope.model.liveness import EDGE_KINDS, KEEPING
from leakscope.quantities import size
from leakscope.report.chain_graph import XML_UNSAFE, quoted, write_aside

if TYPE_CHECKING:
    from leakscope.liveness.graph import Graph

MAX_DOT_NODES = 150
MAX_JSON_NODES = 2_000
MAX_LABEL = 60
_NODE_KEYS = {"kind": "string", "name": "string", "cls": "string"} | dict.fromkeys(
    ("objects", "bytes", "retained_bytes", "since_ns", "last_use_ns", "rank"), "long"
)
_EDGE_KEYS = {"kind": "string", "count": "long", "since_ns": "long", "stale": "boolean"}


def write_graphml(graph: Graph, path: Path) -> None:
    """Write the whole graph. Raises BadInputError for a path that cannot be written."""
    write_aside(path, _graphml(graph))


def write_dot(graph: Graph, path: Path) -> None:
    """Write the nodes that retain most and the edges between them. Raises BadInputError as above."""
    write_aside(path, _dot(graph))


def nodes_of(graph: Graph, chosen: Iterator[int] | range | list[int]) -> Iterator[dict[str, Any]]:
    """Nodes as plain values: id, name, and the columns that are numbers, times left out where they are not known."""
    columns = {name: graph.nodes[name] for name in ("objects", "bytes", "since_ns", "last_use_ns", "rank")}
    for node in chosen:
        row: dict[str, Any] = {"id": node, "kind": graph.kind(node), "name": graph.name(node), "cls": graph.cls(node)}
        row |= {name: int(column[node]) for name, column in columns.items()}
        yield row | {"retained_bytes": int(graph.retained_bytes[node])}


def edges_of(graph: Graph, chosen: np.ndarray) -> Iterator[dict[str, Any]]:
    """Edges as plain values."""
    edges = graph.edges
    for edge in chosen.tolist():
        yield {
            "source": int(edges["tail"][edge]),
            "target": int(edges["head"][edge]),
            "kind": EDGE_KINDS[int(edges["kind"][edge])],
            "count": int(edges["count"][edge]),
            "since_ns": int(edges["since_ns"][edge]),
            "stale": bool(edges["stale"][edge]),
        }


def graph_json(graph: Graph) -> dict[str, Any] | None:
    """networkx's node-link form; None for a graph of more than MAX_JSON_NODES nodes."""
    if len(graph) > MAX_JSON_NODES:
        return None
    edges = list(edges_of(graph, np.arange(len(graph.edges["tail"]))))
    nodes = list(nodes_of(graph, range(len(graph))))
    return {"directed": True, "multigraph": True, "graph": {}, "nodes": nodes, "edges": edges}


def _graphml(graph: Graph) -> Iterator[str]:
    """GraphML; characters that XML cannot hold become U+FFFD."""
    yield '<?xml version="1.0" encoding="utf-8"?>\n<graphml xmlns="http://graphml.graphdrawing.org/xmlns">\n'
    for of, keys in (("node", _NODE_KEYS), ("edge", _EDGE_KEYS)):
        for name, kind in keys.items():
            yield f'  <key id="{of}_{name}" for="{of}" attr.name="{name}" attr.type="{kind}"/>\n'
    yield '  <graph edgedefault="directed">\n'
    for row in nodes_of(graph, range(len(graph))):
        yield f'    <node id="n{row["id"]}">{_data("node", _NODE_KEYS, row)}</node>\n'
    for row in edges_of(graph, np.arange(len(graph.edges["tail"]))):
        ends = f'source="n{row["source"]}" target="n{row["target"]}"'
        yield f"    <edge {ends}>{_data('edge', _EDGE_KEYS, row)}</edge>\n"
    yield "  </graph>\n</graphml>\n"


def _data(of: str, keys: dict[str, str], row: dict[str, Any]) -> str:
    return "".join(f'<data key="{of}_{name}">{_xml(row[name])}</data>' for name in keys)


def _xml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return escape(value.translate(XML_UNSAFE)) if isinstance(value, str) else str(value)


def _dot(graph: Graph) -> Iterator[str]:
    """Graphviz DOT, left to right; what only tells is dashed, what is stale red."""
    order = np.argsort(-graph.retained_bytes, kind="stable")[:MAX_DOT_NODES]
    shown = np.zeros(len(graph), bool)
    shown[order] = True
    yield "digraph liveness {\n  rankdir=LR;\n  node [shape=box];\n"
    if len(graph) > len(order):
        yield f"  label={quoted(f'{len(order):,} of {len(graph):,} nodes: those that retain most')};\n"
    for row in nodes_of(graph, sorted(order.tolist())):
        label = f"{row['kind']}: {row['name'][:MAX_LABEL]}"
        if row["cls"]:
            label += f", {row['cls']}"
        label += f", {size(row['bytes'])}, retains {size(row['retained_bytes'])}"
        yield f"  n{row['id']} [label={quoted(label)}];\n"
    inside = shown[graph.edges["tail"]] & shown[graph.edges["head"]]
    for row in edges_of(graph, np.flatnonzero(inside)):
        label = row["kind"] + (f" ×{row['count']:,}" if row["count"] > 1 else "")
        style = "" if row["kind"] in KEEPING else ", style=dashed"
        style += ", color=red" if row["stale"] else ""
        yield f"  n{row['source']} -> n{row['target']} [label={quoted(label)}{style}];\n"
    yield "}\n"

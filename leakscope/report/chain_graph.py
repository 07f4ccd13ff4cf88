"""Chains as one graph, and the graph as a file: JSON (node-link), GraphML, DOT.

Every edge carries its evidence: the rule that joins its two ends, the confidence, and the count and bytes of the link
that it leads to. Chains that begin with the same links share their nodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leakscope.errors import BadInputError
from leakscope.model.results import Chain, ChainLink
from leakscope.quantities import size
from leakscope.report.text import printable

if TYPE_CHECKING:
    import networkx as nx

MAX_LABEL = 120
XML_UNSAFE = {c: 0xFFFD for c in (*range(0x20), 0xFFFE, 0xFFFF, *range(0xD800, 0xE000)) if c not in (9, 10, 13)}


def chain_graph(chains: Sequence[Chain]) -> nx.DiGraph:
    """Nodes: what, name, bytes, sites (ids, comma-separated). Edges: rule, confidence, count, bytes; kind is ``chain``
    along a chain and ``detail`` from a site's last link to memory that its calls caused below it."""
    import networkx as nx

    graph = nx.DiGraph()
    for chain in chains:
        path: tuple[str, ...] = ()
        previous = ""
        for link in chain.links:
            path = (*path, f"{link.what}:{link.name}")
            node = _node(graph, chain.site, link, path)
            if previous:
                _edge(graph, previous, node, link, "chain")
            previous = node
        for link in chain.detail:
            node = _node(graph, chain.site, link, (*path, "detail", f"{link.what}:{link.name}"))
            if previous:
                _edge(graph, previous, node, link, "detail")
    return graph


def write_graph(chains: Sequence[Chain], path: Path) -> None:
    """Write the graph to ``path``, in the form that its suffix names; aside and renamed when whole.

    Raises BadInputError for another suffix or a path that cannot be written.
    """
    form = writer_of(path)
    write_aside(path, [form(chain_graph(chains))])


def write_aside(path: Path, pieces: Iterable[str]) -> None:
    """Write text to ``path``, aside and renamed when whole. Raises BadInputError for a path that cannot be written."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("w", encoding="utf-8", errors="replace") as file:
            file.writelines(pieces)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise BadInputError(f"cannot write {path}: {error.strerror}") from None


def writer_of(path: Path) -> Callable[[nx.DiGraph], str]:
    """What writes a file of this suffix; raises BadInputError for one that nothing does."""
    try:
        return {".json": to_json, ".graphml": to_graphml, ".dot": to_dot}[path.suffix.lower()]
    except KeyError:
        raise BadInputError(f"--chains {path}: the suffix must be .json, .graphml or .dot") from None


def to_json(graph: nx.DiGraph) -> str:
    """networkx's node-link form."""
    import networkx as nx

    return json.dumps(nx.node_link_data(graph, edges="edges"), indent=1) + "\n"


def to_graphml(graph: nx.DiGraph) -> str:
    """GraphML; characters that XML cannot hold become U+FFFD."""
    import networkx as nx

    safe = nx.relabel_nodes(graph, {node: node.translate(XML_UNSAFE) for node in graph})
    for _, data in safe.nodes(data=True):
        data.update({k: v.translate(XML_UNSAFE) for k, v in data.items() if isinstance(v, str)})
    return "\n".join(nx.generate_graphml(safe)) + "\n"


def to_dot(graph: nx.DiGraph) -> str:
    """Graphviz DOT, left to right; the evidence is the label of an edge."""
    number = {node: f"n{i}" for i, node in enumerate(graph)}
    lines = ["digraph chains {", "  rankdir=LR;", "  node [shape=box];"]
    for node, data in graph.nodes(data=True):
        label = f"{data['what']}: {data['name'][:MAX_LABEL]}"
        lines.append(f"  {number[node]} [label={quoted(label)}];")
    for tail, head, data in graph.edges(data=True):
        label = f"{data['rule']} {data['confidence']:.2f}, {data['count']:,} × {size(data['bytes'])}"
        style = ", style=dashed" if data["kind"] == "detail" else ""
        lines.append(f"  {number[tail]} -> {number[head]} [label={quoted(label)}{style}];")
    return "\n".join([*lines, "}"]) + "\n"


def quoted(text: str) -> str:
    """A string of DOT."""
    return '"' + printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _node(graph: nx.DiGraph, site: str, link: ChainLink, path: tuple[str, ...]) -> str:
    name = "\x1f".join(path)
    node = f"{len(path)}:{_digest(name)}"
    if node not in graph:
        graph.add_node(node, what=link.what, name=link.name, bytes=0, sites="")
    data = graph.nodes[node]
    data["bytes"] += link.bytes
    data["sites"] = ",".join(dict.fromkeys([*filter(None, data["sites"].split(",")), site]))
    return node


def _edge(graph: nx.DiGraph, tail: str, head: str, link: ChainLink, kind: str) -> None:
    if graph.has_edge(tail, head):
        data = graph.edges[tail, head]
        data["confidence"] = min(data["confidence"], round(link.confidence, 3))
        data["count"] += link.count
        data["bytes"] += link.bytes
    else:
        evidence = {"rule": link.rule, "confidence": round(link.confidence, 3), "count": link.count}
        graph.add_edge(tail, head, kind=kind, bytes=link.bytes, **evidence)


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]

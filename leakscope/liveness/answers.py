"""Questions to a liveness graph: who retains most, why is this alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from leakscope.correlate.stacks import Stacks
from leakscope.errors import BadInputError
from leakscope.liveness.graph import ROOT, Graph
from leakscope.model.liveness import EDGE_KINDS, NODE_KINDS, Keeper, Stale, Step, Why

if TYPE_CHECKING:
    import duckdb

MAX_MATCHES = 3
MAX_PATHS = 3
MAX_SUSPECTS = 5
END_STEPS = 5
"""Steps at either end of a path that are told: prefixes are chains of thousands of blocks."""
_KEEPERS = [NODE_KINDS.index(kind) for kind in ("holder", "cache")]


@dataclass(frozen=True)
class Place:
    """A source: where its stacks are, what it is called, the time of its end (0 = not known)."""

    con: duckdb.DuckDBPyConnection
    name: str
    at_ns: int


def keepers(graph: Graph, places: Sequence[Place], top: int) -> list[Keeper]:
    """The holders and caches that retain most."""
    tail, head = graph.edges["tail"], graph.edges["head"]
    keeps = np.isin(graph.nodes["kind"][tail], _KEEPERS) & np.isin(
        graph.edges["kind"], [EDGE_KINDS.index(kind) for kind in ("holds", "caches")]
    )
    tail, head = tail[keeps], head[keeps]
    stale, since = graph.edges["stale"][keeps], graph.edges["since_ns"][keeps]
    size, objects = graph.nodes["bytes"][head], graph.nodes["objects"][head]
    nodes = np.flatnonzero(np.bincount(tail, minlength=len(graph)))
    retained = graph.retained_bytes[nodes]
    held = _sums(tail, objects, len(graph))[nodes]
    nodes = nodes[np.lexsort((nodes, -held, -retained))][:top]
    own, counts = _sums(tail, size, len(graph)), _sums(tail, objects, len(graph))
    stale_own = _sums(tail[stale], size[stale], len(graph))
    stale_counts = _sums(tail[stale], objects[stale], len(graph))
    oldest = np.full(len(graph), np.iinfo(np.int64).max)
    np.minimum.at(oldest, tail[since > 0], since[since > 0])
    found = []
    for node in nodes.tolist():
        place = places[int(graph.nodes["source"][node])]
        edges = np.flatnonzero(keeps)[tail == node]
        found.append(
            Keeper(
                node=node,
                kind=graph.kind(node),
                name=graph.name(node),
                source=place.name,
                objects=int(counts[node]),
                bytes=int(own[node]),
                retained_bytes=int(graph.retained_bytes[node]),
                stale_objects=int(stale_counts[node]),
                stale_bytes=int(stale_own[node]),
                oldest_s=_age(place, int(oldest[node])) if oldest[node] != np.iinfo(np.int64).max else None,
                stack=_stack(place, _main_stack(graph, edges)),
            )
        )
    return found


def _sums(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, index, values)
    return sums


def _main_stack(graph: Graph, edges: np.ndarray) -> int:
    """The stack of the most holds, stale ones first."""
    stacks, stale = graph.edges["stack"][edges], graph.edges["stale"][edges]
    chosen = stacks[stale & (stacks > 0)] if (stale & (stacks > 0)).any() else stacks[stacks > 0]
    return int(np.bincount(chosen).argmax()) if len(chosen) else 0


def _stack(place: Place, stack: int) -> tuple[str, ...]:
    return tuple(frame.text for frame in Stacks(place.con, [stack])[stack]) if stack else ()


def _age(place: Place, since_ns: int) -> float | None:
    return (place.at_ns - since_ns) / 1e9 if since_ns and place.at_ns else None


def with_holders(graph: Graph, stale: Sequence[Stale]) -> list[Stale]:
    """``stale`` with the name of who holds each: the first node behind the root on the shortest path."""
    found = []
    for row in stale:
        path = graph.path(row.node)
        found.append(replace(row, holder=graph.name(path[1]) if len(path) > 2 else ""))
    return found


def why(graph: Graph, places: Sequence[Place], name: str) -> list[Why]:
    """Why the nodes of a name are alive: the name as it is, else as a part of others; at most MAX_MATCHES of them.

    Raises BadInputError where nothing live has it.
    """
    matches = np.flatnonzero(pc.equal(graph.names, name).to_numpy(zero_copy_only=False))
    if not len(matches):
        matches = np.flatnonzero(pc.match_substring(graph.names, name).to_numpy(zero_copy_only=False))
    matches = matches[(matches != ROOT) & (graph.nodes["kind"][matches] != NODE_KINDS.index("kernel"))]
    if not len(matches):
        raise BadInputError(
            f"--why {name}: nothing that is live has this name; names are those of --json and --graphml"
        )
    return [_explained(graph, places, int(node)) for node in matches[:MAX_MATCHES]]


def suspects(graph: Graph, places: Sequence[Place], stale: Sequence[Stale]) -> list[Why]:
    """Why the leading ones of ``stale`` are alive, at most MAX_SUSPECTS nodes."""
    nodes = list(dict.fromkeys(row.node for row in stale))[:MAX_SUSPECTS]
    return [_explained(graph, places, node) for node in nodes]


def _explained(graph: Graph, places: Sequence[Place], node: int) -> Why:
    direct = [keeper for keeper in graph.keepers(node) if graph.path(keeper)]
    above = int(graph.dominators[node])
    return Why(
        node=node,
        name=graph.name(node),
        cls=graph.cls(node),
        bytes=int(graph.nodes["bytes"][node]),
        retained_bytes=int(graph.retained_bytes[node]),
        dominator=graph.name(above) if above > ROOT else "",
        keepers=len(direct),
        paths=tuple(_steps(graph, places, [*graph.path(keeper), node]) for keeper in direct[:MAX_PATHS]),
    )


def _steps(graph: Graph, places: Sequence[Place], path: list[int]) -> tuple[Step, ...]:
    """The path without the root; of a long one its two ends."""
    steps = [Step(graph.kind(path[1]), graph.name(path[1]))] if len(path) > 1 else []
    pairs = list(pairwise(path[1:]))
    left_out = len(pairs) - 2 * END_STEPS
    for number, (tail, head) in enumerate(pairs):
        if left_out > 0 and END_STEPS <= number < END_STEPS + left_out:
            if number == END_STEPS:
                steps.append(Step("…", f"{left_out:,} more steps"))
            continue
        edge = graph.edge(tail, head)
        place = places[int(graph.nodes["source"][head])]
        steps.append(
            Step(
                graph.kind(head),
                graph.name(head),
                EDGE_KINDS[int(edge["kind"])],
                int(edge["count"]),
                _age(place, int(edge["since_ns"])),
                _stack(place, int(edge["stack"])),
            )
        )
    return tuple(steps)

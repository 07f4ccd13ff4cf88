"""The liveness graph: nodes and edges as columns, who retains how much, and why something is alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from leakscope.liveness.dominators import immediate_dominators, retained_sizes
from leakscope.model.liveness import CLASSES, EDGE_KINDS, KEEPING, NODE_KINDS

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

ROOT = 0
NO_CLASS = -1
NODE_COLUMNS: dict[str, Any] = {
    "kind": np.int8,  # index into NODE_KINDS
    "source": np.int16,  # the source that tells of it, -1 for the root
    "cls": np.int8,  # index into CLASSES, NO_CLASS for what has none
    "objects": np.int64,
    "bytes": np.int64,  # its own
    "since_ns": np.int64,  # birth, of a group the oldest; 0 = not known
    "last_use_ns": np.int64,  # 0 = not seen
    "rank": np.int64,  # of the last use in its source, 1 = last; 0 = not seen
    "stack": np.int32,
    "approximate": np.bool_,  # a later use may not have been seen
}
EDGE_COLUMNS: dict[str, Any] = {
    "tail": np.int32,
    "head": np.int32,
    "kind": np.int8,  # index into EDGE_KINDS
    "count": np.int64,  # holds, launches…
    "since_ns": np.int64,  # of the oldest hold; 0 = not known
    "stack": np.int32,
    "stale": np.bool_,  # held for longer than holds last
}
_KEEPS = np.array([kind in KEEPING for kind in EDGE_KINDS])


@dataclass(frozen=True)
class Graph:
    """Equally long columns: ``nodes`` (:data:`NODE_COLUMNS`) with ``names``, ``edges`` (:data:`EDGE_COLUMNS`).

    Node 0 is the root. Everything that is live is reachable from it along edges of the kinds in KEEPING.
    """

    names: pa.ChunkedArray
    nodes: dict[str, npt.NDArray[Any]]
    edges: dict[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(self.nodes["kind"])

    def name(self, node: int) -> str:
        """The name of a node."""
        return str(self.names[int(node)].as_py())

    def kind(self, node: int) -> str:
        """The kind of a node."""
        return NODE_KINDS[int(self.nodes["kind"][node])]

    def cls(self, node: int) -> str:
        """The class of a node, '' where it has none."""
        code = int(self.nodes["cls"][node])
        return CLASSES[code] if code >= 0 else ""

    @cached_property
    def keeping(self) -> tuple[Int32, Int32]:
        """Tails and heads of the edges that keep their head alive."""
        keeps = _KEEPS[self.edges["kind"]]
        return self.edges["tail"][keeps], self.edges["head"][keeps]

    @cached_property
    def dominators(self) -> Int32:
        """int32[nodes]: the immediate dominator of each node, -1 where nothing keeps it."""
        return immediate_dominators(len(self), *self.keeping, ROOT)

    @cached_property
    def retained_bytes(self) -> Int64:
        """int64[nodes]: what would go with each node, itself included."""
        return retained_sizes(self.dominators, self.nodes["bytes"], ROOT)

    @cached_property
    def tree(self) -> Int32:
        """int32[nodes]: the node before each on a shortest path from the root, -1 where there is none."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order

        tail, head = self.keeping
        edges = csr_array((np.ones(len(tail), np.int8), (tail, head)), shape=(len(self), len(self)))
        _, before = breadth_first_order(edges, ROOT, directed=True, return_predecessors=True)
        found: Int32 = np.maximum(before, -1).astype(np.int32)
        return found

    def path(self, node: int) -> list[int]:
        """The nodes of a shortest path from the root to ``node``, both included; [] where none leads there."""
        found = [int(node)]
        while found[-1] != ROOT:
            before = int(self.tree[found[-1]])
            if before < 0:
                return []
            found.append(before)
        return found[::-1]

    def keepers(self, node: int) -> list[int]:
        """Nodes with an edge that keeps ``node`` alive, shortest path first."""
        tail, head = self.keeping
        direct = dict.fromkeys(tail[head == node].tolist())
        return sorted(direct, key=lambda keeper: (len(self.path(keeper)) or len(self), keeper))

    def edge(self, tail: int, head: int) -> dict[str, Any]:
        """Columns of the first keeping edge between two nodes."""
        found = np.flatnonzero((self.edges["tail"] == tail) & (self.edges["head"] == head) & _KEEPS[self.edges["kind"]])
        return {name: column[found[0]] for name, column in self.edges.items()}


@dataclass
class GraphBuilder:
    """Collects nodes and edges in pieces; :meth:`build` adds the root."""

    count: int = 1
    _names: list[pa.Array] = field(default_factory=list)
    _nodes: dict[str, list[npt.NDArray[Any]]] = field(default_factory=lambda: {name: [] for name in NODE_COLUMNS})
    _edges: dict[str, list[npt.NDArray[Any]]] = field(default_factory=lambda: {name: [] for name in EDGE_COLUMNS})

    def add_nodes(self, kind: str, names: pa.Array | Sequence[str], **columns: Any) -> Int32:
        """Nodes of one kind; a column is an array or one value for all, those left out are 0. Returns their numbers."""
        names = names if isinstance(names, pa.Array) else pa.array(list(names), pa.string())
        size = len(names)
        values = {"kind": NODE_KINDS.index(kind), "cls": NO_CLASS} | columns
        for name, dtype in NODE_COLUMNS.items():
            self._nodes[name].append(np.broadcast_to(np.asarray(values.get(name, 0), dtype), (size,)))
        self._names.append(names)
        first, self.count = self.count, self.count + size
        return np.arange(first, self.count, dtype=np.int32)

    def add_edges(self, kind: str, tail: npt.ArrayLike, head: npt.ArrayLike, **columns: Any) -> None:
        """Edges of one kind, read ``tail kind head``; ``count`` is 1 where it is left out."""
        tail, head = np.broadcast_arrays(np.asarray(tail, np.int32), np.asarray(head, np.int32))
        values = {"tail": tail, "head": head, "kind": EDGE_KINDS.index(kind), "count": 1} | columns
        for name, dtype in EDGE_COLUMNS.items():
            self._edges[name].append(np.broadcast_to(np.asarray(values.get(name, 0), dtype), tail.shape))

    def build(self) -> Graph:
        """The graph; the builder is used up. What nobody keeps hangs on the root: holders, caches."""
        names = pa.chunked_array([pa.array(["root"], pa.string()), *self._names], pa.string())
        nodes = {}
        for name, dtype in NODE_COLUMNS.items():
            first = np.array([NODE_KINDS.index("root") if name == "kind" else -1 if name in ("cls", "source") else 0])
            nodes[name] = np.concatenate([first.astype(dtype), *self._nodes.pop(name)])
        kept = nodes["kind"] == NODE_KINDS.index("kernel")  # kernels touch, nothing keeps them
        kept[ROOT] = True
        for head, kind in zip(self._edges["head"], self._edges["kind"], strict=True):
            kept[head[_KEEPS[kind]]] = True
        roots = np.flatnonzero(~kept)
        self.add_edges("roots", np.zeros(len(roots), np.int32), roots)
        edges = {
            name: np.concatenate([np.zeros(0, dtype), *self._edges.pop(name)]) for name, dtype in EDGE_COLUMNS.items()
        }
        return Graph(names, nodes, edges)


def degree_by_kind(graph: Graph) -> tuple[dict[str, int], dict[str, int]]:
    """(nodes of each kind, edges of each kind) that the graph has."""
    nodes = np.bincount(graph.nodes["kind"], minlength=len(NODE_KINDS))
    edges = np.bincount(graph.edges["kind"], minlength=len(EDGE_KINDS))
    return (
        {kind: int(count) for kind, count in zip(NODE_KINDS, nodes, strict=True) if count},
        {kind: int(count) for kind, count in zip(EDGE_KINDS, edges, strict=True) if count},
    )


def reachable(nodes: int, tail: Int32, head: Int32, start: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """bool[nodes]: the nodes that paths from ``start`` lead to, themselves included."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order

    first = np.flatnonzero(start)
    tail = np.concatenate([tail, np.full(len(first), nodes)])
    head = np.concatenate([head, first])
    edges = csr_array((np.ones(len(tail), np.int8), (tail, head)), shape=(nodes + 1, nodes + 1))
    found = np.zeros(nodes + 1, bool)
    found[breadth_first_order(edges, nodes, directed=True, return_predecessors=False)] = True
    return found[:-1]

"""From a liveness graph of any size to the few rows that a picture of it can hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from leakscope.liveness.dominators import retained_sizes
from leakscope.liveness.graph import NO_CLASS, ROOT, Graph
from leakscope.model.liveness import CLASSES, EDGE_KINDS, NODE_KINDS
from leakscope.model.liveness_overview import HeldClass, IdleTime, Overview, Tree, TreeNode

MAX_NODES = 300
"""Nodes of a tree, those that stand for others included."""
MAX_HOLDERS = 15
IDLE_STEPS_S = (0, 1, 10, 60, 600, 3600, 6 * 3600, 24 * 3600)
_HOLDERS = [NODE_KINDS.index(kind) for kind in ("holder", "cache")]
_HOLDS = [EDGE_KINDS.index(kind) for kind in ("holds", "caches")]


def overview(graph: Graph, ends_ns: Sequence[int]) -> Overview:
    """What there is to draw of ``graph``. ``ends_ns``: the end of each source by its number, 0 = not known."""
    return Overview(dominator_tree(graph), held_classes(graph), idle_times(graph, ends_ns))


def dominator_tree(graph: Graph, most: int = MAX_NODES) -> Tree:
    """The nodes that retain most, with the root; of the others of each parent one node that says how many they are.
    What retains nothing is left out.

    A node retains no less than what it dominates, so the leading ones are a tree. At most ``most`` nodes.
    """
    parents = graph.dominators
    retained_objects = retained_sizes(parents, graph.nodes["objects"], ROOT)
    by_bytes = bool(graph.nodes["bytes"].any())
    weight = graph.retained_bytes if by_bytes else retained_objects
    kept = np.flatnonzero((parents >= 0) & ((weight > 0) | (np.arange(len(graph)) == ROOT)))
    drawn = _leading(kept, parents, weight, most)
    number = np.full(len(graph), -1, np.int64)
    number[drawn] = np.arange(len(drawn))
    nodes = [
        TreeNode(
            id=place,
            parent=-1 if node == ROOT else int(number[parents[node]]),
            node=node,
            kind=graph.kind(node),
            name=graph.name(node),
            cls=graph.cls(node),
            objects=int(graph.nodes["objects"][node]),
            bytes=int(graph.nodes["bytes"][node]),
            retained_objects=int(retained_objects[node]),
            retained_bytes=int(graph.retained_bytes[node]),
        )
        for place, node in enumerate(drawn.tolist())
    ]
    hidden = kept[number[kept] < 0]
    above = number[parents[hidden]]
    top, above = hidden[above >= 0], above[above >= 0]  # the others lie below these
    below = retained_sizes(parents, np.isin(np.arange(len(graph)), hidden).astype(np.int64), ROOT)
    sums = {
        name: np.bincount(above, weights=values[top], minlength=len(drawn)).astype(np.int64)
        for name, values in (("nodes", below), ("objects", retained_objects), ("bytes", graph.retained_bytes))
    }
    for parent in np.flatnonzero(sums["nodes"]).tolist():
        count, objects, size = (int(sums[name][parent]) for name in ("nodes", "objects", "bytes"))
        nodes.append(TreeNode(len(nodes), parent, -1, "", "", "", objects, size, objects, size, count))
    return Tree(tuple(nodes), len(drawn), len(kept), "bytes" if by_bytes else "objects")


def _leading(
    kept: npt.NDArray[np.int64], parents: npt.NDArray[np.int32], weight: npt.NDArray[np.int64], most: int
) -> npt.NDArray[np.int64]:
    """The nodes to draw, parents first: all where they are few enough, else so many that with one more for the others
    of each parent they are no more than ``most``."""
    depth = _depths(parents)[kept]
    order = kept[np.lexsort((kept, depth, -weight[kept]))]
    root = int(np.flatnonzero(order == ROOT)[0])
    order = np.concatenate([order[[root]], np.delete(order, root)])
    if len(order) <= most:
        return order
    fewest, count = most // 2, most - 1
    while count > fewest:  # fewer parents with others leave room for more nodes
        shown = np.zeros(len(parents), bool)
        shown[order[:count]] = True
        others = len(np.unique(parents[order[count:]][shown[parents[order[count:]]]]))
        if count + others <= most:
            break
        count -= max(1, (count + others - most) // 2)
    return order[: max(count, fewest)]


def _depths(parents: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """int64[nodes]: steps to the root."""
    jump = np.where(parents >= 0, parents, ROOT)
    depth = (np.arange(len(parents)) != ROOT).astype(np.int64)
    while (jump != ROOT).any():
        depth, jump = depth + depth[jump], jump[jump]
    return depth


def held_classes(graph: Graph, most: int = MAX_HOLDERS) -> tuple[HeldClass, ...]:
    """What each holder and cache holds by class, those that hold most first; beyond ``most`` they are one."""
    tail, head = graph.edges["tail"], graph.edges["head"]
    holds = (
        np.isin(graph.nodes["kind"][tail], _HOLDERS)
        & np.isin(graph.edges["kind"], _HOLDS)
        & (graph.nodes["cls"][head] != NO_CLASS)
    )
    tail, head = tail[holds], head[holds]
    pairs = np.sort(tail * np.int64(len(graph)) + head)
    tail, head = np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], len(graph))  # who holds twice holds once
    size, objects = graph.nodes["bytes"][head], graph.nodes["objects"][head]
    of_holder = np.bincount(tail, weights=size if size.any() else objects, minlength=len(graph))
    holders = np.flatnonzero(np.bincount(tail, minlength=len(graph)))
    holders = holders[np.lexsort((holders, -of_holder[holders]))]
    shown = min(most, len(holders))
    place = np.full(len(graph), shown, np.int64)
    place[holders[:shown]] = np.arange(shown)
    group = place[tail] * len(CLASSES) + graph.nodes["cls"][head]
    counts = np.bincount(group)
    found = []
    for number in np.flatnonzero(counts).tolist():
        row, code = divmod(number, len(CLASSES))
        others = len(holders) - shown if row == shown else 0
        kind, name = ("", "") if others else (graph.kind(holders[row]), graph.name(holders[row]))
        of_group = group == number
        found.append(
            HeldClass(kind, name, CLASSES[code], int(objects[of_group].sum()), int(size[of_group].sum()), others)
        )
    return tuple(found)


def idle_times(graph: Graph, ends_ns: Sequence[int], steps_s: Sequence[float] = IDLE_STEPS_S) -> tuple[IdleTime, ...]:
    """Objects and bytes by the time since their last use, and last those of which no use was seen; empty rows are left
    out."""
    live = np.flatnonzero(graph.nodes["cls"] != NO_CLASS)
    ends = np.asarray([*ends_ns, 0], np.int64)[graph.nodes["source"][live]]
    last = graph.nodes["last_use_ns"][live]
    seen = (last > 0) & (ends > 0)
    bucket = np.searchsorted(np.asarray(steps_s), np.maximum(0, ends - last) / 1e9, "right") - 1
    bucket = np.where(seen, bucket, len(steps_s))
    found = []
    for number in range(len(steps_s) + 1):
        chosen = live[bucket == number]
        if not len(chosen):
            continue
        known = number < len(steps_s)
        found.append(
            IdleTime(
                float(steps_s[number]) if known else None,
                float(steps_s[number + 1]) if number + 1 < len(steps_s) else None,
                int(graph.nodes["objects"][chosen].sum()),
                int(graph.nodes["bytes"][chosen].sum()),
                int(graph.nodes["objects"][chosen[graph.nodes["approximate"][chosen]]].sum()) if known else 0,
            )
        )
    return tuple(found)

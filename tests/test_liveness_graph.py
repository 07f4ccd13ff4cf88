"""Dominators, retained sizes and paths of liveness graphs, against searches that look at everything."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np
import pytest

from leakscope.liveness import dominators
from leakscope.liveness.dominators import immediate_dominators, retained_sizes
from leakscope.liveness.graph import Graph, GraphBuilder, degree_by_kind, reachable


def reached(nodes: int, edges: list[tuple[int, int]], without: int = -1) -> set[int]:
    """What the root 0 reaches, a node left out."""
    after: dict[int, list[int]] = {}
    for tail, head in edges:
        after.setdefault(tail, []).append(head)
    seen = set() if without == 0 else {0}
    left = list(seen)
    while left:
        for head in after.get(left.pop(), []):
            if head not in seen and head != without:
                seen.add(head)
                left.append(head)
    return seen


def arrays(edges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    columns = np.array(edges, np.int32).reshape(-1, 2)
    return columns[:, 0].copy(), columns[:, 1].copy()


def shape(seed: int) -> tuple[int, list[tuple[int, int]]]:
    """A random graph: any edges, trees with shared leaves, chains with shortcuts, by turns."""
    chance = random.Random(seed)
    nodes = chance.randrange(2, 40)
    any_node = range(nodes)
    if seed % 3 == 0:
        edges = [(chance.choice(any_node), chance.choice(any_node)) for _ in range(chance.randrange(0, 90))]
    elif seed % 3 == 1:
        edges = [(chance.randrange(0, node), node) for node in range(1, nodes)]
        edges += [(chance.choice(any_node), nodes - 1 - chance.randrange(0, nodes // 2)) for _ in range(12)]
    else:
        edges = [(node, node + 1) for node in range(nodes - 1)]
        edges += [(chance.choice(any_node), chance.choice(any_node)) for _ in range(chance.randrange(0, nodes))]
    return nodes, edges


@pytest.mark.parametrize("rounds", [32, 0], ids=["vectorised", "library"])
@pytest.mark.parametrize("block", range(6))
def test_retained_sizes_are_what_goes_with_a_node(monkeypatch: pytest.MonkeyPatch, rounds: int, block: int) -> None:
    monkeypatch.setattr(dominators, "MAX_ROUNDS", rounds)
    for seed in range(block * 30, block * 30 + 30):
        # given a random graph with cycles, loops, double edges and parts that nothing reaches
        nodes, edges = shape(seed)
        sizes = np.random.default_rng(seed).integers(0, 1 << 40, nodes)
        found = immediate_dominators(nodes, *arrays(edges))
        retained = retained_sizes(found, sizes)
        # then what a node retains is what the root no longer reaches without it
        everything = reached(nodes, edges)
        for node in range(nodes):
            gone = everything - reached(nodes, edges, node)
            assert retained[node] == (sum(sizes[sorted(gone)]) if node in everything else sizes[node]), (seed, node)
            assert (found[node] >= 0) == (node in everything)
        # and dominators are those of networkx
        graph = nx.DiGraph(edges)
        graph.add_node(0)
        known = nx.immediate_dominators(graph, 0)
        assert {n: d for n, d in known.items() if n} == {n: found[n] for n in range(1, nodes) if found[n] >= 0}


def test_a_chain_of_a_hundred_thousand_and_a_wide_tree_need_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    # given prefixes whose blocks are all held by two owners, each but the first block by way of its child too
    count = 100_000
    chain = np.arange(3, count + 3, dtype=np.int32)
    tail = np.concatenate([[0, 0], np.full(count, 1), np.full(count, 2), chain[1:]]).astype(np.int32)
    head = np.concatenate([[1, 2], chain, chain, chain[:-1]]).astype(np.int32)
    monkeypatch.setattr(dominators, "_by_library", None)  # it must not be needed
    found = immediate_dominators(count + 3, tail, head)
    assert (found[3:] == 0).all()
    # and with one owner alone each block goes with that owner
    keep = tail != 2
    found = immediate_dominators(count + 3, tail[keep], head[keep])
    sizes = np.full(count + 3, 7, np.int64)
    assert (found[3:] == 1).all()
    assert retained_sizes(found, sizes)[1] == 7 * (count + 1)
    # and held by its last block alone, each block goes with the one after it
    keep = (tail != 2) & ((tail != 1) | (head == count + 2))
    retained = retained_sizes(immediate_dominators(count + 3, tail[keep], head[keep]), sizes)
    assert retained[1] == 7 * (count + 1)
    assert retained[3 : count + 3].tolist() == [7 * (i + 1) for i in range(count)]


def small() -> Graph:
    """alice and bob hold a view of a base; alice holds a block whose parent bob holds too; a cache keeps one object."""
    builder = GraphBuilder()
    alice, bob = builder.add_nodes("holder", ["alice", "bob"])
    cache = builder.add_nodes("cache", ["pool"])
    view, base, child, parent, idle = builder.add_nodes(
        "object", ["view", "base", "child", "parent", "idle"], objects=1, bytes=[1, 10, 100, 1000, 10000]
    )
    builder.add_nodes("kernel", ["gemm"])
    builder.add_edges("holds", [alice, bob, alice, bob], [view, view, child, parent], count=[1, 2, 1, 1])
    builder.add_edges("view-of", [view], [base])
    builder.add_edges("parent-block", [child], [parent])
    builder.add_edges("caches", cache, [idle])
    builder.add_edges("touched-by", [base], [9])
    return builder.build()


def test_who_retains_what_and_why_something_lives() -> None:
    graph = small()
    name = {graph.name(node): node for node in range(len(graph))}
    retained = {node: int(graph.retained_bytes[number]) for node, number in name.items()}
    # then shared objects are retained by none of their holders, and a view retains its base
    assert retained == {
        "root": 11111, "alice": 100, "bob": 0, "pool": 10000, "view": 11, "base": 10, "child": 100, "parent": 1000,
        "idle": 10000, "gemm": 0,
    }  # fmt: skip
    assert graph.dominators[name["parent"]] == 0
    assert [graph.name(node) for node in graph.path(name["base"])] in (
        ["root", "alice", "view", "base"],
        ["root", "bob", "view", "base"],
    )
    assert [graph.name(keeper) for keeper in graph.keepers(name["parent"])] == ["bob", "child"]
    assert graph.path(name["gemm"]) == []  # a kernel keeps nothing and nothing keeps it
    assert graph.edge(name["bob"], name["view"])["count"] == 2
    assert degree_by_kind(graph) == (
        {"root": 1, "holder": 2, "cache": 1, "object": 5, "kernel": 1},
        {"roots": 3, "holds": 4, "caches": 1, "view-of": 1, "parent-block": 1, "touched-by": 1},
    )


def test_what_paths_reach() -> None:
    tail, head = arrays([(0, 1), (1, 2), (3, 4), (4, 3)])
    start = np.array([False, True, False, False, True])
    assert reachable(5, tail, head, start).tolist() == [False, True, True, True, True]
    assert reachable(5, tail, head, np.zeros(5, bool)).tolist() == [False] * 5

"""From stacks with amounts to one prefix tree that is small enough to be looked at."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from leakscope.correlate.stacks import Frame
from leakscope.model.stack_tree import StackTree, WeighedStack

MAX_NODES = 30_000
"""Nodes of a tree; branches are cut until it has no more (about 2 MB as JSON)."""
SHARES = (0.0, *(step * 10.0**power for power in range(-6, -2) for step in (1, 2, 5)), 1e-2)
"""Shares of a root that are tried, in this order: branches with less are cut."""
SMALLER = ("", "smaller")

_CUDA = re.compile(r"cu(da)?[A-Z]\w*|__cuda\w+|libcuda(rt)?\w*")
_CUDA_MODULE = re.compile(r"(.*/)?libcuda(rt)?(\.|-|$).*")


def frame_kind(frame: Frame) -> str:
    """Which of FRAME_KINDS a frame is: functions of libcuda and libcudart are ``cuda``, wherever they were linked."""
    if frame.kind in ("python", "kernel"):
        return frame.kind
    if _CUDA.fullmatch(frame.function) or _CUDA_MODULE.fullmatch(frame.module):
        return "cuda"
    return "native"


class _Nodes:
    """A tree while it grows."""

    def __init__(self, measures: int) -> None:
        self.parent: list[int] = []
        self.frame: list[int] = []
        self.own: list[dict[int, float]] = [{} for _ in range(measures)]
        self.sampled: set[int] = set()
        self.stacks: dict[int, int] = {}  # node → stacks that end there
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, frame: int) -> int:
        node = self._children.get((parent, frame))
        if node is None:
            node = self._children[parent, frame] = len(self.parent)
            self.parent.append(parent)
            self.frame.append(frame)
        return node

    def add(self, node: int, amounts: Sequence[float], sampled: bool, stacks: int = 1) -> None:
        for own, amount in zip(self.own, amounts, strict=True):
            if amount:
                own[node] = own.get(node, 0) + amount
        self.stacks[node] = self.stacks.get(node, 0) + stacks
        if sampled:
            self.sampled.add(node)


def stack_tree(stacks: Iterable[WeighedStack], measures: int, max_nodes: int = MAX_NODES) -> StackTree:
    """The tree of ``stacks``, whose amounts are of ``measures`` measures; stacks without any amount are left out.

    Where it would have more than ``max_nodes``, branches below the smallest of SHARES that is enough are replaced by
    one node a parent; no amount is lost. With the last of SHARES it may still have more. The same stacks give the same
    tree. Raises ValueError for negative amounts.
    """
    chosen = [stack for stack in stacks if any(stack.amounts)]
    if any(amount < 0 for stack in chosen for amount in stack.amounts):
        raise ValueError("a width cannot be negative")
    roots = tuple(dict.fromkeys(stack.root for stack in chosen))
    at_root = {root: node for node, root in enumerate(roots)}
    frames: dict[tuple[str, str], int] = {}
    nodes = _Nodes(measures)
    nodes.parent, nodes.frame = [-1] * len(roots), [-1] * len(roots)
    for stack in chosen:
        node = at_root[stack.root]
        for frame in stack.frames:
            node = nodes.child(node, frames.setdefault(frame, len(frames)))
        nodes.add(node, stack.amounts, stack.sampled)
    whole = _tree(roots, frames, nodes, {}, 0.0)
    if len(whole.parent) <= max_nodes:
        return whole
    shares = _shares(whole)
    share = next((s for s in SHARES if sum(one >= s for one in shares) <= max_nodes), SHARES[-1])
    return _cut(whole, nodes.stacks, shares, share)


def _tree(
    roots: tuple[tuple[str, ...], ...],
    frames: dict[tuple[str, str], int],
    nodes: _Nodes,
    merged: dict[int, int],
    share: float,
) -> StackTree:
    return StackTree(
        roots, tuple(frames), tuple(nodes.parent), tuple(nodes.frame), tuple(nodes.own), frozenset(nodes.sampled),
        merged, share,
    )  # fmt: skip


def _shares(tree: StackTree) -> list[float]:
    """By node, its largest share of its root over all measures."""
    root = list(range(len(tree.parent)))
    for node, parent in enumerate(tree.parent):
        root[node] = node if parent < 0 else root[parent]
    shares = [0.0] * len(tree.parent)
    for measure in range(len(tree.own)):
        totals = tree.totals(measure)
        for node, total in enumerate(totals):
            if total:
                shares[node] = max(shares[node], total / totals[root[node]])
    return shares


def _cut(tree: StackTree, stacks: dict[int, int], shares: Sequence[float], share: float) -> StackTree:
    """The tree with each parent's branches below ``share`` as one node of kind ``smaller``."""
    frames: dict[tuple[str, str], int] = {}  # those that are left
    nodes = _Nodes(len(tree.own))
    to = [-1] * len(tree.parent)
    merged: dict[int, int] = {}
    for node, parent in enumerate(tree.parent):
        if parent < 0:
            to[node] = len(nodes.parent)
            nodes.parent.append(-1)
            nodes.frame.append(-1)
        elif shares[node] >= share and to[parent] not in merged:
            to[node] = nodes.child(to[parent], frames.setdefault(tree.frames[tree.frame[node]], len(frames)))
        else:
            smaller = frames.setdefault(SMALLER, len(frames))
            to[node] = to[parent] if to[parent] in merged else nodes.child(to[parent], smaller)
            merged.setdefault(to[node], 0)
        if count := stacks.get(node):
            nodes.add(to[node], [own.get(node, 0) for own in tree.own], node in tree.sampled, count)
            if to[node] in merged:
                merged[to[node]] += count
    return _tree(tree.roots, frames, nodes, merged, share)

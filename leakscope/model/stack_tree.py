"""Stacks as a prefix tree with amounts: what icicle and flame graphs are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FRAME_KINDS = ("python", "native", "cuda", "kernel", "range", "memory", "smaller", "unknown")
"""What a frame is. ``cuda``: a function of the CUDA runtime or driver. ``range``: no frame but the NVTX range around
the stack. ``memory``: no frame but what was allocated. ``smaller``: stands for all branches that were cut there."""


@dataclass(frozen=True)
class WeighedStack:
    """One stack with amounts. ``root``: what it is drawn under, such as a layer; amounts of two roots are never added
    by whoever builds a tree. ``frames``: (text, one of FRAME_KINDS), outermost first."""

    root: tuple[str, ...]
    frames: tuple[tuple[str, str], ...]
    amounts: tuple[float, ...]  # not negative, one a measure
    sampled: bool = False  # the amounts are estimates


@dataclass(frozen=True)
class StackTree:
    """A prefix tree. A node's number is its place in ``parent``; a parent comes before its children, and the nodes of
    the roots come first, in the order of ``roots``.

    ``own[m]``: node → what ends there by measure m, without what is below; nodes with 0 are left out. ``merged``: nodes
    of kind ``smaller`` → how many stacks were cut there. ``share``: a branch is in the tree whole if it has at least
    this share of its root in some measure.
    """

    roots: tuple[tuple[str, ...], ...]
    frames: tuple[tuple[str, str], ...]
    parent: tuple[int, ...]  # -1 of roots
    frame: tuple[int, ...]  # index into frames; -1 of roots
    own: tuple[Mapping[int, float], ...]
    sampled: frozenset[int] = frozenset()  # nodes at which estimates end
    merged: Mapping[int, int] | None = None
    share: float = 0.0

    def totals(self, measure: int) -> list[float]:
        """By node, what ends there or below."""
        sums = [0.0] * len(self.parent)
        for node, amount in self.own[measure].items():
            sums[node] += amount
        for node in range(len(self.parent) - 1, -1, -1):
            if self.parent[node] >= 0:
                sums[self.parent[node]] += sums[node]
        return sums

"""A liveness graph in few rows: what a picture of it can hold, whatever its size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeNode:
    """A node of the dominator tree: who alone could let go what is below it.

    ``others`` above 0: this stands for so many nodes of the same parent that are not drawn, the figures being theirs
    together; ``node`` is -1 then, and ``kind``, ``name`` and ``cls`` are empty.
    """

    id: int  # in this tree
    parent: int  # id of the parent, -1 for the root
    node: int  # in the graph
    kind: str
    name: str
    cls: str
    objects: int  # its own
    bytes: int  # its own
    retained_objects: int
    retained_bytes: int
    others: int = 0


@dataclass(frozen=True)
class Tree:
    """The part of the dominator tree that retains most. ``nodes``: parents before their children, the root first.

    ``drawn`` of ``total`` nodes stand in it by themselves. ``by``: bytes, or objects where no sizes are known.
    """

    nodes: tuple[TreeNode, ...]
    drawn: int
    total: int
    by: str


@dataclass(frozen=True)
class HeldClass:
    """What one holder or cache holds of one class. What several hold counts with each of them.

    ``others`` above 0: so many further holders together.
    """

    kind: str
    name: str
    cls: str
    objects: int
    bytes: int
    others: int = 0


@dataclass(frozen=True)
class IdleTime:
    """Objects whose last use lies at least ``from_s`` and less than ``to_s`` (None: no bound) before the end of their
    source; ``from_s`` None: no use of them was seen. ``approximate``: objects among them that may have been used
    later."""

    from_s: float | None
    to_s: float | None
    objects: int
    bytes: int
    approximate: int = 0


@dataclass(frozen=True)
class Overview:
    """What there is to draw of a graph."""

    tree: Tree
    held: tuple[HeldClass, ...]
    idle: tuple[IdleTime, ...]

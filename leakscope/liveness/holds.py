"""Holds on cache objects: which release gives up which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from leakscope.liveness.rows import CacheRows, Int32
from leakscope.model.words import CACHE_OPS

if TYPE_CHECKING:
    from leakscope.liveness.lives import Lives

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

OPEN_ROW = int(np.iinfo(np.int32).max)
"""The end of what has not ended."""
KINDS = ("pin", "ref", "view", "inferred")


class Holds(NamedTuple):
    """One row a hold; equally long arrays. ``kind`` indexes KINDS. ``view``: the life of the view through which a base
    is held, -1 = none. ``given_up``: by a release, not by the end of its object."""

    kind: npt.NDArray[np.int8]
    life: Int32
    owner: Int32  # -1 = not said
    from_row: Int32
    until_row: Int32  # OPEN_ROW = not given up
    view: Int32
    given_up: Bool
    stack: Int32  # of who took it, 0 = not known

    def take(self, rows: npt.NDArray[Any]) -> Holds:
        """Some of them, by rows or mask."""
        return Holds(*(column[rows] for column in self))

    @classmethod
    def made(cls, kind: str, life: Int32, owner: Any, from_row: Int32, until_row: Any, view: Any = -1) -> Holds:
        """Holds of one kind; arguments are arrays or one value for all."""
        count = len(life)

        def column(values: Any) -> Int32:
            return np.broadcast_to(np.asarray(values, np.int32), (count,))

        code = np.broadcast_to(np.int8(KINDS.index(kind)), (count,))
        until = column(until_row)
        return cls(code, life, column(owner), from_row, until, column(view), until != OPEN_ROW, column(0))

    @classmethod
    def together(cls, parts: Sequence[Holds]) -> Holds:
        """All of ``parts``, in their order."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def ending_with(self, died_row: Int32) -> Holds:
        """None lasts longer than its object."""
        end = died_row[self.life]
        pin_or_ref = self.kind < KINDS.index("view")
        return self._replace(
            until_row=np.minimum(self.until_row, end), given_up=self.given_up & ~(pin_or_ref & (self.until_row >= end))
        )


def held(kind: str, give: str, of: CacheRows, rows: Int32, life: Int32, op: npt.NDArray[np.int8]) -> Holds:
    """Holds of one kind, which op ``give`` gives up; ``rows`` in the order of lives, ``op`` of each."""
    chosen = np.flatnonzero((op == CACHE_OPS.index(kind)) | (op == CACHE_OPS.index(give)))
    rows, life, takes = rows[chosen], life[chosen], op[chosen] == CACHE_OPS.index(kind)
    key = life.astype(np.int64)
    if of.hold.strides != (0,):
        number = np.unique(of.hold[rows], return_inverse=True)[1]
        pairs = key * (int(number.max(initial=0)) + 1) + number
        key = np.unique(pairs, return_inverse=True)[1].astype(np.int64)  # below the number of rows: room for owners
    owners = len(of.owners) + 1
    matched = matches(key * owners + of.owner[rows] + 1, rows, takes, strict=True)
    if matched is None:
        matched = matches(key, rows, takes)
    assert matched is not None
    taken, until = matched
    return Holds.made(kind, life[taken], of.owner[rows[taken]], rows[taken], until)


def matches(key: Int64, rows: Int32, takes: Bool, strict: bool = False) -> tuple[Int64, Int32] | None:
    """(places that take, rows that give each of them up or OPEN_ROW), last in, first out by key.

    A release that finds nothing taken is of a hold from before the first event: it is left out; where ``strict``, None
    is returned instead.
    """
    order = np.lexsort((rows, key))
    key, row, take = key[order], rows[order], takes[order]
    count = len(key)
    if not count:
        return order, rows
    first = np.diff(key, prepend=key[0] - 1) != 0
    group = np.cumsum(first) - 1
    total = np.cumsum(np.where(take, 1, -1))
    before = (total - np.where(take, 1, -1))[first]
    depth = total - before[group]
    # The deepest debt so far, by group: groups are set apart by more than any debt.
    apart = group * (2 * count + 2)
    debt = np.minimum(np.minimum.accumulate(depth - apart) + apart, 0)
    known = np.append(0, debt[:-1])
    known[first] = 0
    unmatched = ~take & (debt < known)
    if strict and unmatched.any():
        return None
    level = np.where(take, depth - debt, depth - debt + 1)
    keep = np.flatnonzero(~unmatched)
    again = keep[np.lexsort((level[keep], group[keep]))]  # stable: rows stay in order
    same = (group[again][1:] == group[again][:-1]) & (level[again][1:] == level[again][:-1])
    taken = take[again]
    given_up = np.append(same & ~taken[1:], False) & taken
    until = np.full(len(again), OPEN_ROW, np.int32)
    until[given_up] = row[again][np.flatnonzero(given_up) + 1]
    return order[again[taken]], until[taken]


def view_holds(lives: Lives) -> tuple[Holds, Holds]:
    """A view is held by who made it; and so is its base, through the view, as long as both are live."""
    views = np.flatnonzero(lives.is_view).astype(np.int32)
    owner, born, ends = lives.owner[views], lives.born_row[views], lives.died_row[views]
    own = Holds.made("view", views, owner, born, ends)
    if not len(views):
        return own, own
    order = np.lexsort((lives.born_row, lives.object)).astype(np.int32)
    span = int(lives.born_row.max()) + 2
    place = lives.object[order].astype(np.int64) * span + lives.born_row[order]
    base = lives.base[views]
    at = np.searchsorted(place, base.astype(np.int64) * span + born, "right") - 1
    life = order[np.maximum(at, 0)]
    hit = (base >= 0) & (at >= 0) & (lives.object[life] == base)
    return own, Holds.made("view", life[hit], owner[hit], born[hit], ends[hit], views[hit])

"""Blocks of a KV cache that somebody still holds, told from the engine's events alone, and from its idle usage.

Engines evict in the order in which blocks were let go. A block that nobody holds has fewer than the whole pool ahead
of it in the queue, and each eviction takes one from ahead: after as many evictions as the pool has blocks it must be
gone, unless it was used again. So a block that is still there then is held, or was used in a way that leaves no
event: a request whose whole prompt is cached and that fills no new block. That is why the second test counts:
with no request running and none waiting, no block may be held, whatever the events say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.model.manifest import Source

if TYPE_CHECKING:
    import duckdb

IntArray = npt.NDArray[np.int64]

GPU = "GPU"
HOLDER = "requests that were never freed (inferred)"
UNKNOWN_POOL_MARGIN = 1.25
"""A pool of unknown size is taken to be so much larger than the most blocks that were cached at once: blocks in use
that are not full yet are in the pool, but not in the events."""


@dataclass(frozen=True)
class Pool:
    """What the events of one pool say at their end. All counts are of blocks.

    ``size`` is that of the pool, usable blocks; ``estimated`` where only its content is known. ``evictions`` are those
    since the events are whole: since the last gap, restart or clearing. ``held`` are names, prefixes first.
    ``holders`` is the least number of requests that can hold them: prefixes that no other held block continues.
    """

    medium: str
    size: int
    estimated: bool
    evictions: int
    cached: int
    held: tuple[str, ...]
    holders: int
    held_since_ns: int
    start_ns: int
    end_ns: int
    gaps: int

    @property
    def turnover(self) -> float:
        """How many times the pool was turned over; from 1 on, ``held`` says all that there is to say."""
        return self.evictions / self.size if self.size else 0.0


def pools_of(con: duckdb.DuckDBPyConnection, source: Source, pool_blocks: int | None = None) -> list[Pool]:
    """The GPU pools of one source, one a publisher. ``pool_blocks``: usable blocks of each, None where unknown.

    Other media (host memory, disks) are left out: engines do not say how large they are.
    """
    rows = con.execute(
        "SELECT ts_ns, op::VARCHAR AS op, object, parent, medium::VARCHAR AS medium FROM cache_events "
        "WHERE source_id = $source AND (medium = $gpu OR starts_with(medium, $gpu || ':') "
        "OR (medium = '' AND op IN ('gap', 'clear'))) ORDER BY ts_ns",
        {"source": source.id, "gpu": GPU},
    ).df()
    everywhere = rows[(rows["medium"] == "") & rows["op"].isin(("gap", "clear"))]
    media = [m for m in rows["medium"].unique() if m == GPU or m.startswith(f"{GPU}:")]
    pools = []
    for medium in media:
        of_pool = rows[rows["medium"] == medium]
        if len(everywhere):
            of_pool = pd.concat([of_pool, everywhere]).sort_values("ts_ns", kind="stable")
        pools.append(
            pool_of(of_pool.reset_index(drop=True), medium, pool_blocks, source.facts.get("windowed_groups", ()))
        )
    return pools


def inferred_holds(con: duckdb.DuckDBPyConnection, source: Source) -> tuple[str, list[str]] | None:
    """(who holds, names of the blocks that are held) of a source of KV events, None for one of another kind.

    Nothing is held that a pool's turnover is too short to tell.
    """
    if source.kind != "kv_events":
        return None
    pools = pools_of(con, source, source.facts.get("pool_blocks"))
    return HOLDER, [name for pool in pools for name in pool.held]


def pool_of(
    events: pd.DataFrame, medium: str = GPU, pool_blocks: int | None = None, windowed: Sequence[int] = ()
) -> Pool:
    """One pool: rows of ts_ns, op (insert, evict, clear, gap), object and parent in the order of the events.

    ``windowed``: groups of the KV cache in which who holds a block need not hold its prefix.
    """
    breaks = np.flatnonzero(events["op"].isin(("clear", "gap")))
    size = pool_blocks or _least_size(events)
    whole = events.iloc[breaks[-1] + 1 :] if len(breaks) else events
    whole = whole[whole["op"].isin(("insert", "evict"))]
    inserted = (whole["op"] == "insert").to_numpy()
    evictions = int((~inserted).sum())
    lives = _Lives(whole, inserted)
    cached = lives.cached()
    held = cached & (evictions - lives.marks() >= size)
    held |= lives.above(held & ~_in_groups(whole["object"].iloc[lives.row_of], windowed)) & cached
    rows = whole.iloc[lives.row_of[held]].sort_values("ts_ns")
    start_ns = int(whole["ts_ns"].iloc[0]) if len(whole) else 0
    return Pool(
        medium=medium,
        size=size,
        estimated=not pool_blocks,
        evictions=evictions,
        cached=int(cached.sum()),
        held=tuple(rows["object"]),
        holders=int(held.sum() - len(np.unique(lives.parent[held & (lives.parent >= 0)]))) if held.any() else 0,
        held_since_ns=int(rows["ts_ns"].iloc[0]) if len(rows) else 0,
        start_ns=start_ns,
        end_ns=int(whole["ts_ns"].iloc[-1]) if len(whole) else 0,
        gaps=int((events["op"] == "gap").sum()),
    )


def _in_groups(names: pd.Series, groups: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which blocks are of one of ``groups``; ``gN/`` stands before the hash, of group 0 nothing."""
    if not groups:
        return np.zeros(len(names), bool)
    number = names.str.extract(r"(?:^|/)g(\d+)/[^/]*$", expand=False).fillna("0").astype(np.int64)
    return number.isin(list(groups)).to_numpy()


def _least_size(events: pd.DataFrame) -> int:
    """Of a pool of unknown size: what it held at most, and a margin."""
    op = events["op"]
    stretch = op.isin(("clear", "gap")).cumsum()
    change = np.where(op == "insert", 1, np.where(op == "evict", -1, 0))
    peak = pd.Series(change).groupby(stretch.to_numpy()).cumsum().max() if len(events) else 0
    return int(np.ceil(UNKNOWN_POOL_MARGIN * max(int(peak), 1)))


class _Lives:
    """Lives of blocks, numbered in the order of their beginnings: from an insert to the eviction or the end.

    ``row_of``: the row of its first insert. ``parent``: the life of the block before it in its prefix that was there
    at the time, -1 where none was. ``ended``: whether it was evicted.
    """

    def __init__(self, events: pd.DataFrame, inserted: npt.NDArray[np.bool_]) -> None:
        rows = len(events)
        codes, names = pd.factorize(events["object"].to_numpy(object))
        order = np.argsort(codes, kind="stable").astype(np.int64)
        of, is_insert = codes[order], inserted[order]
        there = np.zeros(rows, bool)  # whether the block is there before the row
        there[1:] = (of[1:] == of[:-1]) & is_insert[:-1]
        begins = is_insert & ~there
        self.row_of = np.sort(order[begins])
        number = np.full(rows, -1, np.int64)
        number[self.row_of] = np.arange(len(self.row_of))
        # Rows of one block in their order: a life goes on with each further insert and ends with an eviction.
        life = pd.Series(number[order]).mask(~begins).groupby(of).ffill().fillna(-1).to_numpy(np.int64).copy()
        life[~is_insert & ~there] = -1
        self._life = np.full(rows, -1, np.int64)  # by row of the events
        self._life[order] = life
        self.ended = np.zeros(len(self.row_of), bool)
        closing = self._life[~inserted]
        self.ended[closing[closing >= 0]] = True
        self._inserted = inserted
        self._removed = np.cumsum(~inserted)
        self._parents(events, pd.Index(names), of * max(rows, 1) + order, life, is_insert)

    def _parents(
        self, events: pd.DataFrame, names: pd.Index, keys: IntArray, life: IntArray, is_insert: npt.NDArray[np.bool_]
    ) -> None:
        """Each insert's parent: the life that its parent's name had at that row, if any."""
        rows = len(events)
        wanted = np.flatnonzero(self._inserted)
        parents = names.get_indexer(pd.Index(events["parent"].to_numpy(object)[wanted]))
        at = np.searchsorted(keys, parents * rows + wanted) - 1
        found = (parents >= 0) & (at >= 0) & (keys[at] // max(rows, 1) == parents)
        found &= is_insert[at]
        self._touching = self._life[wanted]
        self._touched = np.where(found, life[at], -1)
        self.parent = np.full(len(self.row_of), -1, np.int64)
        first = np.isin(wanted, self.row_of)
        self.parent[self._touching[first]] = self._touched[first]

    def cached(self) -> npt.NDArray[np.bool_]:
        """Lives that have not ended."""
        return ~self.ended

    def marks(self) -> IntArray:
        """By life: evictions seen when it was last known to be in use, by its own inserts or those that continue it."""
        mark = np.zeros(len(self.row_of), np.int64)
        own = np.flatnonzero(self._inserted)
        np.maximum.at(mark, self._life[own], self._removed[own])
        linked = self._touched >= 0
        np.maximum.at(mark, self._touched[linked], self._removed[own][linked])
        for level in self._levels():
            np.maximum.at(mark, self.parent[level], mark[level])
        return mark

    def above(self, held: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """``held`` and all lives that they continue: whoever holds a block holds its whole prefix."""
        held = held.copy()
        for level in self._levels():
            np.logical_or.at(held, self.parent[level], held[level])
        return held

    def _levels(self) -> list[IntArray]:
        """Lives that have a parent, those with the most ancestors first, in groups of as many."""
        depth = (self.parent >= 0).astype(np.int64)
        pointer = self.parent.copy()
        while (pointer >= 0).any():  # twice as far in each round
            up = pointer >= 0
            step = pointer[up]
            depth[up] += depth[step]
            pointer[up] = pointer[step]
        order = np.argsort(-depth, kind="stable")
        order = order[depth[order] > 0]
        return np.split(order, np.flatnonzero(np.diff(depth[order])) + 1) if len(order) else []

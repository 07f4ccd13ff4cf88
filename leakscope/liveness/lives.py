"""The lives of cache objects and of the holds on them, out of ``cache_events``.

Holds (pins, references, views) are matched by their number where the source gives one, else last in, first out: one
that is given up is the youngest of its object, or of its object and owner where every release names an owner that
holds; so one that is never given up stays with who took it. A view is held by who made it until it is evicted, and
holds its base as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from leakscope.liveness.holds import OPEN_ROW, Holds, held, view_holds
from leakscope.liveness.rows import CacheRows, Int32, Int64
from leakscope.model.words import CACHE_OPS

Bool = npt.NDArray[np.bool_]

NOT_INVALID = np.iinfo(np.int64).max
HOLDS = {"pin": "unpin", "ref": "unref"}
STARTS = ("insert", "view")
"""Begin a life, also of an object that is live: the new one takes its place."""
SHOWS_LIFE = ("insert", "view", "state", "pin", "ref", "access")
"""Begin a life where the object is not live: its insertion was not seen."""
USES = ("insert", "view", "pin", "ref", "access")


def _among(*ops: str) -> Bool:
    """By code of an op: whether it is one of these. The last entry is for -1, no known op."""
    return np.array([op in ops for op in CACHE_OPS] + [False])


class Lives(NamedTuple):
    """One row a life, those of an object in order; equally long arrays.

    ``object``, ``base`` and ``parent`` index the names, -1 = none; ``born_row`` and ``died_row`` the rows (OPEN_ROW =
    live); ``owner``, ``medium``, ``generation`` the words of their name. ``expires_ns``: 0 = not said, NEVER;
    ``invalid_ns``: when its generation was invalidated, NOT_INVALID.
    """

    object: Int32
    born_row: Int32
    died_row: Int32
    size_bytes: Int64
    base: Int32
    parent: Int32
    owner: Int32
    medium: Int32
    generation: Int32
    expires_ns: Int64
    invalid_ns: Int64
    is_view: Bool
    stack: Int32


@dataclass(frozen=True)
class CacheLives:
    """All lives of the objects of one source. ``uses``, ``last_access``, ``counts`` and ``accesses`` are
    :class:`Latest`."""

    names: pa.Array
    owners: pa.Array
    media: pa.Array
    ts_ns: Int64  # of all rows, in order
    lives: Lives
    holds: Holds
    uses: Latest  # by life
    last_access: Latest  # by life; values of last_access_ns
    counts: Latest  # by life; values of refcount
    accesses: Latest  # by (life, owner), as life * (len(owners) + 1) + owner + 1
    gap_rows: Int64
    evictions: pd.DataFrame  # owner, objects, bytes of lives that were evicted
    failed_inserts: int
    counts_holds: bool  # the source tells who holds: else what nobody seems to hold is not known to be free

    def row_at(self, ts_ns: int) -> int:
        """The last row up to a time, -1 for none."""
        return int(np.searchsorted(self.ts_ns, ts_ns, "right")) - 1

    def alive(self, ts_ns: int) -> Int64:
        """Lives that are live at a time."""
        row = self.row_at(ts_ns)
        return np.flatnonzero((self.lives.born_row <= row) & (self.lives.died_row > row))


MAX_PLACE = 2**62


class Latest:
    """Looks up the last row of a key up to a row."""

    def __init__(
        self, keys: npt.NDArray[Any], rows: npt.NDArray[Any], span: int, values: npt.NDArray[Any] | None = None
    ) -> None:
        """``rows`` (< ``span``) of each key (0 or more), with a value each if there are any."""
        self._span = span
        # Keys of many lives and owners are too large to be multiplied: their numbers are not.
        self._known = np.unique(keys) if len(keys) and int(keys.max()) >= MAX_PLACE // span else None
        self._place = self._numbers(keys) * span
        self._place += rows
        self._values = values
        if (self._place[1:] < self._place[:-1]).any():
            order = np.argsort(self._place, kind="stable")
            self._place = self._place[order]
            self._values = None if values is None else values[order]

    def __len__(self) -> int:
        return len(self._place)

    def _numbers(self, keys: npt.NDArray[Any]) -> Int64:
        """The keys, or their numbers among those that are known, negative for others."""
        if self._known is None:
            return keys.astype(np.int64)
        at = np.minimum(np.searchsorted(self._known, keys), len(self._known) - 1)
        return np.where(self._known[at] == keys, at, -1)

    def find(self, keys: npt.NDArray[Any], row: int) -> tuple[Int64, npt.NDArray[Any]]:
        """(the last row of each key up to ``row``, -1 for none; its value, 0 where there are none)."""
        if not len(self._place):
            return np.full(len(keys), -1, np.int64), np.zeros(len(keys))
        first = self._numbers(keys) * self._span
        at = np.maximum(np.searchsorted(self._place, first + row, "right") - 1, 0)
        found = self._place[at] - first
        values = np.zeros(len(keys)) if self._values is None else self._values[at]
        return np.where((first >= 0) & (found >= 0) & (found <= row), found, -1), values


def cache_lives(of: CacheRows) -> CacheLives:
    """The lives in the rows of one source."""
    spoken = of.object >= 0
    spoken &= ~_among("insert_fail", "clear", "invalidate", "gap")[of.op]
    named = np.flatnonzero(spoken).astype(np.int32)
    epoch, clears = _epochs(of, named)
    key = of.object[named]
    if epoch is not None:
        pairs = key.astype(np.int64) * (int(epoch.max(initial=0)) + 1) + epoch
        key = np.unique(pairs, return_inverse=True)[1].astype(np.int32)
    # Sorting numbers that hold both takes a third of the time and memory of an argsort.
    both = (key.astype(np.int64) << 32) | named
    both.sort()
    rows, key = (both & 0xFFFFFFFF).astype(np.int32), (both >> 32).astype(np.int32)
    del both, named
    op = of.op[rows]
    life, born = _numbered(key, op)
    lives = int(born.sum())
    births = rows[born]
    objects = of.object[births]
    died = np.full(lives, OPEN_ROW, np.int32)
    ended = np.flatnonzero((op == CACHE_OPS.index("evict")) & (life >= 0))[::-1]  # the first of a life wins
    died[life[ended]] = rows[ended]
    of_birth = key[born]
    replaced = np.flatnonzero(of_birth[1:] == of_birth[:-1])
    died[replaced] = np.minimum(died[replaced], births[replaced + 1])
    if clears:
        died = np.minimum(died, _cleared(of, objects, births, clears))
    chosen = np.flatnonzero(life >= 0)
    rows, life, op = rows[chosen], life[chosen], op[chosen]
    chosen = np.flatnonzero(rows <= died[life])  # releases that come after the end say nothing more
    rows, life, op = rows[chosen], life[chosen], op[chosen]
    del chosen, key
    size = _sizes(of, rows, life, objects, lives)
    found = Lives(
        object=objects,
        born_row=births,
        died_row=died,
        size_bytes=size,
        base=_last(of.base, rows, life, lives, -1),
        parent=_last(of.parent, rows, life, lives, -1),
        owner=of.owner[births],
        medium=_last(of.medium, rows, life, lives, -1),
        generation=_last(of.generation, rows, life, lives, -1),
        expires_ns=_last(of.expires_ns, rows, life, lives, 0),
        invalid_ns=np.broadcast_to(np.int64(NOT_INVALID), (lives,)),
        is_view=of.op[births] == CACHE_OPS.index("view"),
        stack=of.user_stack[births],
    )
    found = found._replace(invalid_ns=_invalidated(of, found))
    taken = [held(kind, give, of, rows, life, op) for kind, give in HOLDS.items()]
    holds = Holds.together([*taken, *view_holds(found)]).ending_with(died)
    holds = holds._replace(stack=of.user_stack[holds.from_row])
    span = len(of) + 1
    use = _among(*USES)[op]
    told = of.last_access_ns[rows] > 0
    counted = ~np.isnan(of.refcount[rows])
    hit = op == CACHE_OPS.index("access")
    evicted = np.flatnonzero(
        (died != OPEN_ROW) & (of.op[np.where(died == OPEN_ROW, 0, died)] == CACHE_OPS.index("evict"))
    )
    evictions = pd.DataFrame({"owner": of.owner[died[evicted]], "size": size[evicted]})
    return CacheLives(
        of.names,
        of.owners,
        of.media,
        of.ts_ns,
        found,
        holds,
        Latest(life[use], rows[use], span),
        Latest(life[told], rows[told], span, of.last_access_ns[rows[told]]),
        Latest(life[counted], rows[counted], span, of.refcount[rows[counted]]),
        Latest(life[hit].astype(np.int64) * (len(of.owners) + 1) + of.owner[rows[hit]] + 1, rows[hit], span),
        np.flatnonzero(of.op == CACHE_OPS.index("gap")),
        evictions.groupby("owner")["size"].agg(objects="count", bytes="sum").reset_index(),
        int((of.op == CACHE_OPS.index("insert_fail")).sum()),
        bool(_among(*HOLDS, *HOLDS.values(), "view")[of.op].any()),
    )


def with_inferred(of: CacheLives, owner: str, objects: Sequence[str]) -> CacheLives:
    """``of`` with holds of kind ``inferred`` by ``owner`` on what is live of ``objects``: known to be held since their
    birth by another way than events of holds, by how many is not."""
    wanted = pc.index_in(pa.array(list(objects), pa.string()), value_set=of.names).drop_null().to_numpy()
    lives = np.flatnonzero(np.isin(of.lives.object, wanted) & (of.lives.died_row == OPEN_ROW)).astype(np.int32)
    more = Holds.made("inferred", lives, len(of.owners), of.lives.born_row[lives], OPEN_ROW)
    owners = pa.concat_arrays([of.owners, pa.array([owner], of.owners.type)])
    return replace(of, owners=owners, holds=Holds.together([of.holds, more]))


def _numbered(key: Int32, op: npt.NDArray[np.int8]) -> tuple[Int32, Bool]:
    """(the life of each row, -1 before the first of its object; which rows begin one). Rows by key, in order."""
    place = np.arange(len(key), dtype=np.int32)
    starts = np.where(np.diff(key, prepend=np.int32(-1)) != 0, place, np.int32(0))
    first = np.maximum.accumulate(starts) if len(key) else place
    shows = _among(*SHOWS_LIFE)[op]
    said = np.where(shows | (op == CACHE_OPS.index("evict")), place, np.int32(-1))
    said = np.maximum.accumulate(said) if len(key) else said
    before = np.append(np.int32(-1), said[:-1])[: len(key)]
    alive_before = (before >= first) & shows[np.maximum(before, 0)]
    born = _among(*STARTS)[op] | (shows & ~alive_before)
    last_birth = np.where(born, place, np.int32(-1))
    last_birth = np.maximum.accumulate(last_birth) if len(key) else last_birth
    life = np.where(last_birth >= first, np.cumsum(born, dtype=np.int32) - 1, np.int32(-1))
    return life, born


def _media_of(of: CacheRows) -> Int32:
    """The last medium of each object that is said, -1 for none."""
    found = np.full(len(of.names), -1, np.int32)
    said = np.flatnonzero((of.medium >= 0) & (of.object >= 0))
    found[of.object[said]] = of.medium[said]
    return found


def _epochs(of: CacheRows, named: Int32) -> tuple[Int64 | None, dict[int, Int64]]:
    """(how often the medium of each of the rows ``named`` was cleared before it, None where nothing ever was; the rows
    that clear each medium)."""
    clears = np.flatnonzero(of.op == CACHE_OPS.index("clear"))
    if not len(clears):
        return None, {}
    cleared = of.medium[clears]
    ends = {medium: clears[(cleared == medium) | (cleared == -1)] for medium in range(-1, len(of.media))}
    medium_of = _media_of(of)[of.object[named]]
    epoch = np.zeros(len(named), np.int64)
    for medium, at in ends.items():
        here = medium_of == medium
        epoch[here] = np.searchsorted(at, named[here])
    return epoch, ends


def _cleared(of: CacheRows, objects: Int32, births: Int32, clears: dict[int, Int64]) -> Int32:
    """The row that clears the medium of each life, OPEN_ROW for none."""
    found = np.full(len(objects), OPEN_ROW, np.int32)
    medium_of = _media_of(of)[objects]
    for medium, at in clears.items():
        here = np.flatnonzero(medium_of == medium)
        next_ = np.searchsorted(at, births[here])
        here, next_ = here[next_ < len(at)], next_[next_ < len(at)]
        found[here] = at[next_]
    return found


def _last(values: npt.NDArray[Any], rows: Int32, life: Int32, lives: int, none: int) -> npt.NDArray[Any]:
    """The last value of each life that is not ``none``."""
    if values.strides == (0,) and len(values) and values[0] == none:
        return np.broadcast_to(values[:1], (lives,))
    chosen = np.flatnonzero(values[rows] != none)
    found = np.full(lives, none, values.dtype)
    found[life[chosen]] = values[rows[chosen]]  # of repeated indices the last one stays
    return found


def _sizes(of: CacheRows, rows: Int32, life: Int32, objects: Int32, lives: int) -> Int64:
    """The largest size that is said in a life, else in all lives of the object."""
    said = np.flatnonzero(of.size_bytes[rows] > 0)
    size = np.zeros(lives, np.int64)
    np.maximum.at(size, life[said], of.size_bytes[rows[said]])
    missing = np.flatnonzero(size == 0)
    if len(missing) and len(said):
        of_object = np.zeros(len(of.names), np.int64)
        np.maximum.at(of_object, objects, size)
        size[missing] = of_object[objects[missing]]
    return size


def _invalidated(of: CacheRows, lives: Lives) -> Int64:
    """When the generation of each life was first invalidated after its birth; NOT_INVALID = never."""
    at = np.flatnonzero((of.op == CACHE_OPS.index("invalidate")) & (of.generation >= 0))
    if not len(at):
        return lives.invalid_ns
    span = len(of) + 1
    place = np.sort(of.generation[at].astype(np.int64) * span + at)
    from_ = lives.generation.astype(np.int64) * span + lives.born_row
    next_ = np.minimum(np.searchsorted(place, from_), len(place) - 1)
    hit = (place[next_] >= from_) & (place[next_] // span == lives.generation)
    found = np.full(len(lives.object), NOT_INVALID)
    found[hit] = of.ts_ns[place[next_[hit]] % span]
    return found

"""The lives of cache objects and of the holds on them, out of ``cache_events``.

Holds (pins, references, views) are matched by their number where the source gives one, else last in, first out: one
that is given up is the youngest of its object, or of its object and owner where every release names an owner that holds;
so one that is never given up stays with who took it. A view is held by who made it until it is evicted, and holds its base as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from leakscope.model.tables import CACHE_EVENTS
from leakscope.model.words import CACHE_OPS

if TYPE_CHECKING:
    import duckdb

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

OPEN = np.iinfo(np.int64).max
"""The end of what has not ended."""
HOLDS = {"pin": "unpin", "ref": "unref"}
STARTS = ("insert", "view")
"""Begin a life, also of an object that is live: the new one takes its place."""
SHOWS_LIFE = ("insert", "view", "state", "pin", "ref", "access")
"""Begin a life where the object is not live: its insertion was not seen."""
USES = ("insert", "view", "pin", "ref", "access")


@dataclass(frozen=True)
class CacheLives:
    """All lives of the objects of one source.

    ``lives``: one row a life, in the order of objects: object (index into ``names``), born_row, died_row (rows of
    ``ts_ns``, OPEN = live), born_ns, died_ns (OPEN), size_bytes, base and parent (objects, -1 = none), owner (index
    into ``owners``), medium, generation (text), expires_ns (0 = not said, NEVER), invalid_ns (OPEN), is_view, stack.
    ``holds``: one row a hold: life, kind (pin, ref, view), owner, from_row, until_row, from_ns, until_ns (OPEN), stack,
    view (the life through which a base is held, -1 = none). ``uses``, ``counts`` and ``accesses`` are :class:`Latest`.
    """

    names: pa.Array
    owners: pa.Array
    ts_ns: Int64  # of all rows, in order
    lives: pd.DataFrame
    holds: pd.DataFrame
    uses: Latest  # by life
    last_access: Latest  # by life; values of last_access_ns
    counts: Latest  # by life; values of refcount
    accesses: Latest  # by (life, owner), as life * len(owners) + owner; owner '' stands for everybody
    gap_rows: Int64
    evictions: pd.DataFrame  # owner, objects, bytes of lives that were evicted
    failed_inserts: int
    counts_holds: bool  # the source tells who holds: else what nobody seems to hold is not known to be free

    def row_at(self, ts_ns: int) -> int:
        """The last row up to a time, -1 for none."""
        return int(np.searchsorted(self.ts_ns, ts_ns, "right")) - 1

    def alive(self, ts_ns: int) -> Int64:
        """Lives (rows of ``lives``) that are live at a time."""
        row = self.row_at(ts_ns)
        born, died = self.lives["born_row"].to_numpy(), self.lives["died_row"].to_numpy()
        return np.flatnonzero((born <= row) & (died > row))


class Latest:
    """Looks up the last row of a key up to a row."""

    def __init__(self, keys: Int64, rows: Int64, span: int, values: npt.NDArray[np.generic] | None = None) -> None:
        """``rows`` (< ``span``) of each key, with a value each if there are any."""
        self._span = span
        place = keys * span + rows
        order = np.argsort(place, kind="stable")
        self._place, self._keys, self._rows = place[order], keys[order], rows[order]
        self._values = None if values is None else values[order]

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: Int64, row: int) -> tuple[Int64, npt.NDArray[np.generic] | None]:
        """(the last row of each key up to ``row``, -1 for none; its value)."""
        if not len(self._keys):
            return np.full(len(keys), -1, np.int64), self._values
        at = np.searchsorted(self._place, keys * self._span + row, "right") - 1
        at = np.maximum(at, 0)
        hit = (self._keys[at] == keys) & (self._rows[at] <= row)
        return np.where(hit, self._rows[at], -1), None if self._values is None else self._values[at]


def cache_events(con: duckdb.DuckDBPyConnection, source_id: int) -> pa.Table:
    """The rows of one source in ``cache_events``, in time order."""
    con.execute("SELECT 1").fetchall()  # ends a result that another query has left half read: sql() refuses it
    return con.sql(f"SELECT * FROM cache_events WHERE source_id = {int(source_id)} ORDER BY ts_ns").to_arrow_table()


def cache_lives(events: pa.Table) -> CacheLives:
    """The lives in ``events``: rows of one source in the columns of ``cache_events``, in time order; columns beyond
    ts_ns, op and object may be missing."""
    table = _whole(events)
    ts_ns = table["ts_ns"].to_numpy()
    span = len(ts_ns) + 1
    op = _coded(table["op"], pa.array(CACHE_OPS))
    is_op = {name: op == code for code, name in enumerate(CACHE_OPS)}
    names = _different(pa.chunked_array([*table["object"].chunks, *table["base"].chunks]))
    owners = _different(table["owner"])
    owner = _coded(table["owner"], owners)
    every = _coded(table["object"], names)

    named = np.flatnonzero((every >= 0) & ~_any(is_op, "insert_fail", "clear", "invalidate", "gap"))
    epoch, ends = _epochs(table, is_op, every, named, len(names))
    key = every[named] * (int(epoch.max(initial=0)) + 1) + epoch
    order = np.argsort(key, kind="stable")
    rows, key, epoch = named[order], key[order], epoch[order]
    life, born = _numbered(key, _any(is_op, *STARTS)[rows], _any(is_op, *SHOWS_LIFE)[rows], is_op["evict"][rows])
    lives = pd.DataFrame({"object": every[rows[born]], "born_row": rows[born]})
    died = np.full(len(lives), OPEN)
    evicts = np.flatnonzero(is_op["evict"][rows] & (life >= 0))[::-1]  # the first of a life wins
    died[life[evicts]] = rows[evicts]
    replaced = np.flatnonzero(key[born][1:] == key[born][:-1])
    died[replaced] = np.minimum(died[replaced], rows[born][replaced + 1])
    lives["died_row"] = np.minimum(died, _epoch_end(ends, table, is_op, lives["object"].to_numpy(), epoch[born], every))
    known = life >= 0
    rows, life = rows[known], life[known]
    alive = rows <= lives["died_row"].to_numpy()[life]  # releases that come after the end say nothing more
    rows, life = rows[alive], life[alive]

    lives["born_ns"] = ts_ns[lives["born_row"].to_numpy()]
    lives["died_ns"] = _times(ts_ns, lives["died_row"].to_numpy())
    lives["size_bytes"] = _sizes(table, rows, life, lives, every, len(names))
    for column in ("base", "parent"):
        codes = _coded(table[column], names)
        lives[column] = _last(codes, rows, life, codes[rows] >= 0, len(lives), -1)
    births = lives["born_row"].to_numpy()
    lives["owner"] = owner[births]
    for column in ("medium", "generation"):
        words = _different(table[column])
        codes = _last(_coded(table[column], words), rows, life, None, len(lives), -1)
        lives[column] = pd.Categorical.from_codes(codes, words.to_pylist())
    expires = table["expires_ns"].to_numpy()
    lives["expires_ns"] = _last(expires, rows, life, expires[rows] != 0, len(lives), 0)
    lives["invalid_ns"] = _invalidated(table, is_op, lives, ts_ns, span)
    lives["is_view"] = is_op["view"][births]
    stack = table["user_stack"].to_numpy().astype(np.int64)
    lives["stack"] = stack[births]

    number = pd.factorize(table["hold"].to_numpy(), sort=True)[0].astype(np.int64)
    taken = [_held(kind, is_op, rows, life, owner, number) for kind in HOLDS]
    holds = pd.concat([*taken, _view_holds(lives)], ignore_index=True)
    until = np.minimum(holds["until_row"].to_numpy(np.int64), lives["died_row"].to_numpy()[holds["life"]])
    holds["until_row"] = until
    holds["from_ns"] = ts_ns[holds["from_row"].to_numpy(np.int64)]
    holds["until_ns"] = _times(ts_ns, until)
    holds["stack"] = stack[holds["from_row"].to_numpy(np.int64)]

    use = _any(is_op, *USES)[rows]
    told = table["last_access_ns"].to_numpy()[rows]
    refcount = table["refcount"].to_numpy()[rows]
    counted = ~np.isnan(refcount)
    hit = is_op["access"][rows]
    evicted = lives[lives["died_row"].isin(np.flatnonzero(is_op["evict"]))]
    by = owner[evicted["died_row"].to_numpy(np.int64)]
    return CacheLives(
        names,
        owners,
        ts_ns,
        lives,
        holds,
        Latest(life[use], rows[use], span),
        Latest(life[told > 0], rows[told > 0], span, told[told > 0]),
        Latest(life[counted], rows[counted], span, refcount[counted]),
        Latest(life[hit] * (len(owners) + 1) + owner[rows[hit]] + 1, rows[hit], span),
        np.flatnonzero(is_op["gap"]),
        evicted.assign(owner=by).groupby("owner")["size_bytes"].agg(objects="count", bytes="sum").reset_index(),
        int(is_op["insert_fail"].sum()),
        bool(_any(is_op, *HOLDS, *HOLDS.values(), "view").any()),
    )


def with_inferred(of: CacheLives, owner: str, objects: Sequence[str]) -> CacheLives:
    """``of`` with holds of kind ``inferred`` by ``owner`` on what is live of ``objects``: known to be held since their
    birth by another way than events of holds, by how many is not."""
    wanted = _coded(pa.chunked_array([pa.array(list(objects), pa.string())]), of.names)
    lives = np.flatnonzero(np.isin(of.lives["object"], wanted[wanted >= 0]) & (of.lives["died_row"] == OPEN))
    born = of.lives["born_row"].to_numpy()[lives]
    more = pd.DataFrame({"life": lives, "owner": len(of.owners), "from_row": born, "until_row": OPEN, "view": -1})
    more = more.assign(kind="inferred", from_ns=of.ts_ns[born], until_ns=OPEN, stack=0)
    owners = pa.concat_arrays([of.owners, pa.array([owner], pa.string())])
    return replace(of, owners=owners, holds=pd.concat([of.holds, more], ignore_index=True))


def _whole(events: pa.Table) -> pa.Table:
    """With all columns, text as plain text."""
    columns = {}
    for field in CACHE_EVENTS:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if field.name in events.column_names:
            columns[field.name] = events[field.name].cast(kind).combine_chunks()
        else:
            nothing = "" if pa.types.is_string(kind) else float("nan") if pa.types.is_floating(kind) else 0
            columns[field.name] = pa.repeat(pa.scalar(nothing, kind), events.num_rows)
    return pa.table(columns)


def _different(column: pa.ChunkedArray) -> pa.Array:
    """The texts of a column, without ''."""
    words = pc.unique(column)
    return words.filter(pc.not_equal(words, ""))


def _coded(column: pa.ChunkedArray, words: pa.Array) -> Int64:
    """Each text's index into ``words``, -1 for none."""
    codes = pc.index_in(column, value_set=words)
    return pc.fill_null(codes, -1).to_numpy().astype(np.int64)


def _any(is_op: dict[str, Bool], *names: str) -> Bool:
    found: Bool = np.logical_or.reduce([is_op[name] for name in names])
    return found


def _times(ts_ns: Int64, rows: Int64) -> Int64:
    return np.where(rows == OPEN, OPEN, ts_ns[np.where(rows == OPEN, 0, rows)]) if len(ts_ns) else rows


def _media(table: pa.Table, every: Int64, objects: int) -> tuple[pa.Array, Int64]:
    """(media, the last one of each object, -1 = not said)."""
    media = _different(table["medium"])
    codes = _coded(table["medium"], media)
    of_object = np.full(objects, -1, np.int64)
    said = np.flatnonzero((codes >= 0) & (every >= 0))
    of_object[every[said]] = codes[said]
    return media, of_object


def _epochs(
    table: pa.Table, is_op: dict[str, Bool], every: Int64, named: Int64, objects: int
) -> tuple[Int64, dict[int, Int64]]:
    """(how often the medium of each of the rows ``named`` was cleared before it, the rows that clear each medium)."""
    clears = np.flatnonzero(is_op["clear"])
    media, of_object = _media(table, every, objects)
    epoch = np.zeros(len(named), np.int64)
    if not len(clears):
        return epoch, {}
    cleared = _coded(table["medium"], media)[clears]
    ends = {medium: clears[(cleared == medium) | (cleared == -1)] for medium in range(-1, len(media))}
    medium_of = of_object[every[named]]
    for medium, at in ends.items():
        here = medium_of == medium
        epoch[here] = np.searchsorted(at, named[here])
    return epoch, ends


def _epoch_end(
    ends: dict[int, Int64], table: pa.Table, is_op: dict[str, Bool], objects: Int64, epoch: Int64, every: Int64
) -> Int64:
    """The row that clears the medium of each life, OPEN for none."""
    found = np.full(len(objects), OPEN)
    if not ends:
        return found
    _, of_object = _media(table, every, int(every.max(initial=-1)) + 1)
    for medium, at in ends.items():
        here = np.flatnonzero((of_object[objects] == medium) & (epoch < len(at)))
        found[here] = at[epoch[here]]
    return found


def _numbered(key: Int64, starts: Bool, shows: Bool, evicts: Bool) -> tuple[Int64, Int64]:
    """(the life of each row, -1 before the first of its object; the rows that begin a life). Rows by key, in order."""
    place = np.arange(len(key))
    first = np.flatnonzero(np.diff(key, prepend=-1))
    group_start = np.repeat(first, np.diff(np.append(first, len(key))))
    said = np.maximum.accumulate(np.where(shows | evicts, place, -1)) if len(key) else place
    before = np.append([-1], said[:-1])[: len(key)]
    alive_before = (before >= group_start) & shows[np.maximum(before, 0)]
    born = starts | (shows & ~alive_before)
    last_birth = np.maximum.accumulate(np.where(born, place, -1)) if len(key) else place
    life = np.where(last_birth >= group_start, np.cumsum(born) - 1, -1)
    return life, np.flatnonzero(born)


def _last(
    values: npt.NDArray[np.generic], rows: Int64, life: Int64, said: Bool | None, lives: int, none: int
) -> npt.NDArray[np.int64]:
    """The last value that was said in each life."""
    chosen = np.flatnonzero(said if said is not None else values[rows] >= 0)
    found = np.full(lives, none, np.int64)
    found[life[chosen]] = values[rows[chosen]]  # of repeated indices the last one stays
    return found


def _sizes(table: pa.Table, rows: Int64, life: Int64, lives: pd.DataFrame, every: Int64, objects: int) -> Int64:
    """The largest size that is said in a life, else in all lives of the object."""
    size = table["size_bytes"].to_numpy()
    of_life = np.zeros(len(lives), np.int64)
    np.maximum.at(of_life, life, size[rows])
    of_object = np.zeros(objects, np.int64)
    np.maximum.at(of_object, every[every >= 0], size[every >= 0])
    return np.where(of_life > 0, of_life, of_object[lives["object"].to_numpy()])


def _invalidated(table: pa.Table, is_op: dict[str, Bool], lives: pd.DataFrame, ts_ns: Int64, span: int) -> Int64:
    """When the generation of each life was first invalidated after its birth; OPEN = never."""
    at = np.flatnonzero(is_op["invalidate"])
    found = np.full(len(lives), OPEN)
    if not len(at):
        return found
    generations = pa.array(lives["generation"].cat.categories, pa.string())
    place = np.sort(_coded(table["generation"], generations)[at] * span + at)
    of_life = lives["generation"].cat.codes.to_numpy().astype(np.int64)
    next_ = np.minimum(np.searchsorted(place, of_life * span + lives["born_row"].to_numpy()), len(place) - 1)
    hit = (of_life >= 0) & (place[next_] // span == of_life) & (place[next_] % span >= lives["born_row"].to_numpy())
    found[hit] = ts_ns[place[next_[hit]] % span]
    return found


def _held(kind: str, is_op: dict[str, Bool], rows: Int64, life: Int64, owner: Int64, number: Int64) -> pd.DataFrame:
    """Holds of one kind: life, kind, owner, from_row, until_row, view. ``number``: of the hold, from 0, by row."""
    takes, gives = is_op[kind][rows], is_op[HOLDS[kind]][rows]
    chosen = np.flatnonzero(takes | gives)
    rows, life, takes = rows[chosen], life[chosen], takes[chosen]
    numbers = int(number.max(initial=0)) + 1
    key = life * numbers + number[rows]
    owners = int(owner.max(initial=-1)) + 2
    matched = _matched(key * owners + owner[rows] + 1, rows, takes)
    if matched is None:
        matched = _matched(key, rows, takes, strict=False)
    assert matched is not None
    taken, until = matched
    from_row = rows[taken]
    return pd.DataFrame(
        {
            "life": life[taken],
            "kind": kind,
            "owner": owner[from_row],
            "from_row": from_row,
            "until_row": until,
            "view": -1,
        }
    )


def _matched(key: Int64, rows: Int64, takes: Bool, strict: bool = True) -> tuple[Int64, Int64] | None:
    """(places that take, rows that give each of them up or OPEN), last in, first out by key.

    None where ``strict`` and a key gives up more than it has taken; else such releases are of holds that were taken
    before the first event.
    """
    order = np.lexsort((rows, key))
    key, row, take = key[order], rows[order], takes[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(key))))
    change = np.where(take, 1, -1)
    total = np.cumsum(change)
    before = (total - change)[first]
    depth = total - before[group]
    # The deepest debt so far, by group: groups are set apart by more than any debt.
    apart = group * (2 * len(key) + 2)
    debt = np.minimum(np.minimum.accumulate(depth - apart) + apart, 0) if len(key) else depth
    unmatched = ~take & (depth == debt) & (np.append([0], debt[:-1])[: len(key)] > debt)
    starts_in_debt = np.zeros(len(key), bool)
    starts_in_debt[first] = ~take[first]
    unmatched |= starts_in_debt
    if strict and unmatched.any():
        return None
    level = np.where(take, depth - debt, depth - debt + 1)
    keep = np.flatnonzero(~unmatched)
    again = keep[np.lexsort((row[keep], level[keep], key[keep]))]
    same = (key[again][1:] == key[again][:-1]) & (level[again][1:] == level[again][:-1])
    given_up = np.append(same & ~take[again][1:], False) & take[again] if len(again) else np.zeros(0, bool)
    until = np.full(len(again), OPEN)
    until[given_up] = row[again][np.flatnonzero(given_up) + 1]
    taken = take[again]
    return order[again[taken]], until[taken]


def _view_holds(lives: pd.DataFrame) -> pd.DataFrame:
    """A view is held by who made it; and so is its base, through the view, as long as both are live."""
    views = np.flatnonzero(lives["is_view"].to_numpy())
    owner, born = lives["owner"].to_numpy()[views], lives["born_row"].to_numpy()[views]
    ends = lives["died_row"].to_numpy()[views]
    own = pd.DataFrame(
        {"life": views, "kind": "view", "owner": owner, "from_row": born, "until_row": ends, "view": -1}
    )
    base = lives["base"].to_numpy()[views]
    order = np.lexsort((lives["born_row"].to_numpy(), lives["object"].to_numpy()))
    span = int(max(lives["born_row"].max(), 0)) + 2 if len(lives) else 2
    place = lives["object"].to_numpy()[order] * span + lives["born_row"].to_numpy()[order]
    at = np.searchsorted(place, base * span + born, "right") - 1
    life = order[np.maximum(at, 0)] if len(order) else at
    hit = (base >= 0) & (at >= 0)
    hit[hit] &= lives["object"].to_numpy()[life[hit]] == base[hit]
    of_base = own[hit].assign(life=life[hit], view=views[hit])
    return pd.concat([own, of_base], ignore_index=True)

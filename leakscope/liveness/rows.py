"""Cache events as columns of numbers: texts as codes, columns that say nothing as one value for all rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from leakscope.model.tables import CACHE_EVENTS
from leakscope.model.words import CACHE_OPS

if TYPE_CHECKING:
    import duckdb

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CacheRows:
    """The rows of one source in time order; equally long arrays.

    ``op`` indexes CACHE_OPS; ``object``, ``base`` and ``parent`` index ``names``, ``owner``, ``medium`` and
    ``generation`` the words of their name; -1 is none. Other columns are those of ``cache_events``.
    """

    names: pa.Array
    owners: pa.Array
    media: pa.Array
    generations: pa.Array
    ts_ns: Int64
    op: npt.NDArray[np.int8]
    object: Int32
    base: Int32
    parent: Int32
    owner: Int32
    medium: Int32
    generation: Int32
    size_bytes: Int64
    hold: Int64
    expires_ns: Int64
    refcount: npt.NDArray[np.float64]
    last_access_ns: Int64
    user_stack: Int32

    def __len__(self) -> int:
        return len(self.ts_ns)


def read_rows(con: duckdb.DuckDBPyConnection, source_id: int) -> CacheRows:
    """The rows of one source in the view ``cache_events``. A column at a time: all at once take five times as much."""

    def column(name: str) -> pa.ChunkedArray:
        con.execute("SELECT 1").fetchall()  # ends a result that another query has left half read: sql() refuses it
        rows = con.sql(f"SELECT {name} FROM cache_events WHERE source_id = {int(source_id)}")
        return rows.to_arrow_table().column(0)

    return _rows(column)


def rows_of(events: pa.Table) -> CacheRows:
    """Rows of one source as a table; columns of ``cache_events`` beyond ts_ns, op and object may be missing."""

    def column(name: str) -> pa.ChunkedArray:
        if name in events.column_names:
            return events[name]
        kind = CACHE_EVENTS.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        nothing = "" if pa.types.is_string(kind) else float("nan") if pa.types.is_floating(kind) else 0
        return pa.chunked_array([pa.repeat(pa.scalar(nothing, kind), events.num_rows)])

    return _rows(column)


def _rows(column: Callable[[str], pa.ChunkedArray]) -> CacheRows:
    ts_ns = column("ts_ns").to_numpy()
    order = None if (ts_ns[1:] >= ts_ns[:-1]).all() else np.argsort(ts_ns, kind="stable")

    def numbers(name: str, dtype: Any) -> npt.NDArray[Any]:
        values = column(name)
        if pa.types.is_floating(values.type):
            same = pc.all(pc.is_nan(values)).as_py()
        else:
            ends = pc.min_max(values)
            same = ends["min"] == ends["max"]
        if len(values) and same:
            return np.broadcast_to(np.asarray(values[0].as_py(), dtype), (len(values),))
        return _ordered(values.to_numpy(), order).astype(dtype, copy=False)

    def texts(name: str) -> tuple[Int32, pa.Array]:
        codes, words = _encoded(column(name))
        return _ordered(codes, order), words

    def known(name: str, words: pa.Array) -> Int32:
        """Codes into words that are there already."""
        codes, own = texts(name)
        if not len(own):
            return codes
        place = pc.fill_null(pc.index_in(own, value_set=words), -1).to_numpy().astype(np.int32)
        return np.append(place, np.int32(-1))[codes]

    objects, names = texts("object")
    base_codes, bases = texts("base")
    if len(bases):
        more = bases.filter(pc.invert(pc.is_in(bases, value_set=names)))
        names = pa.concat_arrays([names, more])
        place = pc.index_in(bases, value_set=names).to_numpy().astype(np.int32)
        base_codes = np.append(place, np.int32(-1))[base_codes]
    parent = known("parent", names)
    owner, owners = texts("owner")
    medium, media = texts("medium")
    generation, generations = texts("generation")
    rows = CacheRows(
        names=names,
        owners=owners,
        media=media,
        generations=generations,
        ts_ns=_ordered(ts_ns, order),
        op=known("op", pa.array(CACHE_OPS)).astype(np.int8),
        object=objects,
        base=base_codes,
        parent=parent,
        owner=owner,
        medium=medium,
        generation=generation,
        size_bytes=numbers("size_bytes", np.int64),
        hold=numbers("hold", np.int64),
        expires_ns=numbers("expires_ns", np.int64),
        refcount=numbers("refcount", np.float64),
        last_access_ns=numbers("last_access_ns", np.int64),
        user_stack=numbers("user_stack", np.int32),
    )
    give_back_memory()
    return rows


def give_back_memory() -> None:
    """Give free memory back to the system: of millions of events, columns that are done with are hundreds of MB that
    the C library and Arrow would keep for later."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


def _ordered(values: npt.NDArray[Any], order: Int64 | None) -> npt.NDArray[Any]:
    return values if order is None or values.strides == (0,) else values[order]


def _encoded(column: pa.ChunkedArray) -> tuple[Int32, pa.Array]:
    """(index of each text into the words, -1 for ''; the words)."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    found = column.dictionary_encode()
    words = found.chunk(0).dictionary if found.num_chunks else pa.array([], column.type)
    codes = np.concatenate([np.zeros(0, np.int32), *(chunk.indices.to_numpy() for chunk in found.chunks)])
    empty = pc.index(words, "").as_py()
    if empty < 0:
        return codes.astype(np.int32, copy=False), words
    if len(words) == 1:
        return np.broadcast_to(np.int32(-1), codes.shape), words.slice(0, 0)
    place = np.arange(len(words), dtype=np.int32)
    place[empty] = -1
    place[empty + 1 :] -= 1
    return place[codes], pa.concat_arrays([words.slice(0, empty), words.slice(empty + 1)])

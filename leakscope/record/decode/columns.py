"""Building `mem_events` tables from numpy columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from leakscope.model.tables import MEM_EVENTS
from leakscope.model.words import CAUSES, KINDS, KINDS_NOT_ADDED, LAYERS, OPS

if TYPE_CHECKING:
    from leakscope.record.live.sites import SiteTable

OP_CODES = {word: code for code, word in enumerate(OPS)}
CAUSE_CODES = {word: code for code, word in enumerate(CAUSES)}
LAYER_CODES = {word: code for code, word in enumerate(LAYERS)}
KIND_CODES = {word: code for code, word in enumerate(KINDS)}


class Words:
    """A growing dictionary of text values: codes for a dictionary-encoded column."""

    def __init__(self, words: tuple[str, ...] = ("",)) -> None:
        self._codes = {word: code for code, word in enumerate(words)}
        self._array: pa.Array | None = None

    def code(self, word: str) -> int:
        """The code of a word, new words get the next one."""
        if word not in self._codes:
            self._codes[word] = len(self._codes)
            self._array = None
        return self._codes[word]

    def word(self, code: int) -> str:
        """The word of a code."""
        return list(self._codes)[code]

    def array(self, codes: np.ndarray) -> pa.DictionaryArray:
        """Codes as an Arrow dictionary array."""
        if self._array is None:
            self._array = pa.array(list(self._codes), pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int16)), self._array)


@dataclass
class Totals:
    """Running sums over all events that were made into tables, for the status line and the summary."""

    live_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAYERS, 0))
    exit_freed_bytes: int = 0
    pids: set[int] = field(default_factory=set)


_ADDED = np.array([kind not in KINDS_NOT_ADDED for kind in KINDS])
_AT_EXIT = np.array([cause in ("exit", "exec") for cause in CAUSES])


class EventColumns:
    """Makes `mem_events` tables; api and slab cache names share its dictionaries over the whole recording."""

    def __init__(self, source_id: int) -> None:
        self.source_id = source_id
        self.totals = Totals()
        self.sites: SiteTable | None = None
        """Sums by site, where somebody watches."""
        self.apis = Words()
        self.slab_caches = Words()
        self._fixed = {"op": Words(OPS), "cause": Words(CAUSES), "layer": Words(LAYERS), "kind": Words(KINDS)}

    def table(self, rows: int, **columns: Any) -> pa.Table:
        """A table of `rows` rows; columns are arrays or scalars (codes for text), missing ones are 0."""
        self._count(rows, columns)
        if self.sites is not None:
            self.sites.add(rows, columns)
        words = {**self._fixed, "api": self.apis, "slab_cache": self.slab_caches}
        columns.setdefault("source_id", self.source_id)
        arrays = []
        for column in MEM_EVENTS:
            values = np.asarray(columns.get(column.name, 0))
            if values.ndim == 0:
                values = np.broadcast_to(values, (rows,))
            if column.name in words:
                arrays.append(words[column.name].array(values))
            else:
                arrays.append(pa.array(np.ascontiguousarray(values, column.type.to_pandas_dtype())))
        return pa.Table.from_arrays(arrays, schema=MEM_EVENTS)

    def _count(self, rows: int, columns: dict[str, Any]) -> None:
        """Add to the totals: codes are at hand here, which is cheaper than text columns later."""
        op, cause, kind, layer, size, allocated = (
            np.broadcast_to(np.asarray(columns.get(name, 0)), (rows,))
            for name in ("op", "cause", "kind", "layer", "size_bytes", "alloc_ts_ns")
        )
        bytes_added = np.where(_ADDED[kind], size, 0).astype(np.float64)
        freed = op == OP_CODES["free"]
        at_exit = freed & _AT_EXIT[cause]
        # In float64 sums below 2^53 are exact, and bincount takes nothing else.
        sign = np.where(op == OP_CODES["alloc"], 1.0, np.where(freed & ~at_exit & (allocated > 0), -1.0, 0.0))
        by_layer = np.bincount(layer, bytes_added * sign, len(LAYERS))
        for name, change in zip(LAYERS, by_layer, strict=True):
            self.totals.live_bytes[name] += int(change)
        self.totals.exit_freed_bytes += int(bytes_added[at_exit].sum())
        if rows:
            self.totals.pids.update(np.unique(columns["pid"]).tolist())


def distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index of one row for each distinct combination, group number of each row) of equally long integer columns.

    Combinations are told apart by a 64-bit mix that is verified against the columns; the (never yet seen)
    collision falls back to a lexical sort.
    """
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.int64).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    _, first, group = np.unique(mixed, return_index=True, return_inverse=True)
    if all((column[first][group] == column).all() for column in columns):
        return first, group
    rows = np.stack([column.astype(np.int64) for column in columns], axis=1)
    _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first, group.reshape(-1)

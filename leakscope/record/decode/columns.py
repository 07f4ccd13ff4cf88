"""Building `mem_events` tables from numpy columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from leakscope.model.tables import MEM_EVENTS
from leakscope.model.words import CAUSES, KINDS, LAYERS, OPS

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

    def array(self, codes: np.ndarray) -> pa.DictionaryArray:
        """Codes as an Arrow dictionary array."""
        if self._array is None:
            self._array = pa.array(list(self._codes), pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int16)), self._array)


class EventColumns:
    """Makes `mem_events` tables; api and slab cache names share its dictionaries over the whole recording."""

    def __init__(self, source_id: int) -> None:
        self.source_id = source_id
        self.apis = Words()
        self.slab_caches = Words()
        self._fixed = {"op": Words(OPS), "cause": Words(CAUSES), "layer": Words(LAYERS), "kind": Words(KINDS)}

    def table(self, rows: int, **columns: Any) -> pa.Table:
        """A table of `rows` rows; columns are arrays or scalars (codes for text), missing ones are 0."""
        words = {**self._fixed, "api": self.apis, "slab_cache": self.slab_caches}
        columns.setdefault("source_id", self.source_id)
        arrays = []
        for field in MEM_EVENTS:
            values = np.asarray(columns.get(field.name, 0))
            if values.ndim == 0:
                values = np.broadcast_to(values, (rows,))
            if field.name in words:
                arrays.append(words[field.name].array(values))
            else:
                arrays.append(pa.array(np.ascontiguousarray(values, field.type.to_pandas_dtype())))
        return pa.Table.from_arrays(arrays, schema=MEM_EVENTS)


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

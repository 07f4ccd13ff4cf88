"""Building tables in the schemas of ``leakscope.model.tables`` from numpy columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from leakscope.model.tables import TABLES


class Coded(NamedTuple):
    """A text column as codes into its words: what a dictionary-encoded column is made of."""

    codes: npt.NDArray[Any]
    words: Sequence[str]


def build_table(name: str, rows: int, /, **columns: Any) -> pa.Table:
    """The table ``name`` with ``rows`` rows.

    A column is a numpy or Arrow array, a list, :class:`Coded` text, or one value for all rows; columns that are not
    given are 0, '' or NaN. Raises pa.ArrowInvalid or OverflowError for values that the schema has no room for.
    """
    schema = TABLES[name]
    unknown = columns.keys() - set(schema.names)
    if unknown:
        raise ValueError(f"{name} has no columns {sorted(unknown)}")
    return pa.table([_column(field.type, rows, columns.get(field.name)) for field in schema], schema=schema)


def _column(kind: pa.DataType, rows: int, values: Any) -> pa.Array:
    if isinstance(values, Coded):
        words = pa.array(list(values.words) or [""], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(np.asarray(values.codes), pa.int16()), words)
    if values is None:
        values = _nothing(kind)
    if isinstance(values, str | int | float | np.integer | np.floating):
        if pa.types.is_dictionary(kind):
            return _column(kind, rows, Coded(np.zeros(rows, np.int16), [str(values)]))
        return pa.repeat(pa.scalar(values, kind), rows)
    if isinstance(values, list) and not values and pa.types.is_list(kind):
        return pa.array([[]] * rows, kind)
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    return array.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else array.cast(kind)


def _nothing(kind: pa.DataType) -> Any:
    if pa.types.is_list(kind):
        return []
    if pa.types.is_floating(kind):
        return float("nan")
    return "" if pa.types.is_dictionary(kind) or pa.types.is_string(kind) else 0


class Interned:
    """Texts numbered in the order in which they come; ``code(text)`` from 0."""

    def __init__(self, *words: str) -> None:
        self._codes = {word: code for code, word in enumerate(words)}

    def code(self, word: str) -> int:
        """The number of ``word``, a new one where it is new."""
        return self._codes.setdefault(word, len(self._codes))

    @property
    def words(self) -> list[str]:
        """All words in the order of their numbers."""
        return list(self._codes)


def not_empty(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """``tables`` without those that have no rows."""
    return {name: table for name, table in tables.items() if table.num_rows}

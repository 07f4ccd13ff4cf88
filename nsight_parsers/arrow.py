"""Building tables in the schemas of ``leakscope.model.tables`` from numpy columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from leakscope.model.tables import TABLES

MAX_STACK_FRAMES = 1024
"""Frames kept of one stack, the innermost ones; deeper stacks come from recursion or from damaged files."""


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


Frame = tuple[str, str, int, str, int, str]
"""function, file, line, module, offset, kind: the columns of the table ``frames``."""


class Stacks:
    """Interned frames and stacks of one file. Ids start at 1; 0 is no stack."""

    def __init__(self) -> None:
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self.cut = 0  # stacks deeper than MAX_STACK_FRAMES

    def frame(
        self, function: str, *, file: str = "", line: int = 0, module: str = "", offset: int = 0, kind: str = "native"
    ) -> int:
        """The id of a frame."""
        return self._frames.setdefault((function, file, line, module, offset, kind), len(self._frames) + 1)

    def stack(self, frames: Sequence[int]) -> int:
        """The id of a stack given as frame ids, outermost first; 0 for an empty one."""
        if not frames:
            return 0
        if len(frames) > MAX_STACK_FRAMES:
            self.cut += 1
            frames = frames[-MAX_STACK_FRAMES:]
        return self._stacks.setdefault(tuple(frames), len(self._stacks) + 1)

    def tables(self) -> dict[str, pa.Table]:
        """The tables ``stacks`` and ``frames``; {} when there are none."""
        if not self._frames:
            return {}
        function, file, line, module, offset, kind = zip(*self._frames, strict=True)
        frames = build_table(
            "frames",
            len(function),
            id=np.arange(1, len(function) + 1),
            function=pa.array(function, pa.string()),
            file=pa.array(file, pa.string()),
            line=np.array(line, np.int64),
            module=pa.array(module, pa.string()),
            offset=np.array(offset, np.uint64),
            kind=list(kind),
        )
        stacks = build_table(
            "stacks",
            len(self._stacks),
            id=np.arange(1, len(self._stacks) + 1),
            frames=pa.array([list(stack) for stack in self._stacks], pa.list_(pa.int32())),
        )
        return {"stacks": stacks, "frames": frames}


def not_empty(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """``tables`` without those that have no rows."""
    return {name: table for name, table in tables.items() if table.num_rows}

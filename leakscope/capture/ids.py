"""Giving rows of a source that is added to a capture ids that no other source of it uses.

Stacks, frames, calls, launches, ranges and profiles are numbered per capture, files number them from 1. Columns that
refer to such rows are known by their name, so that every table that has one is moved along.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from leakscope.capture.reader import Capture
from leakscope.errors import BadInputError

NUMBERED = ("frames", "stacks", "calls", "launches", "marks", "kernel_profiles")
"""Tables whose ``id`` other rows refer to."""
REFERENCES = {
    "call_site": "frames",
    "frames": "frames",
    "kernel_stack": "stacks",
    "user_stack": "stacks",
    "call_stack": "stacks",
    "python_stack": "stacks",
    "call_id": "calls",
    "launch_id": "launches",
    "mark_id": "marks",
    "profile_id": "kernel_profiles",
}
"""Column → the table that it refers to. ``id`` and ``parent_id`` are of their own table."""


class Numbering:
    """Which ids are free in a capture; each file that is added takes a range of them."""

    def __init__(self, capture: Capture | None) -> None:
        self._taken: dict[str, np.ndarray] = {}
        self._next: dict[str, int] = {}
        for name in NUMBERED:
            ids = capture.table(name, ["id"])["id"].to_numpy() if capture is not None and capture.rows(name) else None
            self._taken[name] = np.sort(ids) if ids is not None else np.empty(0, np.int64)

    def take(self, tables: Mapping[str, pa.Table]) -> dict[str, int]:
        """What to add to the ids of each numbered table of a file; their range is taken then.

        Raises BadInputError when a table has no range of ids left that is long enough.
        """
        bases = {}
        for name in NUMBERED:
            rows = tables.get(name)
            highest = int(pc.max(rows["id"]).as_py() or 0) if rows is not None and rows.num_rows else 0
            bases[name] = self._base(name, highest, rows.schema.field("id").type.bit_width if rows is not None else 64)
            if highest:
                self._taken[name] = np.append(self._taken[name], bases[name] + highest)
                self._taken[name].sort()
        return bases

    def highest(self) -> dict[str, int]:
        """The highest id of each numbered table: what to add to those of a source whose number of rows is not known."""
        return {name: int(taken[-1]) if len(taken) else 0 for name, taken in self._taken.items()}

    def _base(self, name: str, count: int, bits: int) -> int:
        taken = self._taken[name]
        if not len(taken):
            return 0
        last = int(taken[-1])
        if last + count < 1 << (bits - 1):
            return last
        # Ids of a recording need not be dense: look for a gap.
        lower = np.concatenate([[0], taken])
        gaps = np.flatnonzero(np.diff(lower) > count)
        if not len(gaps):
            raise BadInputError(f"the capture has no {count:,} ids left for {name}; import into a new capture")
        return int(lower[gaps[0]])


def renumbered(tables: Mapping[str, pa.Table], bases: Mapping[str, int], source_id: int) -> dict[str, pa.Table]:
    """``tables`` with ids and references moved by ``bases``; 0 stays "none"."""
    result = {}
    for name, table in tables.items():
        for index, field in enumerate(table.schema):
            if field.name == "source_id":
                table = table.set_column(index, field, pa.repeat(pa.scalar(source_id, field.type), table.num_rows))
                continue
            of_table = name if field.name in ("id", "parent_id") else REFERENCES.get(field.name, "")
            base = bases.get(of_table, 0)
            if base:
                table = table.set_column(index, field, _moved(table[field.name], field.type, base))
        result[name] = table
    return result


def _moved(column: pa.ChunkedArray, kind: pa.DataType, base: int) -> pa.Array:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # how pyarrow answers for no chunks
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], kind)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(array.offsets, _moved_values(array.values, kind.value_type, base))
    return _moved_values(array, kind, base)


def _moved_values(array: pa.Array, kind: pa.DataType, base: int) -> pa.Array:
    shift = pc.multiply(pc.cast(pc.not_equal(array, pa.scalar(0, kind)), kind), pa.scalar(base, kind))
    return pc.add_checked(array, shift)

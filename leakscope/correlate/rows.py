"""Rows of a capture with the texts of their stacks, in pieces: for tools that know nothing of stack ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from leakscope.correlate.mixed_stacks import merge
from leakscope.correlate.stacks import Stacks
from leakscope.model.tables import MEM_EVENTS, SAMPLES, TEXT

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

BATCH_ROWS = 100_000
_STACKS = ["kernel_stack", "user_stack", "python_stack"]


def rows_of(
    con: duckdb.DuckDBPyConnection, table: str, evidence: str, layer: str | None = None, pid: int | None = None
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Schema and batches of ``samples`` or ``events`` (mem_events) in the order of writing.

    A column ``evidence`` stands before those of the table; events have ``stack`` (frame texts, outermost first) at the
    end. ``layer``, ``pid``: only these events, and samples of this process. Raises duckdb.Error.
    """
    import pyarrow as pa

    own = {"samples": SAMPLES, "events": MEM_EVENTS}[table]
    fields = [pa.field("evidence", pa.string()), *(f.with_type(_plain(f.type)) for f in own)]
    schema = pa.schema([*fields, pa.field("stack", pa.list_(pa.string()))] if table == "events" else fields)
    return schema, _batches(con, table, evidence, schema, _where(table, layer, pid))


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if kind == TEXT else kind


def _where(table: str, layer: str | None, pid: int | None) -> str:
    parts = ["true"]
    if table == "samples":
        parts += [f"scope = 'process' AND scope_id = '{int(pid)}'"] if pid is not None else []
    else:
        parts += [f"pid = {int(pid)}"] if pid is not None else []
        parts += ["layer = '" + layer.replace("'", "''") + "'"] if layer is not None else []
    return " AND ".join(parts)


def _batches(
    con: duckdb.DuckDBPyConnection, table: str, evidence: str, schema: pa.Schema, where: str
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    name = {"samples": "samples", "events": "mem_events"}[table]
    texts = _Texts(con, where) if table == "events" else None
    relation: Any = con.sql(f"SELECT * FROM {name} WHERE {where}")
    to_reader = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader  # its name before DuckDB 1.4
    for batch in to_reader(BATCH_ROWS):
        columns = {"evidence": pa.repeat(evidence, len(batch))}
        columns |= {
            field.name: batch.column(field.name).cast(field.type)
            for field in schema
            if field.name in batch.schema.names
        }
        if texts is not None:
            columns["stack"] = texts.of(batch)
        yield pa.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema)


class _Texts:
    """The texts of all stacks that come together in events."""

    def __init__(self, con: duckdb.DuckDBPyConnection, where: str) -> None:
        ids = con.execute(f"SELECT DISTINCT {', '.join(_STACKS)} FROM mem_events WHERE {where}").fetchall()
        self._stacks = Stacks(con, {stack for row in ids for stack in row})
        self._known: dict[tuple[int, int, int], list[str]] = {}

    def of(self, batch: pa.RecordBatch) -> pa.Array:
        """list<string>, a row an event; every combination is put together once."""
        import pyarrow as pa

        ids = np.column_stack([batch.column(name).to_numpy(zero_copy_only=False) for name in _STACKS])
        unique, row = np.unique(ids, axis=0, return_inverse=True)
        texts = pa.array([self._text(*map(int, one)) for one in unique], pa.list_(pa.string()))
        return texts.take(pa.array(row.reshape(-1)))

    def _text(self, kernel: int, user: int, python: int) -> list[str]:
        if (kernel, user, python) not in self._known:
            frames = [*merge(self._stacks[user], self._stacks[python]), *self._stacks[kernel]]
            self._known[kernel, user, python] = [frame.text for frame in frames]
        return self._known[kernel, user, python]

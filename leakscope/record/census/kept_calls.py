"""Which rows of `calls` a census writes: for each site the call that made its first object, and what that called."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from leakscope.model.tables import CALLS

MOST_AWAITED = 10_000
"""Calls that may be awaited at once; those of further sites are not looked for."""


class KeptCalls:
    """Gathers decoded calls until it is known which of them are wanted."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._inner: pa.Table | None = None  # returned already, while what called them is still to come
        self._awaited: set[int] = set()
        self.rows = 0
        """Rows that are gathered."""

    def add(self, table: pa.Table) -> None:
        """Calls that returned, as decoded."""
        self._tables.append(table)
        self.rows += table.num_rows

    def want(self, calls: Iterable[int]) -> None:
        """Calls to keep; 0 is none. One may still be open, and come later."""
        if len(self._awaited) < MOST_AWAITED:
            self._awaited.update(int(call) for call in calls if call)

    def take(self, until_ns: int | None) -> pa.Table:
        """The wanted ones of those that returned up to a time (None: all). The others of that time are dropped, except
        that inner calls, which return first, may be wanted once more."""
        gathered, self._tables = self._tables, []
        if not gathered:
            return CALLS.empty_table()
        rows = pa.concat_tables(gathered).unify_dictionaries()
        if until_ns is not None:
            due = rows["exit_ns"].to_numpy() <= until_ns
            self._tables, rows = [rows.filter(pa.array(~due))], rows.filter(pa.array(due))
        self.rows = sum(table.num_rows for table in self._tables)
        latest = np.ones(len(rows), bool)
        if self._inner is not None:
            latest = np.concatenate([np.zeros(len(self._inner), bool), latest])
            rows = pa.concat_tables([self._inner, rows]).unify_dictionaries()
        ids, parents = rows["id"].to_numpy(), rows["parent_id"].to_numpy()
        wanted = np.isin(ids, np.fromiter(self._awaited, np.int64, len(self._awaited)))
        self._awaited.difference_update(ids[wanted].tolist())
        while (more := ~wanted & np.isin(parents, ids[wanted])).any():
            wanted |= more
        self._inner = rows.filter(pa.array(latest & (parents > 0) & ~wanted))
        return rows.filter(pa.array(wanted))

"""The sites of a census and their running totals: numbered rows of arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from leakscope.model.tables import CENSUS, CENSUS_SITES, CENSUS_TOTALS
from leakscope.model.words import KINDS, LAYERS
from leakscope.record.decode.columns import EventColumns, Words

IntArray = npt.NDArray[np.int64]

IDENTITY = (
    "pid", "layer", "kind", "api", "slab_cache", "size_bytes", "call_site", "kernel_stack", "user_stack",
    "python_stack", "weight", "call_api", "call_stack",
)  # fmt: skip
"""What makes a site of a census, as codes and ids. `size_bytes` is 0 where objects differ and need not be scaled."""

EVENTS = ("allocated", "freed", "reused", "context", "exit")
ALLOCATED, FREED, REUSED, CONTEXT, EXIT = range(len(EVENTS))
_SPANS = ("first_ns", "last_ns", "smallest_bytes", "largest_bytes")
_NEVER = np.iinfo(np.int64).max


class Book:
    """Sites by slot. A slot is given to another site when its own is given up (:meth:`drop_idle`)."""

    def __init__(self, columns: EventColumns) -> None:
        self._columns = columns
        self._layers, self._kinds = Words(LAYERS), Words(KINDS)
        self._slots: dict[tuple[int, ...], int] = {}
        self._free: list[int] = []
        self._next_id = 1
        self._new: list[int] = []  # slots whose site is not written yet
        self.identity = np.zeros((0, len(IDENTITY)), np.int64)
        self.ids = np.zeros(0, np.int64)
        self.calls = np.zeros(0, np.int64)  # call_id of the first allocation
        self.objects = np.zeros((0, len(EVENTS)), np.int64)
        self.bytes = np.zeros((0, len(EVENTS)), np.int64)
        self.spans = np.zeros((0, len(_SPANS)), np.int64)
        self.changed = np.zeros(0, bool)
        self.changed_ns = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self, identities: IntArray, calls: IntArray | None = None) -> tuple[IntArray, IntArray]:
        """(slot of each row of `identities` (int64[n, len(IDENTITY)]), rows whose site is new).

        `calls` are the calls that made the first object of each.
        """
        found = np.zeros(len(identities), np.int64)
        fresh: list[int] = []
        for row, key in enumerate(map(tuple, identities.tolist())):
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = self._open(key, 0 if calls is None else int(calls[row]))
                fresh.append(row)
            found[row] = slot
        return found, np.array(fresh, np.int64)

    def _open(self, key: tuple[int, ...], call: int) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.identity[slot], self.ids[slot], self.calls[slot] = key, self._next_id, call
        self.objects[slot] = self.bytes[slot] = 0
        self.spans[slot] = (_NEVER, 0, _NEVER, 0)
        self.changed[slot], self.changed_ns[slot] = False, 0
        self._next_id += 1
        self._new.append(slot)
        return slot

    def _grow(self) -> None:
        had = len(self.ids)
        more = max(1024, had)
        for name in ("identity", "ids", "calls", "objects", "bytes", "spans", "changed", "changed_ns"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros((more, *old.shape[1:]), old.dtype)]))
        self._free += range(had + more - 1, had - 1, -1)

    def add(self, slots: IntArray, event: int | IntArray, objects: IntArray, size: IntArray) -> None:
        """Add to the totals of sites; `event` indexes EVENTS. The arrays may name a site more than once."""
        cells = slots * len(EVENTS) + event
        np.add.at(self.objects.reshape(-1), cells, objects)
        np.add.at(self.bytes.reshape(-1), cells, size)
        self.changed[slots] = True

    def span(self, slots: IntArray, first_ns: IntArray, last_ns: IntArray, size: IntArray) -> None:
        """Widen the spans of sites by allocations of a size between two times."""
        np.minimum.at(self.spans[:, 0], slots, first_ns)
        np.maximum.at(self.spans[:, 1], slots, last_ns)
        np.minimum.at(self.spans[:, 2], slots, size)
        np.maximum.at(self.spans[:, 3], slots, size)

    def live_objects(self) -> IntArray:
        """Objects of each slot that have not ended, not even by the exit of their process."""
        live: IntArray = self.objects[:, ALLOCATED] - self.objects[:, FREED:].sum(axis=1)
        return live

    def live(self) -> tuple[dict[str, IntArray], IntArray]:
        """(columns of IDENTITY, live bytes) of the sites with something live."""
        live: IntArray = self.bytes[:, ALLOCATED] - self.bytes[:, FREED:].sum(axis=1)
        kept = np.flatnonzero(live * (self.ids > 0))
        return dict(zip(IDENTITY, self.identity[kept].T, strict=True)), live[kept]

    def drop_idle(self, before_ns: int, ended_pids: set[int], in_use: IntArray) -> set[int]:
        """Give up sites without live objects that have not changed since a time, or whose process is one of
        `ended_pids`; but none of the slots `in_use`. Returns the dropped slots; their totals must be written."""
        pids = self.identity[:, 0]
        gone = np.isin(pids, np.fromiter(ended_pids, np.int64, len(ended_pids))) | (self.changed_ns < before_ns)
        gone &= (self.live_objects() == 0) & ~self.changed & (self.ids > 0)
        gone[in_use] = False
        slots = set(np.flatnonzero(gone).tolist())
        for slot in slots:
            del self._slots[tuple(self.identity[slot].tolist())]
            self.ids[slot] = 0
        self._free += slots
        return slots

    def site_rows(self) -> pa.Table:
        """`census_sites` of the sites that are new since the last time."""
        slots, self._new = np.array(self._new, np.int64), []
        rows = dict(zip(IDENTITY, self.identity[slots].T, strict=True))
        rows |= {"id": self.ids[slots], "call_id": self.calls[slots], "mark_id": np.zeros(len(slots))}
        words = {
            "layer": self._layers, "kind": self._kinds, "api": self._columns.apis,
            "slab_cache": self._columns.slab_caches, "call_api": self._columns.apis,
        }  # fmt: skip
        return self._table(CENSUS_SITES, rows, len(slots), words)

    def total_rows(self, ts_ns: int) -> pa.Table:
        """`census_totals` of the sites that changed since the last time."""
        slots = np.flatnonzero(self.changed)
        self.changed[slots] = False
        self.changed_ns[slots] = ts_ns
        spans = self.spans[slots]
        rows = {"ts_ns": np.full(len(slots), ts_ns), "site": self.ids[slots]}
        rows |= dict(zip(_SPANS, np.where(spans == _NEVER, 0, spans).T, strict=True))
        for at, event in enumerate(EVENTS):
            rows[f"{event}_objects"], rows[f"{event}_bytes"] = self.objects[slots, at], self.bytes[slots, at]
        return self._table(CENSUS_TOTALS, rows, len(slots), {})

    def cohort_rows(
        self, ts_ns: int, slots: IntArray, starts_ns: IntArray, objects: IntArray, size: IntArray
    ) -> pa.Table:
        """`census` rows."""
        rows = {
            "ts_ns": np.full(len(slots), ts_ns), "site": self.ids[slots], "cohort_ns": starts_ns, "objects": objects,
            "bytes": size,
        }  # fmt: skip
        return self._table(CENSUS, rows, len(slots), {})

    def _table(self, schema: pa.Schema, rows: dict[str, np.ndarray], count: int, words: dict[str, Words]) -> pa.Table:
        rows["source_id"] = np.full(count, self._columns.source_id)
        arrays = [
            words[column.name].array(rows[column.name])
            if column.name in words
            else pa.array(np.ascontiguousarray(rows[column.name], column.type.to_pandas_dtype()))
            for column in schema
        ]
        return pa.Table.from_arrays(arrays, schema=schema)

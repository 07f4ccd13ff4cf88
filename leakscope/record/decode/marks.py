"""NVTX records → rows of `marks`: each range once, when it has ended or the recording has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from leakscope.model.recording import Loss
from leakscope.model.tables import MARKS
from leakscope.record import records
from leakscope.record.decode.columns import Words, distinct

_ROW = np.dtype(
    [
        ("id", "i8"), ("parent_id", "i8"), ("pid", "i4"), ("tid", "i4"), ("start_ns", "i8"), ("end_ns", "i8"),
        ("domain", "i4"), ("name", "i4"),
    ]
)  # fmt: skip
_UNREADABLE = "[unreadable name]"
RECENT = 1 << 16
"""Ranges whose names a view can ask for."""


def mark_ids(pid: np.ndarray, number: np.ndarray) -> np.ndarray:
    """int64 ids of ranges: the process's PID above the number that the range has in it; 0 for number 0."""
    number = number.astype(np.int64)
    return np.where(number > 0, pid.astype(np.int64) << 32 | number, 0)


class Marks:
    """Decodes batches of MARK_RECORD. Ranges that have not ended are kept until they do.

    `unknown` counts ends of push/pop ranges whose beginning was not seen: older than the recording, or lost.
    """

    def __init__(self, source_id: int) -> None:
        self._source_id = source_id
        self._open = np.empty(0, _ROW)
        self._names: dict[tuple[bytes, int], int] = {}
        self._texts: list[str] = []
        self._domains = Words()
        self.unknown = 0
        self.remember = False
        """Whether :meth:`name_of` will be asked."""
        self._recent = np.empty(0, _ROW)

    def losses(self) -> list[Loss]:
        """Ranges that are not known."""
        detail = "ranges without a name: they began before the recording, or their beginning was lost"
        return [Loss("NVTX ranges", "mark_lost", self.unknown, detail)] if self.unknown else []

    def rows(self, batch: np.ndarray) -> pa.Table:
        """`marks` rows of the ranges that ended in a batch, and of its marks (as ranges of no length)."""
        kind = batch["type"]
        ends = batch[(kind == records.MARK_POP) | (kind == records.MARK_END)]
        begun = self._begun(batch[~np.isin(kind, (records.MARK_POP, records.MARK_END))])
        if self.remember:
            self._recent = np.concatenate([self._recent, begun])[-RECENT:]
        known = np.concatenate([self._open, begun])
        known = known[np.argsort(known["id"], kind="stable")]
        ended = mark_ids(ends["pid"], ends["number"])
        place = np.searchsorted(known["id"], ended)
        found = place < len(known)
        found[found] = known["id"][place[found]] == ended[found]
        known["end_ns"][place[found]] = ends["ts_ns"][found]
        self.unknown += int((~found & (ends["type"] == records.MARK_POP)).sum())
        self._open = known[known["end_ns"] == 0]
        return self._table(known[known["end_ns"] > 0])

    def open_rows(self) -> pa.Table:
        """Rows of the ranges that have not ended, with end_ns 0; they are given out once."""
        rows, self._open = self._open, np.empty(0, _ROW)
        return self._table(rows)

    def name_of(self, mark: int) -> str:
        """The name of a range that is open or began lately, '' for others. From any thread."""
        for rows in (self._recent, self._open):
            if len(found := np.flatnonzero(rows["id"] == mark)):
                return self._texts[rows["name"][found[-1]]]
        return ""

    def _begun(self, batch: np.ndarray) -> np.ndarray:
        rows = np.zeros(len(batch), _ROW)
        rows["id"] = mark_ids(batch["pid"], batch["number"])
        rows["parent_id"] = mark_ids(batch["pid"], batch["outer"])
        for name, source in (("pid", "pid"), ("tid", "tid"), ("start_ns", "ts_ns")):
            rows[name] = batch[source]
        instant = batch["type"] == records.MARK_INSTANT
        rows["end_ns"][instant] = batch["ts_ns"][instant]
        first, group = distinct(*_words(batch["domain"]))
        domains = [self._domains.code(_text(domain)) for domain in batch["domain"][first].tolist()]
        rows["domain"] = np.array(domains, np.int32)[group]
        # A name that was cut shares its bytes with a whole one, so its length is a part of it.
        first, group = distinct(*_words(batch["name"]), batch["bytes"])
        names = [self._name_code(*name) for name in batch[["name", "bytes"]][first].tolist()]
        rows["name"] = np.array(names, np.int32)[group]
        return rows

    def _name_code(self, name: bytes, size: int) -> int:
        code = self._names.setdefault((name, size), len(self._texts))
        if code == len(self._texts):
            self._texts.append(_name(name, size))
        return code

    def _table(self, rows: np.ndarray) -> pa.Table:
        rows = rows[np.argsort(rows["start_ns"], kind="stable")]
        texts = pa.DictionaryArray.from_arrays(pa.array(rows["name"]), pa.array(self._texts, pa.string()))
        columns = {name: pa.array(np.ascontiguousarray(rows[name])) for name in _ROW.names or ()}
        columns["source_id"] = pa.array(np.full(len(rows), self._source_id, np.int16))
        columns["domain"], columns["name"] = self._domains.array(rows["domain"]), texts.cast(pa.string())
        return pa.Table.from_arrays([columns[name] for name in MARKS.names], schema=MARKS)


def _words(names: np.ndarray) -> Iterator[np.ndarray]:
    """Fixed-size texts as columns of 64-bit words."""
    words = np.ascontiguousarray(names).view(np.int64).reshape(len(names), names.dtype.itemsize // 8)
    yield from words.T


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _name(name: bytes, size: int) -> str:
    """The text of a name; one that goes on beyond what was recorded ends in `…`, at a whole character."""
    if size == records.MARK_NAME_UNREADABLE:
        return _UNREADABLE
    if size <= records.MARK_NAME_BYTES:
        return _text(name)
    return name.decode(errors="ignore") + "…"

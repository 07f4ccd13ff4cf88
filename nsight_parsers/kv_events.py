"""Rows of ``cache_events`` from batches of KV events, with what their sequence numbers say of losses and restarts.

An event says neither who holds a block nor when it is let go: ``BlockRemoved`` is the eviction from the prefix table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from leakscope.model.tables import TABLES
from leakscope.model.words import CACHE_OPS
from nsight_parsers.arrow import Coded, Interned, build_table
from nsight_parsers.kv_decode import DEFAULT_MEDIUM, Batch, Cleared, Hash, PayloadError, Stored, decode_batch
from nsight_parsers.kv_sequence import Order, Sequence

INSERT, EVICT = CACHE_OPS.index("insert"), CACHE_OPS.index("evict")
MAX_PLACES, MAX_PUBLISHERS, MAX_LOSSES = 256, 256, 100_000
CHUNK_ROWS = 100_000

LIMITS = [
    "the events tell no reference count, no request and no hit: who holds a block is inferred from what stays when "
    "everything else is evicted",
    "sizes in bytes are not in the events",
]


Frame = tuple[str, int, bytes]
"""Topic, sequence number and payload of a batch."""
Refill = Callable[[range], Iterable[Frame]]


@dataclass
class _Publisher:
    """One publisher: an engine, or one data-parallel rank of it. ``suffix`` tells its media from those of others."""

    suffix: str
    sequence: Sequence = field(default_factory=Sequence)
    media: dict[str, None] = field(default_factory=dict)
    places: dict[tuple[str, int], int] = field(default_factory=dict)


class EventBook:
    """Rows of ``cache_events`` and ``losses``, made from batches in the order in which they came.

    Rows are in the order of the events: those of a batch are told apart by nanoseconds added to its time. ``object`` is
    the hash, with ``medium/`` and ``gN/`` (KV-cache group) in front where it is not in the GPU's first group.
    """

    def __init__(self) -> None:
        self.batches = self.events = self.blocks = self.repeated = self.restarts = self.missing = self.undecodable = 0
        self.block_tokens = 0
        self.groups: set[int] = set()
        self.windowed_groups: set[int] = set()
        self._publishers: dict[tuple[str, int], _Publisher] = {}
        self._ts_ns: list[int] = []
        self._ops: list[int] = []
        self._hashes: list[Hash | None] = []  # of the rows since the last chunk, as are the next
        self._parents: list[Hash | None] = []
        self._where: list[int] = []  # indices into the places
        self._bare: dict[str, int] = {}  # medium → place of rows without an object
        self._places: list[tuple[str, int]] = []  # (what stands before the names of blocks there, code of the medium)
        self._media = Interned()
        self._chunks: list[pa.Table] = []
        self._losses: list[tuple[int, str, int, str]] = []
        self._now_ns = 0

    def add(self, topic: str, number: int, payload: bytes, refill: Refill | None = None) -> Order | None:
        """Enter one batch. None: the payload is no batch, which is counted.

        ``refill`` is asked for the frames that are missing before it; what it does not have either is a gap.
        """
        try:
            batch = decode_batch(payload)
        except PayloadError:
            self._lose("undecodable_event", 1, f"batch {number}")
            return None
        publisher = self._publisher(topic, batch.rank)
        if publisher is None:
            self._lose("undecodable_event", 1, f"a batch of more than {MAX_PUBLISHERS} publishers")
            return None
        sequence = publisher.sequence
        order = sequence.order(number, batch.ts_ns, payload)
        if order is Order.REPEATED:
            self.repeated += 1
            return order
        if order is Order.RESTART:
            self.restarts += 1
            self._now_ns = max(self._now_ns, batch.ts_ns)
            self._without_object("clear", publisher)
            sequence.restart()
        if refill is not None and number > sequence.last + 1:
            for frame in refill(range(sequence.last + 1, number)):
                self.add(*frame)
            if number <= sequence.last:
                return order
        self._now_ns = max(self._now_ns, batch.ts_ns)
        self._gap(range(sequence.last + 1, number), publisher)
        sequence.accept(number, batch.ts_ns, payload)
        self.batches += 1
        self._enter(batch, publisher)
        if len(self._ops) >= CHUNK_ROWS:
            self._flush()
        return order

    def _gap(self, missing: range, publisher: _Publisher) -> None:
        if not missing:
            return
        self.missing += len(missing)
        detail = f"batches {missing.start:,} to {missing.stop - 1:,}"
        if publisher.sequence.last < 0:
            detail += ", before the first that was seen"
        self._lose("sequence_gap", len(missing), detail)
        self._without_object("gap", publisher)

    def _lose(self, what: str, count: int, detail: str) -> None:
        if what == "undecodable_event":
            self.undecodable += count
        if len(self._losses) < MAX_LOSSES:
            self._losses.append((self._now_ns, what, count, detail))

    def _publisher(self, topic: str, rank: int) -> _Publisher | None:
        """The publisher of a batch, None for one too many."""
        key = (topic, rank)
        if key not in self._publishers:
            if len(self._publishers) >= MAX_PUBLISHERS:
                return None
            self._publishers[key] = _Publisher(f":{rank or len(self._publishers)}" if self._publishers else "")
        return self._publishers[key]

    def _enter(self, batch: Batch, publisher: _Publisher) -> None:
        self.events += len(batch.events) + batch.unknown
        if batch.unknown:
            self._lose("undecodable_event", batch.unknown, "events of a kind unknown here")
        for event in batch.events:
            if isinstance(event, Cleared):
                self._row("clear", DEFAULT_MEDIUM + publisher.suffix)
                continue
            place = publisher.places.get((event.medium, event.group))
            if place is None:
                place = self._place(publisher, event.medium, event.group)
            count = len(event.hashes)
            self.blocks += count
            self._hashes += event.hashes
            self._where += [place] * count
            if isinstance(event, Stored):
                self._ops += [INSERT] * count
                self._parents.append(event.parent)
                self._parents += event.hashes[:-1]
                self.block_tokens = self.block_tokens or event.block_tokens
                if not event.prefix_held:
                    self.windowed_groups.add(event.group)
            else:
                self._ops += [EVICT] * count
                self._parents += [None] * count
        self._times()

    def _times(self) -> None:
        """Times of the rows that have none yet: one nanosecond after the other."""
        new = len(self._ops) - len(self._ts_ns)
        self._ts_ns += range(self._now_ns + 1, self._now_ns + 1 + new)
        self._now_ns += new

    def _place(self, publisher: _Publisher, medium: str, group: int) -> int:
        """The number of a place that is new: a medium of a publisher, and a group of the cache in it."""
        if len(self._media.words) >= MAX_PLACES or len(publisher.places) >= MAX_PLACES:
            medium, group = "other", 0
        whole = medium + publisher.suffix
        publisher.media[whole] = None
        self.groups.add(group)
        before = ("" if whole == DEFAULT_MEDIUM else f"{whole}/") + (f"g{group}/" if group else "")
        self._places.append((before, self._media.code(whole)))
        if len(publisher.places) < MAX_PLACES:
            publisher.places[medium, group] = len(self._places) - 1
        return len(self._places) - 1

    def _without_object(self, op: str, publisher: _Publisher) -> None:
        for medium in publisher.media or {"": None}:
            self._row(op, medium)
        self._times()

    def _row(self, op: str, medium: str) -> None:
        if medium not in self._bare:
            self._bare[medium] = len(self._places)
            self._places.append(("", self._media.code(medium)))
        self._ops.append(CACHE_OPS.index(op))
        self._hashes.append(None)
        self._parents.append(None)
        self._where.append(self._bare[medium])

    def _flush(self) -> None:
        rows = len(self._ops)
        if not rows:
            return
        where = np.array(self._where, np.int64)
        before = [before for before, _ in self._places]
        media = np.array([code for _, code in self._places], np.int16)
        table = build_table(
            "cache_events",
            rows,
            ts_ns=np.array(self._ts_ns, np.int64),
            op=Coded(np.array(self._ops, np.int16), CACHE_OPS),
            object=_names(self._hashes, where, before),
            parent=_names(self._parents, where, before),
            medium=Coded(media[where], self._media.words),
        )
        self._chunks.append(table)
        for column in (self._ts_ns, self._ops, self._hashes, self._parents, self._where):
            column.clear()

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(chunk.num_rows for chunk in self._chunks) + len(self._ops)

    def tables(self) -> dict[str, pa.Table]:
        """The rows so far, by table; those without rows are left out."""
        self._flush()
        tables = {}
        if self._chunks:
            tables["cache_events"] = pa.concat_tables(self._chunks).unify_dictionaries().cast(TABLES["cache_events"])
        if self._losses:
            ts_ns, what, count, detail = (list(column) for column in zip(*self._losses, strict=True))
            tables["losses"] = build_table(
                "losses", len(ts_ns), ts_ns=ts_ns, probe="kv_events", what=what, count=count, detail=detail
            )
        return tables

    def findings(self) -> Iterator[str]:
        """What was wrong with the stream, a line each."""
        if self.missing:
            yield f"{self.missing:,} batches are missing; what was cached before the last gap is unknown since"
        if self.restarts:
            yield f"the publisher restarted {self.restarts:,} times; what was cached before is gone"
        if self.repeated:
            yield f"{self.repeated:,} batches came twice or late and are left out"
        if self.undecodable:
            yield f"{self.undecodable:,} batches or events are of no known form and are left out"

    def facts(self) -> dict[str, Any]:
        """Small truths for the manifest."""
        return {
            "batches": self.batches,
            "events": self.events,
            "blocks": self.blocks,
            "missing_batches": self.missing,
            "restarts": self.restarts,
            "block_tokens": self.block_tokens,
            "groups": sorted(self.groups),
            "windowed_groups": sorted(self.windowed_groups),
            "publishers": len(self._publishers),
        }


def _names(hashes: list[Hash | None], where: npt.NDArray[np.int64], before: list[str]) -> pa.Array:
    """The names of blocks as text, '' for None: what stands ``before`` names at a place, and 16 digits of a number."""
    known = np.array([value is not None for value in hashes])
    plain = np.array([not text for text in before])[where] | ~known
    try:
        numbers = np.array([value for value in hashes if value is not None], np.uint64)
    except (TypeError, ValueError, OverflowError):
        numbers = None
    if numbers is None or not plain.all():
        texts = ("" if v is None else f"{v:016x}" if isinstance(v, int) else v for v in hashes)
        return pa.array([before[w] + t if t else "" for w, t in zip(where.tolist(), texts, strict=True)], pa.string())
    ends = np.concatenate([[0], np.cumsum(np.where(known, 16, 0))]).astype(np.int32)
    digits = numbers.astype(">u8").tobytes().hex().encode()
    return pa.StringArray.from_buffers(len(hashes), pa.py_buffer(ends), pa.py_buffer(digits))

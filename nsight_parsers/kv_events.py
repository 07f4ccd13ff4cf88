"""KV-cache events of vLLM and SGLang: from msgpack payloads to rows of ``cache_events``.

Both engines publish batches of ``BlockStored``, ``BlockRemoved`` and ``AllBlocksCleared`` with a sequence number each
(vllm/distributed/kv_events.py, sglang/srt/disaggregation/kv_events.py). The form has changed over releases: a batch is
an array ``[ts, events, rank]`` or a map, an event an array with its name first (its tail kept growing) or a map with
``type``; hashes are 64-bit numbers, signed or not, or bytes. All of these decode here; fields that nobody knows and
tails that are missing are no error. **Token ids, extra keys, salts and session ids are the user's prompt: they are
dropped at once and stand in no row.**

An event says neither who holds a block nor when it is let go: ``BlockRemoved`` is the eviction from the prefix table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from leakscope.model.tables import TABLES
from leakscope.model.words import CACHE_OPS
from nsight_parsers import ReportError
from nsight_parsers.arrow import Coded, Interned, build_table
from nsight_parsers.kv_sequence import Order, Sequence

EXTRA = "pip install 'leakscope[cache]'"
FULL_ATTENTION = (None, "full_attention", "mla_attention")
"""Kinds of KV-cache groups whose requests hold all blocks up to their last (vllm/v1/kv_cache_interface.py); others hold
a window of them, or a state."""
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
ARRAY_FIELDS = {
    STORED: (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        *("medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    REMOVED: ("block_hashes", "medium", "group_idx"),
    CLEARED: (),
}
"""Positions behind the name in the array form, as of its last release (vLLM 0.22); older ones end sooner."""
DEFAULT_MEDIUM = "GPU"
INSERT, EVICT = CACHE_OPS.index("insert"), CACHE_OPS.index("evict")
MAX_PAYLOAD_BYTES = 64 << 20
MAX_BLOCKS_OF_EVENT = 1 << 20
MAX_TEXT = 64
MAX_PLACES, MAX_PUBLISHERS, MAX_LOSSES = 256, 256, 100_000
MASK = (1 << 64) - 1
CHUNK_ROWS = 100_000

LIMITS = [
    "the events tell no reference count, no request and no hit: who holds a block is inferred from what stays when "
    "everything else is evicted",
    "sizes in bytes are not in the events",
]


class Stored(NamedTuple):
    """Blocks that entered the prefix table, each the parent of the next. ``parent`` is that of the first."""

    hashes: list[str]
    parent: str
    medium: str
    group: int
    block_tokens: int
    prefix_held: bool = True  # who holds a block of this group holds its whole prefix: not so with sliding windows


class Removed(NamedTuple):
    """Blocks that left the prefix table."""

    hashes: list[str]
    medium: str
    group: int


class Cleared(NamedTuple):
    """The whole prefix table was dropped, which engines do only while no block is held."""


class Batch(NamedTuple):
    """One batch. ``ts_ns`` is UTC; ``rank`` the data-parallel rank, 0 where none is given."""

    ts_ns: int
    rank: int
    events: list[Stored | Removed | Cleared]
    unknown: int  # events that are none of the three, or have no usable hashes


class PayloadError(ValueError):
    """A payload that is no batch of KV events."""


def decode_batch(payload: bytes) -> Batch:
    """The batch in a msgpack ``payload``. Raises PayloadError for anything else, ReportError without msgpack."""
    batch = _unpacked(payload)
    if isinstance(batch, dict):
        ts, events = batch.get("ts"), batch.get("events")
        rank = batch.get("data_parallel_rank", batch.get("attn_dp_rank"))
    elif isinstance(batch, list) and len(batch) >= 2:
        ts, events, rank = batch[0], batch[1], batch[2] if len(batch) > 2 else None
    else:
        raise PayloadError("no batch of KV events: neither an array of a time and events, nor a map of them")
    if isinstance(ts, bool) or not isinstance(ts, int | float) or not 0 < ts < 1 << 33 or not isinstance(events, list):
        raise PayloadError("no batch of KV events: no time in seconds, or no list of events")
    decoded = [_event(event) for event in events]
    known = [event for event in decoded if event is not None]
    return Batch(
        round(ts * 1e9), rank if isinstance(rank, int) and 0 < rank < 1 << 15 else 0, known, len(decoded) - len(known)
    )


def _unpacked(payload: bytes) -> Any:
    try:
        import msgpack
    except ImportError:
        raise ReportError(f"KV events need msgpack: {EXTRA}") from None
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise PayloadError(f"a payload of more than {MAX_PAYLOAD_BYTES >> 20} MiB")
    try:
        return msgpack.unpackb(payload, strict_map_key=False, unicode_errors="replace", timestamp=0)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise PayloadError(f"no msgpack: {type(error).__name__}") from None


def _event(event: Any) -> Stored | Removed | Cleared | None:
    if isinstance(event, dict):
        name, fields = event.get("type"), event
    elif isinstance(event, list) and event and isinstance(event[0], str):
        name = event[0]
        fields = dict(zip(ARRAY_FIELDS.get(name, ()), event[1:], strict=False))
    else:
        return None
    if name == CLEARED:
        return Cleared()
    if name not in (STORED, REMOVED):
        return None
    given = fields.get("block_hashes")
    if not isinstance(given, list) or not given or len(given) > MAX_BLOCKS_OF_EVENT:
        return None
    hashes = [_hash(value) for value in given]
    if not all(hashes):
        return None
    medium, group = _text(fields.get("medium")) or DEFAULT_MEDIUM, fields.get("group_idx")
    group = group if isinstance(group, int) and 0 <= group < 1 << 15 else 0
    if name == REMOVED:
        return Removed(hashes, medium, group)
    tokens, spec = fields.get("block_size"), fields.get("kv_cache_spec_kind")
    return Stored(
        hashes,
        _hash(fields.get("parent_block_hash")),
        medium,
        group,
        tokens if isinstance(tokens, int) else 0,
        spec in FULL_ATTENTION,
    )


def _hash(value: Any) -> str:
    """16 hexadecimal digits of a number, signed or not; all digits of bytes; '' for no hash."""
    if type(value) is int:
        return f"{value & MASK:016x}"
    return value.hex() if isinstance(value, bytes) and len(value) <= MAX_TEXT else ""


def _text(value: Any) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else ""


Frame = tuple[str, int, bytes]
"""Topic, sequence number and payload of a batch."""
Refill = Callable[[range], Iterable[Frame]]


@dataclass
class _Publisher:
    """One publisher: an engine, or one data-parallel rank of it. ``suffix`` tells its media from those of others."""

    suffix: str
    sequence: Sequence = field(default_factory=Sequence)
    media: dict[str, None] = field(default_factory=dict)
    places: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)


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
        self._columns: dict[str, list[Any]] = {name: [] for name in ("ts_ns", "op", "object", "parent", "medium")}
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
        if len(self._columns["ts_ns"]) >= CHUNK_ROWS:
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
        ts_ns, ops, objects, parents, media = self._columns.values()
        for event in batch.events:
            if isinstance(event, Cleared):
                self._row("clear", "", "", DEFAULT_MEDIUM + publisher.suffix)
                continue
            known = publisher.places.get((event.medium, event.group))
            place, medium = known or self._place(publisher, event.medium, event.group)
            names = [place + name for name in event.hashes] if place else event.hashes
            count = len(names)
            stored = isinstance(event, Stored)
            ts_ns.extend(range(self._now_ns + 1, self._now_ns + 1 + count))
            self._now_ns += count
            self.blocks += count
            ops.extend([INSERT if stored else EVICT] * count)
            objects.extend(names)
            media.extend([medium] * count)
            if isinstance(event, Stored):
                self.block_tokens = self.block_tokens or event.block_tokens
                if not event.prefix_held:
                    self.windowed_groups.add(event.group)
                parents.append(place + event.parent if event.parent else "")
                parents.extend(names[:-1])
            else:
                parents.extend([""] * count)

    def _place(self, publisher: _Publisher, medium: str, group: int) -> tuple[str, int]:
        """(what stands before the names of blocks there, the code of the medium), of a place that is new."""
        if len(self._media.words) >= MAX_PLACES or len(publisher.places) >= MAX_PLACES:
            medium, group = "other", 0
        whole = medium + publisher.suffix
        publisher.media[whole] = None
        self.groups.add(group)
        place = ("" if whole == DEFAULT_MEDIUM else f"{whole}/") + (f"g{group}/" if group else "")
        found = (place, self._media.code(whole))
        if len(publisher.places) < MAX_PLACES:
            publisher.places[medium, group] = found
        return found

    def _without_object(self, op: str, publisher: _Publisher) -> None:
        for medium in publisher.media or {"": None}:
            self._row(op, "", "", medium)

    def _row(self, op: str, name: str, parent: str, medium: str) -> None:
        self._now_ns += 1
        values = (self._now_ns, CACHE_OPS.index(op), name, parent, self._media.code(medium))
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def _flush(self) -> None:
        rows = len(self._columns["ts_ns"])
        if rows:
            ops = Coded(np.array(self._columns["op"], np.int16), CACHE_OPS)
            media = Coded(np.array(self._columns["medium"], np.int16), self._media.words)
            columns = {**self._columns, "op": ops, "medium": media}
            self._chunks.append(build_table("cache_events", rows, **columns))
            for column in self._columns.values():
                column.clear()

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(chunk.num_rows for chunk in self._chunks) + len(self._columns["ts_ns"])

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

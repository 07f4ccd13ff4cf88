"""A versioned table of blocks, told to replicas in messages of 8 bytes a block, and safe against what networks do.

The owner of the blocks (:class:`BlockTable`) raises a block's version whenever its content changes and broadcasts
(block id, version) alone. Each message carries the owner's *incarnation*, which is higher after each restart, and a
*sequence* number without holes. A replica (:class:`BlockReplica`) applies messages in sequence: what arrives twice or
too late it drops, what arrives too early it keeps back, and after a loss it answers "unknown", never something old,
until the missing messages were replayed or it got a snapshot. What it cannot notice is the loss of the newest
messages: send :meth:`BlockTable.heartbeat` while nothing changes, and the replica notices with the next of these.
"""

from __future__ import annotations

import enum
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from leakscope.cachekit.events import EventLog, Row

_HEADER = struct.Struct(">4sBQQI")
_BLOCK = struct.Struct(">II")
MAGIC = b"lsb1"
MAX_BLOCKS = 1 << 24
"""Blocks in a message (128 MiB)."""
LAST_VERSION = (1 << 32) - 1
ABSENT = 0
"""The version of a block that holds nothing."""


class Kind(enum.IntEnum):
    """What a message is."""

    UPDATE = 0  # blocks whose version changed; takes a sequence number
    HEARTBEAT = 1  # no blocks; ``sequence`` is that of the next update
    SNAPSHOT = 2  # all blocks, as they are before the update ``sequence``


class Block(NamedTuple):
    """A block and its version, 1 and up; :data:`ABSENT` when it holds nothing."""

    block_id: int
    version: int


class Message(NamedTuple):
    """One broadcast, 25 bytes and 8 a block."""

    kind: Kind
    incarnation: int
    sequence: int
    blocks: tuple[Block, ...] = ()

    def pack(self) -> bytes:
        """Big-endian: magic, kind u8, incarnation u64, sequence u64, count u32; then block id u32, version u32 each."""
        head = _HEADER.pack(MAGIC, self.kind, self.incarnation, self.sequence, len(self.blocks))
        return head + b"".join(_BLOCK.pack(*block) for block in self.blocks)

    @classmethod
    def unpack(cls, data: bytes) -> Message:
        """Raises ValueError for bytes that are no whole message."""
        if len(data) < _HEADER.size or data[:4] != MAGIC:
            raise ValueError("no block message")
        _, kind, incarnation, sequence, count = _HEADER.unpack_from(data)
        if count > MAX_BLOCKS or len(data) != _HEADER.size + count * _BLOCK.size:
            raise ValueError(f"a block message of {count} blocks in {len(data)} bytes")
        blocks = tuple(Block(*pair) for pair in _BLOCK.iter_unpack(memoryview(data)[_HEADER.size :]))
        return cls(Kind(kind), incarnation, sequence, blocks)


class BlockTable:
    """The owner's table. ``send`` gets each message, in the order of their sequence numbers, under the table's lock.

    ``incarnation`` must be higher than that of any earlier table that the same replicas heard; default: the time in
    nanoseconds. The last ``replayed`` messages can be sent again. ``log`` gets a line ``send`` for each block of each
    update, as ``node``. Thread-safe.
    """

    def __init__(
        self,
        send: Callable[[Message], object],
        *,
        incarnation: int | None = None,
        replayed: int = 10_000,
        log: EventLog | None = None,
        node: str = "owner",
    ) -> None:
        self._send = send
        self._log, self._node = log, node
        self._lock = threading.Lock()
        self._incarnation = time.time_ns() if incarnation is None else incarnation
        self._sequence = 0
        self._versions: dict[int, int] = {}
        self._sent: deque[Message] = deque(maxlen=replayed)

    @property
    def incarnation(self) -> int:
        """That of the messages now."""
        return self._incarnation

    @property
    def sequence(self) -> int:
        """That of the next update."""
        return self._sequence

    def version(self, block_id: int) -> int:
        """The version now; ABSENT (0) for a block that holds nothing."""
        with self._lock:
            return max(0, self._versions.get(block_id, ABSENT))

    def changed(self, *block_ids: int) -> Message:
        """The content of blocks has changed: one message with their new versions.

        A version never comes back while the incarnation lasts, removed blocks included. When one would pass 2³² − 1,
        a new incarnation begins with a snapshot. Raises ValueError for an id that is no u32.
        """
        return self._update(block_ids, lambda last: abs(last) + 1)

    def removed(self, *block_ids: int) -> Message:
        """Blocks hold nothing any more: one message."""
        return self._update(block_ids, lambda last: -abs(last))

    def heartbeat(self) -> Message:
        """Sends the sequence number of the next update, by which a replica notices that it misses the last ones."""
        with self._lock:
            message = Message(Kind.HEARTBEAT, self._incarnation, self._sequence)
            self._send(message)
            return message

    def snapshot(self) -> Message:
        """All blocks that hold something, for a replica that starts or has missed too much. Not sent."""
        with self._lock:
            return self._snapshot()

    def replay(self, incarnation: int, sequence: int) -> list[Message]:
        """The updates from ``sequence`` on, or a snapshot where they are not kept any more or are of an earlier
        incarnation. Not sent."""
        with self._lock:
            kept = [message for message in self._sent if message.sequence >= sequence]
            if incarnation == self._incarnation and len(kept) == self._sequence - sequence:
                return kept
            return [self._snapshot()]

    def _update(self, block_ids: Iterable[int], new: Callable[[int], int]) -> Message:
        # In the table, -v is a removed block whose last version was v: should it come back, it does with v + 1.
        with self._lock:
            ids = tuple(dict.fromkeys(block_ids))
            if any(not 0 <= block_id <= LAST_VERSION for block_id in ids):
                raise ValueError("a block id is from 0 to 2³² − 1")
            versions = {block_id: new(self._versions.get(block_id, ABSENT)) for block_id in ids}
            if any(version > LAST_VERSION for version in versions.values()):
                return self._renewed(versions)
            self._versions |= versions
            blocks = tuple(Block(block_id, max(ABSENT, version)) for block_id, version in versions.items())
            message = Message(Kind.UPDATE, self._incarnation, self._sequence, blocks)
            self._sequence += 1
            self._sent.append(message)
            _write(self._log, self._node, "send", message)
            self._send(message)
            return message

    def _renewed(self, versions: dict[int, int]) -> Message:
        """A new incarnation, in which all blocks that hold something have version 1."""
        self._versions = {block_id: 1 for block_id, version in (self._versions | versions).items() if version > 0}
        self._incarnation += 1
        self._sequence = 0
        self._sent.clear()
        message = self._snapshot()
        self._send(message)
        return message

    def _snapshot(self) -> Message:
        blocks = tuple(Block(block_id, version) for block_id, version in self._versions.items() if version > 0)
        return Message(Kind.SNAPSHOT, self._incarnation, self._sequence, blocks)


class Outcome(enum.Enum):
    """What a replica did with a message."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    """Known already, or older than a snapshot."""
    EARLY = "early"
    """Kept back: messages before it are missing."""
    GAP = "gap"
    """Messages are missing and this one was not kept back."""
    RESTARTED = "restarted"
    """Of a new incarnation, all of it from the beginning; what was known is dropped."""
    OUTDATED = "outdated"
    """Of an earlier incarnation: dropped."""


class BlockReplica:
    """What a receiver knows of the owner's blocks. At most ``kept_back`` early messages wait. Thread-safe.

    ``log`` gets, as ``node``, lines ``receive``, ``apply`` and ``snapshot`` of messages, and ``read`` of look-ups.
    """

    def __init__(self, *, kept_back: int = 1_000, log: EventLog | None = None, node: str = "replica") -> None:
        self._log, self._node = log, node
        self._lock = threading.Lock()
        self._kept_back = kept_back
        self._incarnation = -1
        self._next = 0
        self._seen = 0  # one more than the highest sequence heard of
        self._versions: dict[int, int] = {}
        self._early: dict[int, Message] = {}
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        """Messages by what was done with them."""

    @property
    def synced(self) -> bool:
        """Whether all messages that it heard of were applied."""
        with self._lock:
            return self._synced()

    def version(self, block_id: int) -> int | None:
        """The version now, as far as it has heard; ABSENT for a block that holds nothing, None for unknown."""
        with self._lock:
            version = self._versions.get(block_id, ABSENT) if self._synced() else None
            if self._log is not None:
                at: Row = {"node": self._node, "incarnation": self._incarnation, "seq": self._next}
                self._log.write("read", {**at, "block": str(block_id), "version": version})
            return version

    def is_current(self, block_id: int, version: int) -> bool:
        """Whether a copy of ``block_id`` made at ``version`` may be used. False where it cannot tell."""
        return version != ABSENT and self.version(block_id) == version

    def wanted(self) -> tuple[int, int] | None:
        """(incarnation, sequence) to ask :meth:`BlockTable.replay` for; None when nothing is known to be missing.

        (-1, 0) before the first message.
        """
        with self._lock:
            return None if self._synced() else (self._incarnation, self._next)

    def apply(self, message: Message) -> Outcome:
        """Takes a message in; what it did."""
        with self._lock:
            if message.kind is Kind.UPDATE:
                _write(self._log, self._node, "receive", message)
            outcome = self._apply(message)
            self.outcomes[outcome] += 1
            return outcome

    def _synced(self) -> bool:
        return self._incarnation >= 0 and self._next >= self._seen

    def _apply(self, message: Message) -> Outcome:
        if message.incarnation < self._incarnation:
            return Outcome.OUTDATED
        restarted = message.incarnation > self._incarnation
        if restarted:
            self._incarnation, self._next, self._seen = message.incarnation, 0, 0
            self._versions, self._early = {}, {}
        if message.kind is Kind.SNAPSHOT:
            if not restarted and message.sequence < self._next:
                return Outcome.DUPLICATE
            _write(self._log, self._node, "snapshot", message)
            self._versions = dict(message.blocks)
            self._next = message.sequence
            self._seen = max(self._seen, self._next)
            self._take_early()
            return Outcome.RESTARTED if restarted else Outcome.APPLIED
        end = message.sequence + (message.kind is Kind.UPDATE)
        self._seen = max(self._seen, end)
        if message.kind is Kind.HEARTBEAT:
            if message.sequence > self._next:
                return Outcome.GAP
            return Outcome.RESTARTED if restarted else Outcome.APPLIED
        if message.sequence < self._next:
            return Outcome.DUPLICATE
        if message.sequence > self._next:
            if message.sequence in self._early:
                return Outcome.DUPLICATE
            if len(self._early) >= self._kept_back:
                return Outcome.GAP
            self._early[message.sequence] = message
            return Outcome.EARLY
        self._take(message)
        self._take_early()
        return Outcome.RESTARTED if restarted else Outcome.APPLIED

    def _take_early(self) -> None:
        while (message := self._early.pop(self._next, None)) is not None:
            self._take(message)
        self._early = {sequence: early for sequence, early in self._early.items() if sequence > self._next}

    def _take(self, message: Message) -> None:
        _write(self._log, self._node, "apply", message)
        for block_id, version in message.blocks:
            if version == ABSENT:
                self._versions.pop(block_id, None)
            else:
                self._versions[block_id] = version
        self._next = message.sequence + 1


def _write(log: EventLog | None, node: str, op: str, message: Message) -> None:
    """A line for each block of the message, one without a block where it has none."""
    if log is None:
        return
    common: Row = {"node": node, "incarnation": message.incarnation, "seq": message.sequence}
    rows: list[Row] = [{**common, "block": str(block_id), "version": version} for block_id, version in message.blocks]
    log.write(op, *(rows or [common]))

"""Sequence numbers of KV-event batches: what is missing, what came twice, when the publisher began anew."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from enum import Enum

REMEMBERED = 20_000
"""Batches of which a repetition is told from a restart; vLLM keeps 10,000 for replay unless told otherwise."""


class Order(Enum):
    """How a batch follows on the ones before it."""

    NEXT = "next"
    GAP = "gap"  # batches before it are missing
    REPEATED = "repeated"  # it was here before, or comes too late
    RESTART = "restart"  # the publisher began anew


class Sequence:
    """The sequence numbers of one publisher. They count batches from 0; a lower one is a repetition or a restart."""

    def __init__(self) -> None:
        self.last = -1
        self._last_ns = 0
        self._seen: OrderedDict[int, int] = OrderedDict()

    def order(self, number: int, ts_ns: int, payload: bytes) -> Order:
        """Where batch ``number`` of time ``ts_ns`` belongs; nothing changes."""
        if number == self.last + 1:
            return Order.NEXT
        if number > self.last:
            return Order.GAP
        if ts_ns < self._last_ns or self._seen.get(number) == zlib.crc32(payload):
            return Order.REPEATED
        return Order.RESTART

    def restart(self) -> None:
        """The publisher counts from 0 again."""
        self.last = -1
        self._seen.clear()

    def accept(self, number: int, ts_ns: int, payload: bytes) -> None:
        """Batch ``number`` is the last one now."""
        self.last, self._last_ns = number, ts_ns
        self._seen[number] = zlib.crc32(payload)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

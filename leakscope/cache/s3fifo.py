"""S3-FIFO: three queues, no order to maintain on a hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping

from leakscope.cachekit.policies import Order

SMALL_SHARE = 0.1
MOST = 3
"""Hits are counted up to here (two bits)."""


class S3FIFO(Order):
    """Yang et al.: FIFO queues are all you need for cache eviction, SOSP 2023, algorithm 1.

    New keys go into a small queue of a tenth of the cache. Who was hit more than once there moves on to the main
    queue, the others go and are remembered in a ghost queue of as many keys as the main queue has; who comes back
    from there goes into the main queue at once. That one gives every key another round for each hit, three at most.
    """

    def __init__(self, capacity: float, sizes: Mapping[Hashable, int]) -> None:
        """``capacity``: of the cache; ``sizes``: of keys, in the same unit."""
        self._small_size = self._main_size = 0
        self._target, self._capacity, self._sizes = SMALL_SHARE * capacity, capacity, sizes
        self._small: OrderedDict[Hashable, int] = OrderedDict()  # key: hits
        self._main: OrderedDict[Hashable, int] = OrderedDict()
        self._ghost: OrderedDict[Hashable, None] = OrderedDict()

    def admit(self, key: Hashable, now: float) -> None:
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = 0
            self._main_size += self._sizes[key]
        else:
            self._small[key] = 0
            self._small_size += self._sizes[key]

    def touch(self, key: Hashable, now: float) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(MOST, queue[key] + 1)

    def forget(self, key: Hashable, now: float) -> None:
        if key in self._main:
            del self._main[key]
            self._main_size -= self._sizes[key]
            return
        del self._small[key]
        self._small_size -= self._sizes[key]
        self._ghost[key] = None
        while len(self._ghost) > max(1, len(self._main)):
            self._ghost.popitem(last=False)

    def victim(self, now: float) -> Hashable | None:
        if self._small_size >= self._target or not self._main:
            while self._small:
                key = next(iter(self._small))
                hits = self._small[key]
                if hits <= 1:
                    return key
                del self._small[key]
                self._main[key] = 0
                self._small_size -= self._sizes[key]
                self._main_size += self._sizes[key]
                if self._main_size > self._capacity - self._target:
                    break
        while self._main:
            key = next(iter(self._main))
            hits = self._main[key]
            if not hits:
                return key
            self._main.move_to_end(key)
            self._main[key] = hits - 1
        return next(iter(self._small), None)

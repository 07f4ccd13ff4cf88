"""Which entry of a full cache goes next.

A policy ranks keys; it neither stores values nor knows sizes. Held keys (those with strong handles) are never
victims. Times are seconds of the cache's timer. Policies are not thread-safe: the cache calls them under its lock.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable

DECAY_PER_MINUTE = 0.1
"""The rate of the weight ``k·e^(−0.1·age/60)``, age in seconds."""


class Order(ABC):
    """In which order keys leave a full cache."""

    @abstractmethod
    def admit(self, key: Hashable, now: float) -> None:
        """``key`` comes into the cache, which counts as a reference."""

    @abstractmethod
    def touch(self, key: Hashable, now: float) -> None:
        """``key``, which is in the cache, was referenced."""

    @abstractmethod
    def forget(self, key: Hashable, now: float) -> None:
        """``key`` has left the cache."""

    @abstractmethod
    def victim(self, now: float) -> Hashable | None:
        """The key to evict next, which stays ranked; None when there is none that may go."""


class Policy(Order):
    """What a cache asks of its eviction policy: an order that leaves out keys while they are held."""

    @abstractmethod
    def hold(self, key: Hashable) -> None:
        """``key`` cannot be a victim until :meth:`unhold`."""

    @abstractmethod
    def unhold(self, key: Hashable, now: float) -> None:
        """``key`` can be a victim again."""


class LRU(Policy):
    """Least recently used first. A key whose last handle is released counts as used then. O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()

    def admit(self, key: Hashable, now: float) -> None:
        self._order[key] = None

    def touch(self, key: Hashable, now: float) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def hold(self, key: Hashable) -> None:
        self._order.pop(key, None)

    def unhold(self, key: Hashable, now: float) -> None:
        self._order[key] = None

    def forget(self, key: Hashable, now: float) -> None:
        self._order.pop(key, None)

    def victim(self, now: float) -> Hashable | None:
        return next(iter(self._order), None)


class Ranked(Policy):
    """Base of policies whose order between two references does not change with time: a heap, O(log n) a reference.

    Heap items are left behind when a key is ranked anew and skipped when they come up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Hashable]] = []
        self._item: dict[Hashable, int] = {}  # evictable key: number of its valid heap item
        self._pushed = 0

    @abstractmethod
    def rank(self, key: Hashable) -> tuple[float, ...]:
        """The smallest goes first; among equals the one that was ranked first."""

    def hold(self, key: Hashable) -> None:
        self._item.pop(key, None)

    def unhold(self, key: Hashable, now: float) -> None:
        self._push(key)

    def victim(self, now: float) -> Hashable | None:
        while self._heap:
            _, number, key = self._heap[0]
            if self._item.get(key) == number:
                return key
            heapq.heappop(self._heap)
        return None

    def _push(self, key: Hashable) -> None:
        self._pushed += 1
        self._item[key] = self._pushed
        heapq.heappush(self._heap, (self.rank(key), self._pushed, key))
        if len(self._heap) > 2 * len(self._item) + 64:
            self._heap = [item for item in self._heap if self._item.get(item[2]) == item[1]]
            heapq.heapify(self._heap)


class LRUK(Ranked):
    """Evicts the key with the largest backward K-distance: whose K-th most recent uncorrelated reference is oldest.

    Keys with fewer than ``k`` references are infinitely far back and go first, least recently used among them. The
    history of a key outlives its eviction by ``retained_s``: without that no key that is evicted before its K-th
    reference could ever earn its place. References at most ``correlated_s`` apart count as one, and a key is no
    victim that soon after a reference, unless all are. (O'Neil, O'Neil, Weikum: The LRU-K page replacement algorithm
    for database disk buffering, SIGMOD 1993.) At most ``retained_keys`` histories of absent keys are kept.
    """

    def __init__(
        self, k: int = 2, *, correlated_s: float = 0.0, retained_s: float = 200.0, retained_keys: int = 100_000
    ) -> None:
        if k < 1:
            raise ValueError(f"LRU-K needs k ≥ 1, not {k}")
        super().__init__()
        self.k, self.correlated_s, self.retained_s, self.retained_keys = k, correlated_s, retained_s, retained_keys
        self._history: dict[Hashable, list[float]] = {}  # up to k uncorrelated references, newest first
        self._last: dict[Hashable, float] = {}  # newest reference, correlated or not
        self._absent: OrderedDict[Hashable, None] = OrderedDict()  # evicted keys with history, longest evicted first

    def admit(self, key: Hashable, now: float) -> None:
        self._absent.pop(key, None)
        if key in self._last and now - self._last[key] > self.retained_s:
            del self._history[key], self._last[key]
        self._prune(now)
        self._history[key] = [now, *self._history.get(key, ())][: self.k]
        self._last[key] = now
        self._push(key)

    def touch(self, key: Hashable, now: float) -> None:
        times, last = self._history[key], self._last[key]
        if now - last > self.correlated_s or not self.correlated_s:
            # Time inside a correlated burst is taken out, as if the burst had been one moment.
            burst = last - times[0]
            self._history[key] = [now, *(time + burst for time in times)][: self.k]
        self._last[key] = now
        if key in self._item:
            self._push(key)

    def forget(self, key: Hashable, now: float) -> None:
        self._item.pop(key, None)
        self._absent[key] = None
        self._prune(now)

    def victim(self, now: float) -> Hashable | None:
        best = super().victim(now)
        if best is None or not self.correlated_s or now - self._last[best] > self.correlated_s:
            return best
        skipped, chosen = [], best
        while (key := super().victim(now)) is not None:
            if now - self._last[key] > self.correlated_s:
                chosen = key
                break
            skipped.append(heapq.heappop(self._heap))
        for item in skipped:
            heapq.heappush(self._heap, item)
        return chosen

    def rank(self, key: Hashable) -> tuple[float, ...]:
        times = self._history[key]
        return (times[-1] if len(times) == self.k else -math.inf, self._last[key])

    def _prune(self, now: float) -> None:
        """Forgets absent keys. The order is that of evictions, so a key may outstay its time behind a younger one."""
        while self._absent:
            key = next(iter(self._absent))
            if len(self._absent) <= self.retained_keys and now - self._last[key] <= self.retained_s:
                return
            del self._absent[key], self._history[key], self._last[key]


class DecayedCount(Ranked):
    """The weight ``k·e^(−rate·age/60)``: k references so far, age in seconds since the last one.

    This is a count with a recency discount, not LRU-K: there is no K-th reference and no history after eviction.
    The weight halves in :attr:`half_life_s` = 60·ln 2/rate, 415.9 s at the usual rate of 0.1; after 60 s it is still
    0.905, after 300 s 0.607. As all weights decay alike, their order is that of ``ln k + rate·t_last/60``, which does
    not change with time. One more reference makes all earlier ones as fresh as itself; :class:`LRFU` ages each.
    """

    def __init__(self, rate_per_minute: float = DECAY_PER_MINUTE) -> None:
        if not rate_per_minute > 0:
            raise ValueError(f"the decay must be above 0 a minute, not {rate_per_minute}")
        super().__init__()
        self.rate_per_s = rate_per_minute / 60
        self._count: dict[Hashable, int] = {}
        self._last: dict[Hashable, float] = {}

    @property
    def half_life_s(self) -> float:
        """Seconds in which an untouched entry loses half its weight."""
        return math.log(2) / self.rate_per_s

    def weight(self, key: Hashable, now: float) -> float:
        """``k·e^(−rate·age)`` of a key in the cache. KeyError for others."""
        return self._count[key] * math.exp(-self.rate_per_s * (now - self._last[key]))

    def admit(self, key: Hashable, now: float) -> None:
        self._count[key], self._last[key] = 1, now
        self._push(key)

    def touch(self, key: Hashable, now: float) -> None:
        self._count[key] += 1
        self._last[key] = now
        if key in self._item:
            self._push(key)

    def forget(self, key: Hashable, now: float) -> None:
        self._item.pop(key, None)
        self._count.pop(key, None)
        self._last.pop(key, None)

    def rank(self, key: Hashable) -> tuple[float, ...]:
        return (math.log(self._count[key]) + self._last[key] * self.rate_per_s,)


class LRFU(Ranked):
    """Combined recency and frequency: each reference counts 1 and halves every ``half_life_s`` by itself.

    C ← 1 + C·2^(−Δt/h) at a reference (Lee et al.: LRFU, IEEE Transactions on Computers 50(12), 2001). A short
    half-life is LRU, a long one LFU.
    """

    def __init__(self, half_life_s: float = 60 * math.log(2) / DECAY_PER_MINUTE) -> None:
        if not half_life_s > 0:
            raise ValueError(f"the half-life must be above 0 s, not {half_life_s}")
        super().__init__()
        self.half_life_s = half_life_s
        self._value: dict[Hashable, float] = {}
        self._last: dict[Hashable, float] = {}

    def weight(self, key: Hashable, now: float) -> float:
        """C of a key in the cache at ``now``. KeyError for others."""
        return self._value[key] * 2.0 ** (-(now - self._last[key]) / self.half_life_s)

    def admit(self, key: Hashable, now: float) -> None:
        self._value[key], self._last[key] = 1.0, now
        self._push(key)

    def touch(self, key: Hashable, now: float) -> None:
        self._value[key] = 1.0 + self.weight(key, now)
        self._last[key] = now
        if key in self._item:
            self._push(key)

    def forget(self, key: Hashable, now: float) -> None:
        self._item.pop(key, None)
        self._value.pop(key, None)
        self._last.pop(key, None)

    def rank(self, key: Hashable) -> tuple[float, ...]:
        return (math.log2(self._value[key]) + self._last[key] / self.half_life_s,)

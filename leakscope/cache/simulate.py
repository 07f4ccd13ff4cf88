"""Replays of a trace under eviction policies: what each would have missed, and how much was stale.

The policies are those of :mod:`leakscope.cachekit` themselves, so what is measured is what a service would run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leakscope.cache.s3fifo import S3FIFO
from leakscope.cache.traces import Trace
from leakscope.cachekit.policies import LRFU, LRU, LRUK, DecayedCount, Order
from leakscope.errors import BadInputError

BELADY = "belady"
INFINITE = "infinite"
MAX_K = 16


@dataclass(frozen=True)
class Replay:
    """One policy at one capacity. Ratios are of all references; bytes are those of references."""

    policy: str
    capacity: float  # objects, or bytes
    requests: int
    misses: int
    """References that found nothing, or something past its time."""
    stale: int
    """Of these: found, but past its time."""
    usable_misses: int | None
    """References that could not be used as they or one before them in their request missed; None without requests."""
    bytes: int
    missed_bytes: int
    evictions: int
    bound: bool = False
    """Whether no policy can miss less at this capacity (one that inserts what it misses)."""

    @property
    def miss_ratio(self) -> float:
        """Misses of references."""
        return self.misses / self.requests

    @property
    def stale_ratio(self) -> float:
        """Stale ones of references."""
        return self.stale / self.requests

    @property
    def byte_miss_ratio(self) -> float:
        """Missed bytes of referenced bytes."""
        return self.missed_bytes / self.bytes

    def to_json(self) -> dict[str, object]:
        """Plain JSON types."""
        return {
            "policy": self.policy,
            "capacity": None if math.isinf(self.capacity) else self.capacity,
            "requests": self.requests,
            "misses": self.misses,
            "miss_ratio": self.miss_ratio,
            "usable_miss_ratio": None if self.usable_misses is None else self.usable_misses / self.requests,
            "stale": self.stale,
            "stale_ratio": self.stale_ratio,
            "bytes": self.bytes,
            "missed_bytes": self.missed_bytes,
            "byte_miss_ratio": self.byte_miss_ratio,
            "evictions": self.evictions,
            "bound": self.bound,
        }


@dataclass(frozen=True)
class Options:
    """``by_bytes``: capacities are bytes, else objects. ``ttl_s``: time to live, where the trace gives none itself;
    None: for ever. ``half_life_s``: of LRFU. ``decay_per_minute``: of the decayed count."""

    by_bytes: bool = False
    ttl_s: float | None = None
    half_life_s: float = 60 * math.log(2) / 0.1
    decay_per_minute: float = 0.1


class Belady(Order):
    """Evicts what is needed again last, which needs the future: ``upcoming`` is told by :func:`replay`.

    With objects of one size nothing that inserts each miss misses less (Belady 1966; Mattson et al. 1970).
    """

    def __init__(self) -> None:
        self.upcoming = 0  # when the key of the next call is referenced again
        self._next: dict[Hashable, int] = {}
        self._heap: list[tuple[int, Hashable]] = []

    def admit(self, key: Hashable, now: float) -> None:
        self._next[key] = self.upcoming
        heapq.heappush(self._heap, (-self.upcoming, key))

    touch = admit

    def forget(self, key: Hashable, now: float) -> None:
        del self._next[key]

    def victim(self, now: float) -> Hashable | None:
        while self._heap:
            upcoming, key = self._heap[0]
            if self._next.get(key) == -upcoming:
                return key
            heapq.heappop(self._heap)
        return None


def policy_names() -> str:
    """The names that :func:`policy_of` takes, for messages."""
    return f"lru, lru-K, lru-K-history, decayed, lrfu, s3fifo, {BELADY}, {INFINITE} (K is 1 to {MAX_K})"


def policy_of(name: str, options: Options, capacity: float, sizes: Mapping[Hashable, int]) -> Order:
    """A new policy. ``lru-K`` forgets a key with its eviction; ``lru-K-history`` remembers all. Raises BadInputError
    for an unknown name."""
    plain: dict[str, Callable[[], Order]] = {
        "lru": LRU,
        INFINITE: LRU,
        "decayed": lambda: DecayedCount(options.decay_per_minute),
        "lrfu": lambda: LRFU(options.half_life_s),
        "s3fifo": lambda: S3FIFO(capacity, sizes),
        BELADY: Belady,
    }
    if name in plain:
        return plain[name]()
    start, _, rest = name.partition("-")
    k, _, history = rest.partition("-")
    if start == "lru" and k.isdecimal() and len(k) <= 2 and 1 <= int(k) <= MAX_K and history in ("", "history"):
        remembered = math.inf if history else -1.0
        return LRUK(int(k), retained_s=remembered, retained_keys=10**9 if history else 0)
    raise BadInputError(f"{name}: no such policy; there are {policy_names()}")


def replay(trace: Trace, name: str, capacity: float, options: Options | None = None) -> Replay:
    """Runs one policy over the trace: what is not there is inserted, unless it is larger than the cache.

    ``lru`` and ``lru-K`` count time in references, the others in the trace's seconds. An object past its time to live
    is a miss, and inserted anew. An object keeps the size that it was inserted with. Raises BadInputError for an
    unknown policy and for a capacity not above 0.
    """
    options = options or Options()
    capacity = math.inf if name == INFINITE else capacity
    if not capacity > 0:
        raise BadInputError(f"capacity {capacity}: must be above 0")
    sizes_of: dict[Hashable, int] = {}
    policy = policy_of(name, options, capacity, sizes_of)
    belady = policy if isinstance(policy, Belady) else None
    by_order = isinstance(policy, LRU | LRUK | Belady)
    upcoming = next_references(trace.objects).tolist() if belady else None
    sizes = trace.sizes if options.by_bytes else np.ones(len(trace.objects), np.int64)
    ttls = _ttls(trace, options)
    missed = np.zeros(len(trace.objects), bool)
    expires: dict[int, float] = {}
    used = stale = evictions = 0
    rows = zip(trace.objects.tolist(), trace.times_s.tolist(), sizes.tolist(), ttls.tolist(), strict=True)
    for number, (key, time, size, ttl) in enumerate(rows):
        now = float(number) if by_order else time
        if belady is not None and upcoming is not None:
            belady.upcoming = upcoming[number]
        ends = expires.get(key)
        if ends is not None and time < ends:
            policy.touch(key, now)
            continue
        missed[number] = True
        if ends is not None:  # past its time: inserted anew
            stale += 1
            policy.forget(key, now)
            used -= sizes_of[key]
            del expires[key]
        if size > capacity:
            continue
        while used + size > capacity:
            victim = policy.victim(now)
            assert isinstance(victim, int)
            policy.forget(victim, now)
            used -= sizes_of[victim]
            del expires[victim]
            evictions += 1
        sizes_of[key] = size
        policy.admit(key, now)
        expires[key] = time + ttl
        used += size
    return Replay(
        policy=name,
        capacity=capacity,
        requests=len(missed),
        misses=int(missed.sum()),
        stale=stale,
        usable_misses=None if trace.groups is None else int(after_a_miss(missed, trace.groups).sum()),
        bytes=int(trace.sizes.sum()),
        missed_bytes=int(trace.sizes[missed].sum()),
        evictions=evictions,
        bound=name == INFINITE or (name == BELADY and len(np.unique(sizes)) == 1 and not np.isfinite(ttls).any()),
    )


def next_references(objects: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each reference the position of the next one to the same object; beyond the end, each its own, where there
    is none."""
    count = len(objects)
    order = np.lexsort((np.arange(count), objects))
    following = np.arange(count, 2 * count)
    same = objects[order[1:]] == objects[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def after_a_miss(missed: npt.NDArray[np.bool_], groups: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which references are misses or come after one in their group: a block is of no use without all before it.

    ``groups``: the references of one stand together.
    """
    before = np.concatenate(([0], np.cumsum(missed)))
    starts = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
    of = np.repeat(starts, np.diff(np.concatenate((starts, [len(groups)]))))
    return before[1:] > before[of]


def _ttls(trace: Trace, options: Options) -> npt.NDArray[np.float64]:
    ttl = math.inf if options.ttl_s is None else options.ttl_s
    if trace.ttls_s is None:
        return np.full(len(trace.objects), ttl)
    return np.where(np.isnan(trace.ttls_s), ttl, np.minimum(trace.ttls_s, ttl))

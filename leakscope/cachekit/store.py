"""The state of a cache and its transitions. Not thread-safe: :class:`Cache` calls it under a lock."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from leakscope.cachekit.entries import CacheStats, Entry, Held, Lease
from leakscope.cachekit.events import EventLog
from leakscope.cachekit.generations import Fingerprint, Generations
from leakscope.cachekit.policies import Policy
from leakscope.cachekit.stacks import Stack

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
NANOSECONDS = 1_000_000_000


class CacheFullError(ValueError):
    """No room: what fills the cache is held by strong handles (a ValueError, as cachetools raises for values that
    are too large, so that its decorators work)."""


class Store(Generic[K, V]):
    """Entries, their order of eviction, their deadlines, and the references that are out.

    ``now`` is seconds of the cache's timer everywhere and never goes back from call to call.
    """

    def __init__(
        self,
        name: str,
        maxsize: float,
        policy: Callable[[], Policy],
        fingerprint: Fingerprint | None,
        events: EventLog | None,
        label: Callable[[K], str] | None,
        access_s: float,
    ) -> None:
        self.name, self.maxsize = name, maxsize
        self.generations: Generations[K, V] = Generations(name, policy, fingerprint)
        self.leases: dict[int, Lease[K, V]] = {}
        self.size = 0
        self.resident: dict[int, Entry[K, V]] = {}
        self.counts: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()
        self._events, self._label, self._access_s = events, label, access_s
        self._deadlines: list[tuple[float, int, Entry[K, V]]] = []
        self._number = 0

    # --- lookups

    def found(self, key: Hashable, now: float) -> Entry[K, V] | None:
        """The entry of ``key`` if it may be given out. Neither a lookup nor a use."""
        entry = self.generations.current.entries.get(key)
        return entry if entry is not None and entry.expires_s > now else None

    def looked_up(self, key: K, now: float) -> Entry[K, V] | None:
        """As :meth:`found`, counted, and a use of the entry. An expired one is removed."""
        entry = self.generations.current.entries.get(key)
        if entry is not None and entry.expires_s <= now:
            self.counts["stale"] += 1
            self.remove(entry, "ttl", now)
            entry = None
        return self._counted(entry, now)

    def upgraded(self, entry: Entry[K, V], now: float) -> Entry[K, V] | None:
        """``entry`` itself if it may still be given out: a lookup and a use."""
        current = entry.live and entry.generation is self.generations.current
        return self._counted(entry if current and entry.expires_s > now else None, now)

    def _counted(self, entry: Entry[K, V] | None, now: float) -> Entry[K, V] | None:
        if entry is None:
            self.counts["misses"] += 1
            return None
        self.counts["hits"] += 1
        entry.generation.policy.touch(entry.key, now)
        if self._events is not None and now - entry.told_s >= self._access_s:
            entry.told_s = now
            self._emit("access", entry, entry.owner)
        return entry

    # --- entries

    def put(self, key: K, value: V, size: int, ttl: float, owner: str, now: float) -> Entry[K, V]:
        """A new entry for ``key``. Raises ValueError or CacheFullError, and then nothing has changed but that other
        entries may have been evicted."""
        self.expire(now, limit=100)
        generation = self.generations.current
        old = generation.entries.get(key)
        if old is not None and old.expires_s <= now:
            self.remove(old, "ttl", now)
            old = None
        spared = old.size if old is not None and not old.references else 0
        if old is not None:
            generation.policy.hold(key)
        if size > self.maxsize or not self._room(size - spared, now):
            if old is not None and not old.references:
                generation.policy.unhold(key, now)
            self._refuse(size, owner)
        if old is None:
            generation.policy.admit(key, now)
        else:
            del generation.entries[key]
            self._detach(old, "replaced")
            generation.policy.touch(key, now)
            generation.policy.unhold(key, now)
        self._number += 1
        label = f"{self.name}/{self._label(key) + '#' if self._label else ''}{self._number}"
        entry = Entry(self._number, key, value, size, owner or self.name, label, now, now + ttl, generation, now)
        generation.entries[key] = self.resident[entry.number] = entry
        self.size += size
        self.counts["inserts"] += 1
        heapq.heappush(self._deadlines, (entry.expires_s, entry.number, entry))
        if len(self._deadlines) > 2 * len(self.resident) + 64:
            self._deadlines = [item for item in self._deadlines if item[2].live]
            heapq.heapify(self._deadlines)
        self._emit("insert", entry, entry.owner, ttl_ns=round(ttl * NANOSECONDS), generation=generation.name)
        return entry

    def _refuse(self, size: int, owner: str) -> None:
        self.counts["insert_fails"] += 1
        if self._events is not None:
            self._events.emit("insert_fail", "", size, owner or self.name)
        if size > self.maxsize:
            raise ValueError(f"{self.name}: value too large: {size} of {self.maxsize}")
        raise CacheFullError(f"{self.name}: no room for {size}: strong handles keep {self.size} of {self.maxsize}")

    def _room(self, size: int, now: float) -> bool:
        """Evicts until ``size`` fits; whether it does."""
        while self.size + size > self.maxsize:
            if not self.free_retired(1):
                victim = self.generations.victim(now)
                if victim is None:
                    return False
                self.remove(victim, "capacity", now)
        return True

    def remove(self, entry: Entry[K, V], cause: str, now: float) -> None:
        """Ends the lookups of a live entry, and frees it unless it is referenced."""
        generation = entry.generation
        del generation.entries[entry.key]
        if not generation.retired:
            generation.policy.forget(entry.key, now)
        self._detach(entry, "generation" if generation.retired else cause)

    def _detach(self, entry: Entry[K, V], cause: str) -> None:
        entry.live, entry.cause = False, cause
        if not entry.references:
            self._free(entry)

    def _free(self, entry: Entry[K, V]) -> None:
        del self.resident[entry.number]
        self.size -= entry.size
        self.evictions[entry.cause] += 1
        entry.value = None
        self._emit("evict", entry, entry.owner, cause=entry.cause)

    def expire(self, now: float, limit: int | None = None) -> int:
        """Removes entries whose time has come, at most ``limit``; how many."""
        removed = 0
        while self._deadlines and self._deadlines[0][0] <= now and removed != limit:
            entry = heapq.heappop(self._deadlines)[2]
            if entry.live:
                self.remove(entry, "ttl", now)
                removed += 1
        return removed

    def retire(self, fingerprint: Fingerprint | None) -> int:
        """Invalidates a generation, O(1); how many entries it had."""
        generation = self.generations.by_fingerprint.get(fingerprint)
        count = self.generations.retire(fingerprint)
        if generation is not None and count and self._events is not None:
            self._events.emit("invalidate", "", 0, self.name, generation=generation.name)
        return count

    def free_retired(self, limit: int) -> int:
        """Takes at most ``limit`` entries out of invalidated generations and frees those without references; how many
        were taken."""
        for taken in range(limit):
            entry = self.generations.next_retired()
            if entry is None:
                return taken
            self._detach(entry, "generation")
        return limit

    # --- references

    def lend(self, entry: Entry[K, V], owner: str, stack: Stack, now: float) -> Lease[K, V]:
        """One more reference to an entry that was just looked up or put."""
        self._number += 1
        lease = Lease(self._number, entry, owner, now, stack)
        self.leases[lease.number] = lease
        entry.references += 1
        if entry.references == 1:
            entry.generation.policy.hold(entry.key)
        if self._events is not None:
            self._emit("ref", entry, lease.owner, hold=lease.number, refcount=entry.references, stack=stack.text())
        return lease

    def give_up(self, lease: Lease[K, V], now: float, cause: str = "released") -> None:
        """One reference less; an entry that cannot be looked up any more is freed with its last."""
        del self.leases[lease.number]
        entry = lease.entry
        entry.references -= 1
        if self._events is not None:
            more = {"stack": lease.stack.text()} if cause == "dropped" else {}
            self._emit("unref", entry, lease.owner, hold=lease.number, refcount=entry.references, cause=cause, **more)
        if entry.references:
            return
        if not entry.live:
            self._free(entry)
        elif entry.generation.retired or entry.expires_s <= now:
            self.remove(entry, "ttl", now)
        else:
            entry.generation.policy.unhold(entry.key, now)

    # --- what there is

    def held(self, older_than_s: float, now: float) -> list[Held]:
        """References that are out and at least so old, oldest first."""
        leases = sorted(self.leases.values(), key=lambda lease: (lease.since_s, lease.number))
        return [
            Held(lease.entry.key, lease.owner, now - lease.since_s, lease.entry.size, lease.stack.text())
            for lease in leases
            if now - lease.since_s >= older_than_s
        ]

    def stats(self) -> CacheStats:
        """Counts up to now."""
        resident = self.resident.values()
        return CacheStats(
            hits=self.counts["hits"],
            misses=self.counts["misses"],
            stale=self.counts["stale"],
            inserts=self.counts["inserts"],
            evictions=dict(self.evictions),
            insert_fails=self.counts["insert_fails"],
            dropped_handles=self.counts["dropped"],
            size=self.size,
            unreachable_size=sum(entry.size for entry in resident if not entry.live or entry.generation.retired),
            held_entries=sum(entry.references > 0 for entry in resident),
        )

    def _emit(self, op: str, entry: Entry[K, V], owner: str, **more: str | int) -> None:
        if self._events is not None:
            self._events.emit(op, entry.label, entry.size, owner, **more)

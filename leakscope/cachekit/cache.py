"""A bounded, thread-safe cache whose entries all have a time to live, and which knows who holds them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from queue import SimpleQueue
from typing import Any, TypeVar, overload

from leakscope.cachekit.entries import CacheStats, Entry, Held, Lease
from leakscope.cachekit.events import EventLog
from leakscope.cachekit.generations import Fingerprint
from leakscope.cachekit.handles import StrongHandle, WeakHandle
from leakscope.cachekit.policies import LRU, Policy
from leakscope.cachekit.stacks import calling_stack
from leakscope.cachekit.store import Store

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
_MISSING = object()
SWEEP_ENTRIES = 1_000
"""How many entries a sweep removes at a time while it has the lock."""
LOGGED_FRAMES = 4
_log = logging.getLogger("leakscope.cachekit")


class Cache(MutableMapping[K, V]):
    """A mapping of at most ``maxsize``, by the conventions of cachetools (``getsizeof``, ``timer``, ``currsize``).

    All methods may be called from any thread. Entries with a strong handle are never evicted; expired, deleted,
    replaced or invalidated ones cannot be looked up any more and are freed with their last handle.
    """

    def __init__(
        self,
        maxsize: float,
        *,
        ttl: float,
        getsizeof: Callable[[V], int] | None = None,
        timer: Callable[[], float] = time.monotonic,
        policy: Callable[[], Policy] = LRU,
        name: str = "cache",
        events: EventLog | None = None,
        label: Callable[[K], str] | None = None,
        fingerprint: Fingerprint | None = None,
        stack_depth: int = 16,
        release_dropped: bool = True,
        access_s: float = 1.0,
    ) -> None:
        """
        maxsize: the most that entries may take, in what ``getsizeof(value)`` returns (1 a value without it; bytes
            where events are recorded).
        ttl: seconds that entries live, a finite time above 0; :meth:`put` takes another for one entry.
        timer: seconds; must not go back.
        policy: makes an eviction policy, one for each generation.
        name: the cache in events, which go to ``events``.
        label: what to call an entry there, from its key; it must not tell what a key keeps secret. Default: a number.
        fingerprint: the generation that the cache starts with.
        stack_depth: frames kept of whoever takes a handle.
        release_dropped: whether a handle that is collected without a release gives its reference up. Without, the
            entry stays for ever: for values that code outside of Python may still be using.
        access_s: a hit becomes an event if the entry's last one is at least so old.
        """
        if not maxsize > 0:
            raise ValueError(f"maxsize must be above 0, not {maxsize}")
        self.maxsize = maxsize
        self.ttl = _checked_ttl(ttl)
        self.timer = timer
        self.name = name
        self._getsizeof = getsizeof
        self._events = events
        self._stack_depth = stack_depth
        self._release_dropped = release_dropped
        self._lock = threading.RLock()
        self._store: Store[K, V] = Store(name, maxsize, policy, fingerprint, events, label, access_s)
        # Finalizers run at any moment, in the thread that has the lock too: all they do is put into this queue.
        self._dropped: SimpleQueue[Lease[K, V]] = SimpleQueue()
        self._unreported: list[Lease[K, V]] = []
        self._reported: Counter[tuple[str, str]] = Counter()

    # --- the mapping

    def __getitem__(self, key: K) -> V:
        with self._lock:
            entry = self._store.looked_up(key, self.timer())
            if entry is not None:
                return entry.content
        return self.__missing__(key)

    def __missing__(self, key: K) -> V:
        """What ``cache[key]`` gives for a key that is not there; to be overridden."""
        raise KeyError(key)

    def __setitem__(self, key: K, value: V) -> None:
        self.put(key, value)

    def __delitem__(self, key: K) -> None:
        with self._lock:
            now = self._settled()
            entry = self._store.found(key, now)
            if entry is None:
                raise KeyError(key)
            self._store.remove(entry, "deleted", now)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return self._store.found(key, self.timer()) is not None

    def __iter__(self) -> Iterator[K]:
        """The keys that can be looked up now, as a snapshot."""
        with self._lock:
            self._settled()
            return iter([entry.key for entry in self._store.generations.current.entries.values()])

    def __len__(self) -> int:
        """How many keys can be looked up now."""
        with self._lock:
            self._settled()
            return len(self._store.generations.current.entries)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} maxsize={self.maxsize} currsize={self.currsize}>"

    def setdefault(self, key: K, default: V) -> V:
        """The value, after setting it to ``default`` where there is none: one step for all threads."""
        with self._lock:
            return super().setdefault(key, default)

    @overload
    def pop(self, key: K) -> V: ...

    @overload
    def pop(self, key: K, default: V) -> V: ...

    @overload
    def pop(self, key: K, default: T) -> V | T: ...

    def pop(self, key: K, default: Any = _MISSING) -> Any:
        """Removes the entry and returns its value (``default`` where there is none, else KeyError): one step."""
        with self._lock:
            return super().pop(key) if default is _MISSING else super().pop(key, default)

    def popitem(self) -> tuple[K, V]:
        """Removes what would be evicted next. Raises KeyError when nothing can be."""
        with self._lock:
            now = self._settled()
            policy = self._store.generations.current.policy
            key = policy.victim(now)
            if key is None:
                raise KeyError(f"{self.name}: nothing that can be evicted")
            entry = self._store.generations.current.entries[key]
            item = (entry.key, entry.content)
            self._store.remove(entry, "capacity", now)
            return item

    def clear(self) -> None:
        """Invalidates the current generation."""
        self.invalidate(self.fingerprint)

    # --- sizes

    @property
    def currsize(self) -> float:
        """What is resident: entries that cannot be looked up any more are counted until they are freed."""
        with self._lock:
            self._settled()
            return self._store.size

    def getsizeof(self, value: V) -> int:
        """The size of a value, as the function given to the cache says; 1 without one."""
        return 1 if self._getsizeof is None else self._getsizeof(value)

    # --- entries and handles

    def put(self, key: K, value: V, *, ttl: float | None = None, owner: str = "") -> None:
        """Sets ``key`` for ``ttl`` seconds (default: the cache's). ``owner``: who inserts, for events.

        Raises ValueError for a value larger than the cache and for a TTL that is no finite time above 0,
        CacheFullError when strong handles keep too much. In all cases the entry of ``key`` stays.
        """
        seconds = self.ttl if ttl is None else _checked_ttl(ttl)
        size = self.getsizeof(value)
        with self._lock:
            self._take_dropped(self.timer())
            self._store.put(key, value, size, seconds, owner, self.timer())

    def put_strong(self, key: K, value: V, *, ttl: float | None = None, owner: str = "") -> StrongHandle[K, V]:
        """As :meth:`put`, and a strong handle on the new entry, in one step."""
        stack = calling_stack(self._stack_depth)
        with self._lock:
            self.put(key, value, ttl=ttl, owner=owner)
            entry = self._store.generations.current.entries[key]
            return self._handle(self._store.lend(entry, owner, stack, self.timer()))

    def strong(self, key: K, *, owner: str = "") -> StrongHandle[K, V]:
        """A strong handle on the entry of ``key``: a lookup. Raises KeyError where there is none."""
        stack = calling_stack(self._stack_depth)
        with self._lock:
            now = self.timer()
            entry = self._store.looked_up(key, now)
            if entry is None:
                raise KeyError(key)
            return self._handle(self._store.lend(entry, owner, stack, now))

    def weak(self, key: K) -> WeakHandle[K, V]:
        """A weak handle on the entry of ``key``: no lookup, no use. Raises KeyError where there is none."""
        with self._lock:
            entry = self._store.found(key, self.timer())
            if entry is None:
                raise KeyError(key)
            return WeakHandle(self, entry)

    def held(self, older_than_s: float = 0.0) -> list[Held]:
        """The strong handles that are not released and at least so old, oldest first."""
        with self._lock:
            return self._store.held(older_than_s, self._settled())

    # --- generations

    @property
    def fingerprint(self) -> Fingerprint | None:
        """That of the current generation."""
        return self._store.generations.current.fingerprint

    def activate(self, fingerprint: Fingerprint | None) -> None:
        """Makes another generation current, O(1). Entries of the one before can no longer be looked up unless it is
        activated again, and are the first to be evicted. :meth:`invalidate` it where it will not come back."""
        with self._lock:
            self._store.generations.activate(fingerprint)

    def invalidate(self, fingerprint: Fingerprint | None) -> int:
        """Invalidates all entries of a generation at once, O(1); how many there were.

        From here on no lookup and no upgrade gives them out. Sweeps and insertions free them bit by bit.
        """
        with self._lock:
            return self._store.retire(fingerprint)

    # --- housekeeping

    def sweep(self) -> int:
        """Frees what has expired or was invalidated, and reports handles that were collected without a release.

        Returns how many entries were removed. The lock is given up after every 1,000. A :class:`Sweeper` calls it.
        """
        removed = 0
        while True:
            with self._lock:
                now = self.timer()
                self._take_dropped(now)
                last = self._store.expire(now, SWEEP_ENTRIES) + self._store.free_retired(SWEEP_ENTRIES)
                unreported, self._unreported = self._unreported, []
            self._report(Counter((lease.owner, lease.stack.text(LOGGED_FRAMES)) for lease in unreported))
            removed += last
            if not last:
                break
        if self._events is not None:
            self._events.flush()
        return removed

    def stats(self) -> CacheStats:
        """Counts up to now."""
        with self._lock:
            self._settled()
            return self._store.stats()

    def _report(self, dropped: Counter[tuple[str, str]]) -> None:
        """Logs handles that were dropped, by (owner, stack): at the first, and whenever there are ten times as many."""
        for place, count in dropped.items():
            before = self._reported[place]
            self._reported[place] += count
            if not before or len(str(before)) < len(str(before + count)):
                owner, stack = place
                _log.warning(
                    "%s: %s dropped %d handles without release up to now, made in %s",
                    self.name, owner or "somebody", before + count, stack,
                )  # fmt: skip

    def _settled(self) -> float:
        """The time, after giving up dropped handles and removing all that has expired by now."""
        now = self.timer()
        self._take_dropped(now)
        self._store.expire(now)
        return now

    def _take_dropped(self, now: float) -> None:
        while not self._dropped.empty():
            lease = self._dropped.get_nowait()
            self._store.counts["dropped"] += 1
            self._unreported.append(lease)
            if self._release_dropped:
                self._store.give_up(lease, now, "dropped")

    def _handle(self, lease: Lease[K, V]) -> StrongHandle[K, V]:
        return StrongHandle(self, lease, self._dropped.put)

    def _release(self, lease: Lease[K, V]) -> None:
        with self._lock:
            self._store.give_up(lease, self.timer())

    def _upgrade(self, entry: Entry[K, V], owner: str) -> StrongHandle[K, V] | None:
        stack = calling_stack(self._stack_depth)
        with self._lock:
            now = self.timer()
            found = self._store.upgraded(entry, now)
            return None if found is None else self._handle(self._store.lend(found, owner, stack, now))


def _checked_ttl(ttl: float) -> float:
    if not 0 < ttl < math.inf:
        raise ValueError(f"every entry needs a finite time to live above 0 s, not {ttl}")
    return ttl

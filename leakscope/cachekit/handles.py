"""Strong and weak handles on the entries of a cache.

A strong handle keeps its entry resident until it is released; a weak one keeps nothing and can be upgraded while
the entry may still be given out. Each upgrade is one step under the cache's lock: it never gives out an entry that
another thread has just evicted. Both refer to one life of a key: when the key is set again they keep to the old entry.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from leakscope.cachekit.entries import Entry, Lease

if TYPE_CHECKING:
    from leakscope.cachekit.cache import Cache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ReleasedHandleError(ValueError):
    """The value of a strong handle was asked for after its release (as with a closed file, a ValueError)."""


class StrongHandle(Generic[K, V]):
    """A counted reference. Release it, best as a context manager::

        with cache.strong(key, owner="decode") as handle:
            use(handle.value)

    One that is collected without a release is a bug: the cache logs it with the stack that made it. Handles are made
    by :meth:`Cache.strong`, :meth:`Cache.put_strong` and :meth:`WeakHandle.upgrade`.
    """

    __slots__ = ("__weakref__", "_cache", "_finalizer", "_lease")

    def __init__(self, cache: Cache[K, V], lease: Lease[K, V], dropped: Callable[[Lease[K, V]], object]) -> None:
        self._cache = cache
        self._lease = lease
        self._finalizer = weakref.finalize(self, dropped, lease)
        self._finalizer.atexit = False  # a handle that is in use when the interpreter ends is not dropped

    @property
    def key(self) -> K:
        """The entry's key."""
        return self._lease.entry.key

    @property
    def owner(self) -> str:
        """Who asked for the handle."""
        return self._lease.owner

    @property
    def released(self) -> bool:
        """Whether the reference was given up."""
        return not self._finalizer.alive

    @property
    def value(self) -> V:
        """The entry's value. Raises ReleasedHandleError after the release."""
        value = self._lease.entry.content
        if not self._finalizer.alive:
            raise ReleasedHandleError(f"the handle of {self._lease.owner or 'no owner'} is released")
        return value

    def weak(self) -> WeakHandle[K, V]:
        """A weak handle on the same entry."""
        return WeakHandle(self._cache, self._lease.entry)

    def release(self) -> None:
        """Gives the reference up; more calls do nothing. An entry that nobody can look up any more is freed with its
        last reference."""
        if self._finalizer.detach() is not None:  # atomic: of several threads one gives it up
            self._cache._release(self._lease)

    def __enter__(self) -> StrongHandle[K, V]:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<StrongHandle owner={self.owner!r} {state}>"


class WeakHandle(Generic[K, V]):
    """Refers to an entry without keeping it."""

    __slots__ = ("_cache", "_entry")

    def __init__(self, cache: Cache[K, V], entry: Entry[K, V]) -> None:
        self._cache = cache
        self._entry = entry

    @property
    def key(self) -> K:
        """The entry's key."""
        return self._entry.key

    def upgrade(self, owner: str = "") -> StrongHandle[K, V] | None:
        """A strong handle on the entry, or None when it was evicted, replaced or invalidated, or has expired."""
        return self._cache._upgrade(self._entry, owner)

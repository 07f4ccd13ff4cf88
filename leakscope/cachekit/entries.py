"""What a cache keeps for a key, and the leases that strong handles have on it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

if TYPE_CHECKING:
    from leakscope.cachekit.generations import Generation
    from leakscope.cachekit.stacks import Stack

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class Entry(Generic[K, V]):
    """One life of a key: a key that is set again gets a new entry.

    ``live``: it is in its generation's mapping. One that is not stays resident until its last reference is released.
    """

    number: int  # unique in its cache
    key: K
    value: V | None  # None once freed
    size: int
    owner: str
    label: str  # its name in events
    inserted_s: float
    expires_s: float
    generation: Generation[K, V]
    told_s: float  # when an event last told of a use
    references: int = 0
    live: bool = True
    cause: str = ""  # why it is no longer live

    @property
    def content(self) -> V:
        """The value of an entry that is not freed."""
        return cast(V, self.value)


@dataclass(frozen=True, slots=True, eq=False)
class Lease(Generic[K, V]):
    """One reference: what the cache knows of a strong handle, without keeping the handle alive."""

    number: int  # unique in its cache
    entry: Entry[K, V]
    owner: str
    since_s: float
    stack: Stack


@dataclass(frozen=True)
class Held:
    """A strong handle that is not released: who made it, where and when."""

    key: Hashable
    owner: str
    age_s: float
    size: int
    stack: str
    """``function (file:line)`` joined by ``;``, outermost first."""


@dataclass(frozen=True)
class CacheStats:
    """Counts since the cache was made, and what is resident now. Sizes are in what ``getsizeof`` returns."""

    hits: int
    misses: int
    """Lookups that found nothing to give out, ``stale`` included."""
    stale: int
    """Lookups that found an entry past its time."""
    inserts: int
    evictions: dict[str, int]
    """Freed entries by cause: capacity, ttl, replaced, deleted, generation."""
    insert_fails: int
    dropped_handles: int
    """Strong handles that were collected without a release."""
    size: int
    unreachable_size: int
    """Of ``size``: what no lookup finds any more, kept by strong handles or not swept yet."""
    held_entries: int
    """Entries with a strong handle."""

    @property
    def hit_ratio(self) -> float:
        """Hits of all lookups; NaN before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else float("nan")

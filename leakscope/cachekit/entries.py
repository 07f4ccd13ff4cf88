"""What a cache keeps for a key, and the leases that strong handles have on it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from leakscope.cachekit.generations import Generation
    from leakscope.cachekit.stacks import Stack

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class Entry(Generic[K, V]):
    """One life of a key: a key that is set again gets a new entry.

    ``live``: lookups find it. An entry that is no longer live stays resident until its last reference is released.
    """

    number: int  # unique in its cache
    key: K
    value: V | None  # None once freed
    size_bytes: int
    owner: str
    label: str  # its name in events
    inserted_s: float
    expires_s: float
    generation: Generation[K, V]
    references: int = 0
    live: bool = True
    cause: str = ""  # why it is no longer live

    @property
    def reachable(self) -> bool:
        """Whether lookups and upgrades may still give it out, its deadline aside."""
        return self.live and not self.generation.retired


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
    size_bytes: int
    stack: str
    """``function (file:line)`` joined by ``;``, outermost first."""


@dataclass(frozen=True)
class CacheStats:
    """Counts since the cache was made, and what is resident now."""

    hits: int
    misses: int
    """Lookups that found nothing, those of expired entries too."""
    stale: int
    """Lookups that found an entry past its time; it was not given out."""
    inserts: int
    evictions: dict[str, int]
    """By cause: capacity, ttl, replaced, deleted, generation."""
    insert_fails: int
    leaked_handles: int
    """Strong handles that were collected without a release."""
    resident_bytes: int
    unreachable_bytes: int
    """Of these: expired, deleted, replaced or invalidated, and kept by strong handles or not yet swept."""
    held_objects: int
    """Entries with a strong handle."""

    @property
    def hit_ratio(self) -> float:
        """Hits of all lookups, NaN before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else float("nan")

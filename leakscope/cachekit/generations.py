"""Generations: all entries that one model and one state of its data made, invalidated together in O(1)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from leakscope.cachekit.policies import Policy

if TYPE_CHECKING:
    from leakscope.cachekit.entries import Entry

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
NAMESPACE_DIGITS = 32
"""128 bits: with 10¹² fingerprints the chance that any two share a namespace is 1.5e-15."""
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Fingerprint:
    """What entries were made from: the model's hash and the version of the data it answers from."""

    model_hash: str
    data_version: str = ""

    @classmethod
    def of_files(cls, *paths: Path | str, data_version: str = "") -> Fingerprint:
        """SHA-256 over names and contents of a model's files, in the order of their names.

        Raises OSError for a file that cannot be read.
        """
        whole = hashlib.sha256()
        for path in sorted(map(Path, paths), key=lambda path: (path.name, str(path))):
            content = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(READ_BYTES):
                    content.update(block)
            whole.update(_prefixed(path.name.encode()) + content.digest())
        return cls(whole.hexdigest(), data_version)

    @property
    def namespace(self) -> str:
        """The first 128 bits of a SHA-256 over both parts, as a prefix of keys in tiers that processes share."""
        parts = _prefixed(self.model_hash.encode()) + _prefixed(self.data_version.encode())
        return hashlib.sha256(parts).hexdigest()[:NAMESPACE_DIGITS]


@dataclass(eq=False)
class Generation(Generic[K, V]):
    """The entries of one fingerprint and their own eviction order. ``retired``: invalidated, being freed."""

    fingerprint: Fingerprint | None
    policy: Policy
    name: str  # in events; of one generation only, even of those with the same fingerprint
    entries: dict[Hashable, Entry[K, V]] = field(default_factory=dict)
    retired: bool = False


class Generations(Generic[K, V]):
    """The generations of a cache, the current one and those that are being freed. Not thread-safe by itself."""

    def __init__(self, cache: str, policy: Callable[[], Policy], fingerprint: Fingerprint | None) -> None:
        self._cache, self._policy, self._made = cache, policy, 0
        self.by_fingerprint: dict[Fingerprint | None, Generation[K, V]] = {}
        self.retired: list[Generation[K, V]] = []
        self.current: Generation[K, V]
        self.activate(fingerprint)

    def activate(self, fingerprint: Fingerprint | None) -> None:
        """Makes the generation of ``fingerprint`` current, an empty one if it is new. O(1)."""
        known = self.by_fingerprint.items()
        self.by_fingerprint = {key: generation for key, generation in known if generation.entries}
        if fingerprint not in self.by_fingerprint:
            self._made += 1
            name = f"{self._cache}/{fingerprint.namespace if fingerprint else ''}#{self._made}"
            self.by_fingerprint[fingerprint] = Generation(fingerprint, self._policy(), name)
        self.current = self.by_fingerprint[fingerprint]

    def retire(self, fingerprint: Fingerprint | None) -> int:
        """Invalidates all entries of a generation at once, in O(1); how many there were.

        The current generation goes on empty, under the same fingerprint.
        """
        found = self.by_fingerprint.pop(fingerprint, None)
        if found is None:
            return 0
        found.retired = True
        if found.entries:
            self.retired.append(found)
        if found is self.current:
            self.activate(fingerprint)
        return len(found.entries)

    def next_retired(self) -> Entry[K, V] | None:
        """Takes an entry out of the generations that are being freed; None when they are empty."""
        while self.retired:
            entries = self.retired[-1].entries
            if entries:
                return entries.popitem()[1]
            self.retired.pop()
        return None

    def victim(self, now: float) -> Entry[K, V] | None:
        """What the policies would evict next: entries of other generations before those of the current one."""
        for generation in self.by_fingerprint.values():
            if generation is not self.current and (key := generation.policy.victim(now)) is not None:
                return generation.entries[key]
        key = self.current.policy.victim(now)
        return None if key is None else self.current.entries[key]


def _prefixed(part: bytes) -> bytes:
    """With its length in front, so that ("ab", "c") and ("a", "bc") differ."""
    return len(part).to_bytes(8, "big") + part

"""What an audit of a key-value store found: its keys by pattern, the largest ones, what its memory is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A count or bytes, and half the width of its 95 % interval where it is an estimate; 0: it is exact."""

    value: float
    error: float = 0.0

    def __str__(self) -> str:
        """``3,000`` or ``3,012 ± 45``."""
        return f"{self.value:,.0f}" + (f" ± {self.error:,.0f}" if self.error else "")

    def to_json(self) -> dict[str, float]:
        """Plain JSON types."""
        return {"value": round(self.value), "error": round(self.error)}


@dataclass(frozen=True)
class KeyGroup:
    """The keys of one pattern, '' for all keys.

    ``stale``: without a TTL and idle for :data:`leakscope.detect.key_store.STALE_S`; ``idle_s``: the longest idle one.
    """

    pattern: str
    keys: Figure
    bytes: Figure
    without_ttl: Figure
    without_ttl_bytes: Figure
    stale: Figure
    stale_bytes: Figure
    idle_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = ("keys", "bytes", "without_ttl", "without_ttl_bytes", "stale", "stale_bytes")
        figures = {name: getattr(self, name).to_json() for name in names}
        return {"pattern": self.pattern, **figures, "idle_s": round(self.idle_s, 1)}


@dataclass(frozen=True)
class StoreAudit:
    """One audit. ``groups`` by bytes without a TTL, then by bytes. ``largest``: (object, bytes, type or '').

    ``memory``: the parts of its resident memory, in bytes, which add up to ``resident_bytes`` (0: not said).
    ``zombies``: at most so many keys were past their TTL and still there, None where that cannot be told. ``cost``:
    commands that were sent, seconds that they took, CPU seconds of the server in that time.
    """

    source: str
    kind: str
    all_keys: KeyGroup
    groups: tuple[KeyGroup, ...]
    scanned: int
    total: int
    largest: tuple[tuple[str, int, str], ...]
    memory: tuple[tuple[str, int], ...]
    resident_bytes: int
    zombies: int | None
    cost: dict[str, float]

    @property
    def complete(self) -> bool:
        """Whether every key was read."""
        return self.scanned >= self.total

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "source": self.source,
            "kind": self.kind,
            "keys": self.total,
            "scanned": self.scanned,
            "complete": self.complete,
            "zombies": self.zombies,
            "cost": self.cost,
            "all": self.all_keys.to_json(),
            "groups": [group.to_json() for group in self.groups],
            "largest": [{"object": name, "bytes": size, "type": kind or None} for name, size, kind in self.largest],
            "memory": [{"what": what, "bytes": size} for what, size in self.memory],
            "resident_bytes": self.resident_bytes or None,
        }

"""A cache written the naive way, to compare the kit's with: lists, no heap, no laziness that is not promised."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Item:
    """One life of a key."""

    key: int
    size: int
    expires: float
    generation: ModelGeneration
    references: int = 0
    live: bool = True
    freed: bool = False
    cause: str = ""


@dataclass(eq=False)
class ModelGeneration:
    """``items`` in the order of insertion, ``order`` of eviction: least recently used first, held ones left out."""

    fingerprint: object
    items: list[Item] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    retired: bool = False

    def item(self, key: int) -> Item | None:
        return next((item for item in self.items if item.key == key), None)


class Full(Exception):
    """No room."""


class Model:
    """LRU, a TTL for each item, references, generations. ``now`` is moved by the test."""

    def __init__(self, maxsize: int, fingerprint: object) -> None:
        self.maxsize, self.now = maxsize, 0.0
        self.current = ModelGeneration(fingerprint)
        self.generations = [self.current]
        self.retired: list[ModelGeneration] = []
        self.resident: list[Item] = []
        self.hits = self.misses = self.stale = self.inserts = self.insert_fails = 0
        self.evictions: dict[str, int] = {}

    @property
    def size(self) -> int:
        return sum(item.size for item in self.resident)

    def found(self, key: int) -> Item | None:
        item = self.current.item(key)
        return item if item is not None and item.expires > self.now else None

    def look_up(self, key: int) -> Item | None:
        item = self.current.item(key)
        if item is not None and item.expires <= self.now:
            self.stale += 1
            self.remove(item, "ttl")
            item = None
        return self.counted(item)

    def upgrade(self, item: Item) -> Item | None:
        good = item.live and item.generation is self.current and item.expires > self.now
        return self.counted(item if good else None)

    def counted(self, item: Item | None) -> Item | None:
        if item is None:
            self.misses += 1
            return None
        self.hits += 1
        if item.key in self.current.order:
            self.current.order.remove(item.key)
            self.current.order.append(item.key)
        return item

    def put(self, key: int, size: int, ttl: float) -> Item:
        self.expire()
        old = self.current.item(key)
        spared = old.size if old is not None and not old.references else 0
        if old is not None and not old.references:
            self.current.order.remove(key)
        while size > self.maxsize or self.size + size - spared > self.maxsize:
            if size > self.maxsize or not self.evict_one():
                if old is not None and not old.references:
                    self.current.order.append(key)
                self.insert_fails += 1
                raise Full
        if old is not None:
            self.current.items.remove(old)
            self.detach(old, "replaced")
        item = Item(key, size, self.now + ttl, self.current)
        self.current.items.append(item)
        self.current.order.append(key)
        self.resident.append(item)
        self.inserts += 1
        return item

    def evict_one(self) -> bool:
        for generation in reversed(self.retired):
            if generation.items:
                self.detach(generation.items.pop(), "generation")
                return True
        others = [generation for generation in self.generations if generation is not self.current]
        for generation in (*others, self.current):
            if generation.order:
                item = generation.item(generation.order[0])
                assert item is not None
                self.remove(item, "capacity")
                return True
        return False

    def expire(self) -> None:
        for item in [item for item in self.resident if item.live and item.expires <= self.now]:
            self.remove(item, "ttl")

    def sweep(self) -> None:
        self.expire()
        for generation in self.retired:
            for item in list(generation.items):
                self.remove(item, "generation")

    def remove(self, item: Item, cause: str) -> None:
        item.generation.items.remove(item)
        if item.key in item.generation.order:
            item.generation.order.remove(item.key)
        self.detach(item, "generation" if item.generation.retired else cause)

    def detach(self, item: Item, cause: str) -> None:
        item.live, item.cause = False, cause
        if not item.references:
            self.free(item)

    def free(self, item: Item) -> None:
        item.freed = True
        self.resident.remove(item)
        self.evictions[item.cause] = self.evictions.get(item.cause, 0) + 1

    def lend(self, item: Item) -> None:
        item.references += 1
        if item.references == 1:
            item.generation.order.remove(item.key)

    def give_up(self, item: Item) -> None:
        item.references -= 1
        if item.references:
            return
        if not item.live:
            self.free(item)
        elif item.generation.retired or item.expires <= self.now:
            self.remove(item, "ttl")
        else:
            item.generation.order.append(item.key)

    def activate(self, fingerprint: object) -> None:
        self.generations = [generation for generation in self.generations if generation.items]
        found = next((g for g in self.generations if g.fingerprint == fingerprint), None)
        if found is None:
            found = ModelGeneration(fingerprint)
            self.generations.append(found)
        self.current = found

    def invalidate(self, fingerprint: object) -> int:
        found = next((g for g in self.generations if g.fingerprint == fingerprint), None)
        if found is None:
            return 0
        self.generations.remove(found)
        found.retired = True
        if found.items:
            self.retired.append(found)
        if found is self.current:
            self.activate(fingerprint)
        return len(found.items)

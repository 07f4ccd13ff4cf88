"""The cache against a naive model, step by step, whatever the order of operations (hypothesis)."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cachekit_model import Full, Item, Model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from leakscope.cachekit import Cache, CacheFullError, EventLog, Fingerprint, ReleasedHandleError, StrongHandle

MAXSIZE = 20
TTL = 10.0
KEYS = st.integers(0, 5)
SIZES = st.sampled_from([0, 1, 4, 5, 5, 7, 20, 22])
PRINTS = st.sampled_from([Fingerprint("model a", "1"), Fingerprint("model b", "1")])
WHICH = st.integers(0, 1_000_000)


class CacheMachine(RuleBasedStateMachine):
    """Values are (key, number of the insertion, size)."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.path = Path(self.place.name) / "events.jsonl"
        self.log = EventLog(self.path)
        self.first = Fingerprint("model a", "1")
        self.model = Model(MAXSIZE, self.first)
        self.cache: Cache[int, tuple[int, int, int]] = Cache(
            MAXSIZE, ttl=TTL, getsizeof=lambda value: value[2], timer=lambda: self.model.now, events=self.log,
            fingerprint=self.first, name="kv",
        )  # fmt: skip
        self.items: dict[int, Item] = {}  # by number of the insertion
        self.strong: list[tuple[StrongHandle[int, tuple[int, int, int]], Item, int]] = []
        self.weak: list[tuple[Any, Item]] = []
        self.inserted = 0
        self.dropped = 0

    @rule(key=KEYS, size=SIZES, ttl=st.sampled_from([None, None, 1.0, 30.0]), hold=st.booleans())
    def put(self, key: int, size: int, ttl: float | None, hold: bool) -> None:
        self.inserted += 1
        value = (key, self.inserted, size)
        put = self.cache.put_strong if hold else self.cache.put
        try:
            item = self.model.put(key, size, ttl or TTL)
        except Full:
            with pytest.raises(CacheFullError if size <= MAXSIZE else ValueError):
                put(key, value, ttl=ttl)
            return
        self.items[self.inserted] = item
        made = put(key, value, ttl=ttl)
        if hold:
            assert isinstance(made, StrongHandle)
            self.model.lend(item)
            self.strong.append((made, item, self.inserted))

    @rule(key=KEYS)
    def get(self, key: int) -> None:
        item = self.model.look_up(key)
        value = self.cache.get(key)
        assert (None if value is None else self.items[value[1]]) is item

    @rule(key=KEYS)
    def contains(self, key: int) -> None:
        assert (key in self.cache) == (self.model.found(key) is not None)

    @rule(key=KEYS)
    def delete(self, key: int) -> None:
        self.model.expire()
        item = self.model.found(key)
        if item is None:
            with pytest.raises(KeyError):
                del self.cache[key]
        else:
            self.model.remove(item, "deleted")
            del self.cache[key]

    @rule(key=KEYS)
    def take_strong(self, key: int) -> None:
        item = self.model.look_up(key)
        if item is None:
            with pytest.raises(KeyError):
                self.cache.strong(key)
            return
        self.model.lend(item)
        handle = self.cache.strong(key, owner=f"user {key}")
        assert self.items[handle.value[1]] is item
        self.strong.append((handle, item, handle.value[1]))

    @rule(key=KEYS)
    def take_weak(self, key: int) -> None:
        item = self.model.found(key)
        if item is None:
            with pytest.raises(KeyError):
                self.cache.weak(key)
        else:
            self.weak.append((self.cache.weak(key), item))

    @precondition(lambda self: self.weak)
    @rule(which=WHICH)
    def upgrade(self, which: int) -> None:
        weak, item = self.weak[which % len(self.weak)]
        found = self.model.upgrade(item)
        handle = weak.upgrade("upgraded")
        assert (handle is not None) == (found is not None)
        if handle is not None:
            self.model.lend(item)
            assert self.items[handle.value[1]] is item
            self.strong.append((handle, item, handle.value[1]))

    @precondition(lambda self: self.strong)
    @rule(which=WHICH, twice=st.booleans())
    def release(self, which: int, twice: bool) -> None:
        handle, item, number = self.strong.pop(which % len(self.strong))
        assert handle.value[1] == number  # whatever happened to the key meanwhile
        self.model.give_up(item)
        handle.release()
        if twice:
            handle.release()
        with pytest.raises(ReleasedHandleError):
            _ = handle.value

    @precondition(lambda self: self.strong)
    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        _, item, _ = self.strong.pop(which % len(self.strong))
        _ = None
        gc.collect(0)
        self.cache._take_dropped(self.model.now)  # the next insertion or sweep would
        self.model.give_up(item)
        self.dropped += 1

    @rule(seconds=st.sampled_from([0.5, 1.0, 9.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.model.now += seconds

    @rule(fingerprint=PRINTS)
    def activate(self, fingerprint: Fingerprint) -> None:
        self.model.activate(fingerprint)
        self.cache.activate(fingerprint)

    @rule(fingerprint=PRINTS)
    def invalidate(self, fingerprint: Fingerprint) -> None:
        assert self.cache.invalidate(fingerprint) == self.model.invalidate(fingerprint)

    @rule()
    def sweep(self) -> None:
        self.model.sweep()
        self.cache.sweep()

    @rule()
    def pop_item(self) -> None:
        self.model.expire()
        if not self.model.current.order:
            with pytest.raises(KeyError):
                self.cache.popitem()
            return
        item = self.model.found(self.model.current.order[0])
        assert item is not None
        self.model.remove(item, "capacity")
        key, value = self.cache.popitem()
        assert key == item.key and self.items[value[1]] is item

    @invariant()
    def never_too_full(self) -> None:
        assert self.cache._store.size == self.model.size <= MAXSIZE

    @rule()
    def compare(self) -> None:
        """Settles both, so it is a step like others: expired entries that nobody looks at stay until then."""
        self.model.expire()
        stats = self.cache.stats()
        assert list(self.cache) == [item.key for item in self.model.current.items]
        assert len(self.cache) == len(self.model.current.items)
        assert self.cache.currsize == self.model.size <= MAXSIZE
        assert stats.held_entries == sum(item.references > 0 for item in self.model.resident)
        assert stats.unreachable_size == sum(
            item.size for item in self.model.resident if not item.live or item.generation.retired
        )
        assert (stats.hits, stats.misses, stats.stale) == (self.model.hits, self.model.misses, self.model.stale)
        assert (stats.inserts, stats.insert_fails) == (self.model.inserts, self.model.insert_fails)
        assert stats.evictions == self.model.evictions
        assert stats.dropped_handles == self.dropped
        assert sorted(held.key for held in self.cache.held()) == sorted(item.key for _, item, _ in self.strong)

    def teardown(self) -> None:
        """The events alone tell what is resident and how often it is referenced."""
        self.compare()
        self.log.close()
        references: dict[str, int] = {}
        last_ns = 0
        for line in self.path.read_text().splitlines():
            event = json.loads(line)
            assert event["ts_ns"] > last_ns
            last_ns = event["ts_ns"]
            name = event["obj"]
            match event["op"]:
                case "insert":
                    assert name not in references
                    references[name] = 0
                case "evict":
                    assert references.pop(name) == 0
                case "ref":
                    references[name] += 1
                    assert event["refcount"] == references[name]
                case "unref":
                    references[name] -= 1
                    assert event["refcount"] == references[name]
        assert sorted(references.values()) == sorted(item.references for item in self.model.resident)
        self.strong.clear()
        self.place.cleanup()


def test_the_cache_does_what_the_model_does() -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            settings.default, max_examples=max(60, settings.default.max_examples // 4), stateful_step_count=50,
            deadline=None, suppress_health_check=[HealthCheck.too_slow],
        ),
    )  # fmt: skip

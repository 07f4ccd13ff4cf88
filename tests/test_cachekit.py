"""The cache kit by named behaviours: conventions of mappings, lifetimes, handles, generations."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cachekit_tools import Value, cache_of

from leakscope.cachekit import Cache, CacheFullError, Fingerprint


def test_the_kit_needs_the_standard_library_alone() -> None:
    script = """if True:
        import sys
        before = set(sys.modules)
        import leakscope.cachekit
        roots = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(roots - set(sys.stdlib_module_names) - {"leakscope"}))
        print(*sorted(name for name in sys.modules if name.startswith("leakscope.") and ".cachekit" not in name))
    """
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, env=os.environ)

    assert (done.stdout, done.stderr) == ("\n\n", "")


def test_it_is_a_mapping_by_the_conventions_of_cachetools() -> None:
    cache, _ = cache_of(3)
    cache["a"], cache["b"], cache["c"] = 1, 2, 3

    assert (cache["a"], cache.get("x"), cache.get("x", 7), "b" in cache, len(cache)) == (1, None, 7, True, 3)
    assert (cache.maxsize, cache.currsize, cache.getsizeof("anything"), cache.ttl) == (3, 3, 1, 60.0)
    cache["d"] = 4  # b is the least recently used: a was read, and `in` is no use
    assert list(cache.items()) == [("a", 1), ("c", 3), ("d", 4)]
    assert cache.popitem() == ("a", 1)  # items() reads each, so a is oldest again
    assert cache.pop("d") == 4 and cache.pop("d", 9) == 9 and cache.setdefault("e", 5) == 5
    with pytest.raises(KeyError):
        cache.pop("d")
    with pytest.raises(KeyError):
        _ = cache["d"]
    cache.clear()
    assert (len(cache), list(cache)) == (0, [])


def test_a_missing_key_is_asked_of_the_subclass() -> None:
    class Squares(Cache[int, int]):
        def __missing__(self, key: int) -> int:
            self[key] = key * key
            return key * key

    squares = Squares(2, ttl=1.0)

    assert (squares[5], squares[5], squares.stats().hits, squares.stats().misses) == (25, 25, 1, 1)


@pytest.mark.parametrize("ttl", [0, -1, math.inf, math.nan])
def test_no_entry_without_a_time_to_live(ttl: float) -> None:
    with pytest.raises(ValueError, match="finite time to live"):
        Cache(1, ttl=ttl)
    cache, _ = cache_of()
    with pytest.raises(ValueError, match="finite time to live"):
        cache.put("a", 1, ttl=ttl)
    with pytest.raises(TypeError):
        Cache(1)  # type: ignore[call-arg]


def test_an_entry_lives_exactly_its_time() -> None:
    cache, clock = cache_of(ttl=60.0)
    cache["a"] = 1
    cache.put("b", 2, ttl=90.0)

    clock.now += 59.999
    assert cache["a"] == 1
    clock.now = 160.0
    assert (cache.get("a"), cache._store.size) == (None, 1)  # found stale, and removed at once
    assert (cache["b"], len(cache)) == (2, 1)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.stale, stats.evictions) == (2, 1, 1, {"ttl": 1})
    assert stats.hit_ratio == 2 / 3


def test_a_value_goes_with_its_last_reference_and_not_before() -> None:
    cache, clock = cache_of()
    value = Value()
    watched = weakref.ref(value)
    first = cache.put_strong("a", value, owner="decode")
    second = cache.strong("a", owner="prefill")
    weak = first.weak()
    del value

    clock.now += 61
    assert ("a" in cache, weak.upgrade(), cache.currsize) == (False, None, 1)
    assert [(held.owner, held.age_s) for held in cache.held()] == [("decode", 61.0), ("prefill", 61.0)]
    first.release()
    assert cache.stats().unreachable_size == 1 and watched() is second.value
    second.release()
    assert (cache.currsize, watched(), cache.stats().evictions) == (0, None, {"ttl": 1})  # although `weak` is there


def test_what_is_held_is_never_evicted() -> None:
    cache, _ = cache_of(3)
    handles = [cache.put_strong(key, key) for key in "abc"]

    with pytest.raises(CacheFullError, match="strong handles keep 3 of 3"):
        cache["d"] = 1
    with pytest.raises(KeyError):
        cache.popitem()
    handles[1].release()
    cache["d"] = 1
    assert (list(cache), cache.stats().insert_fails, [handles[0].value, handles[2].value]) == (
        ["a", "c", "d"],
        1,
        ["a", "c"],
    )
    with pytest.raises(ValueError, match="too large: 4 of 3"):
        Cache(3, ttl=1, getsizeof=int)["x"] = 4


def test_a_refused_replacement_leaves_the_entry() -> None:
    cache, _ = cache_of(10, getsizeof=lambda value: value.size)
    small = Value(2)
    cache["a"] = small
    with cache.put_strong("b", Value(8)):
        with pytest.raises(CacheFullError):
            cache["a"] = Value(3)
        assert cache["a"] is small
    cache["a"] = Value(3)  # b is free again and goes
    assert (list(cache), cache.currsize) == (["a"], 3)
    with cache.put_strong("b", Value(7)), pytest.raises(CacheFullError):
        cache["a"] = Value(4)
    cache["c"] = Value(10)  # a can be evicted as before
    assert (list(cache), cache.currsize) == (["c"], 10)


def test_a_handle_keeps_to_its_entry_when_the_key_is_set_again() -> None:
    cache, _ = cache_of()
    with cache.put_strong("a", "old") as old:
        weak = old.weak()
        cache["a"] = "new"
        assert (old.value, cache["a"], weak.upgrade(), cache.currsize) == ("old", "new", None, 2)
    assert (cache["a"], cache.currsize) == ("new", 1)


def test_a_generation_goes_at_once_and_is_freed_bit_by_bit() -> None:
    one, two = Fingerprint("weights-1", "docs-7"), Fingerprint("weights-1", "docs-8")
    cache, _ = cache_of(5_000, fingerprint=one)
    for number in range(4_000):
        cache[number] = number
    held = cache.strong(7)

    looked_at: list[Any] = []
    entries = cache._store.generations.current.entries
    cache._store.generations.current.entries = Watched(entries, looked_at)
    assert cache.invalidate(one) == 4_000
    assert looked_at == []  # no entry is touched: O(1)
    assert (len(cache), cache.get(3), cache.currsize, held.value) == (0, None, 4_000, 7)
    cache[3] = "new"
    assert cache[3] == "new"
    assert cache.sweep() == 4_000
    assert (cache.currsize, cache.stats().evictions) == (2, {"generation": 3_999})
    held.release()
    assert (cache.currsize, cache.fingerprint) == (1, one)

    cache.activate(two)
    cache[3] = "of two"
    assert (cache[3], cache.invalidate(Fingerprint("never", "seen"))) == ("of two", 0)
    cache.activate(one)
    assert cache[3] == "new"  # a rollback finds it again


class Watched(dict[Any, Any]):
    """A dictionary that tells which of its items were looked at."""

    def __init__(self, content: dict[Any, Any], looked_at: list[Any]) -> None:
        super().__init__(content)
        self.looked_at = looked_at

    def __getitem__(self, key: Any) -> Any:
        self.looked_at.append(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        self.looked_at.append("all")
        return super().__iter__()


def test_entries_of_other_generations_are_evicted_first() -> None:
    one, two = Fingerprint("1"), Fingerprint("2")
    cache, _ = cache_of(3, fingerprint=one)
    cache["a"] = 1
    cache.activate(two)
    cache["b"] = cache["c"] = 2
    cache.activate(one)
    assert cache["a"] == 1  # used last
    cache.activate(two)
    cache["d"] = 2
    assert list(cache) == ["b", "c", "d"]
    cache.activate(one)
    assert list(cache) == []
    cache["e"] = 1
    assert list(cache) == ["e"]  # b, of the generation that is not current, though e's is the older one
    cache.activate(two)
    assert list(cache) == ["c", "d"]


def test_fingerprints_name_model_and_data(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1234")
    (tmp_path / "b.bin").write_bytes(b"5678")
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]

    model = Fingerprint.of_files(*paths, data_version="7")
    assert model == Fingerprint.of_files(*reversed(paths), data_version="7")
    assert len(model.namespace) == 32
    (tmp_path / "a.bin").write_bytes(b"12345678")
    (tmp_path / "b.bin").write_bytes(b"")
    assert Fingerprint.of_files(*paths, data_version="7") != model  # the same bytes in all, cut elsewhere
    namespaces = {Fingerprint(*parts).namespace for parts in (("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"))}
    assert len(namespaces) == 4


def test_a_service_that_churns_keeps_nothing_of_what_is_gone() -> None:
    """Deadlines of replaced entries and old generations do not pile up while long lives last."""
    cache, _ = cache_of(10, ttl=1e9)
    for number in range(5_000):
        cache[number % 20] = number
        if number % 100 == 0:
            cache.activate(Fingerprint(str(number)))
    store = cache._store
    assert len(store.resident) == 10 and len(store._deadlines) <= 2 * 10 + 65
    assert len(store.generations.by_fingerprint) <= 11

"""Suppressions: LeakSanitizer's patterns, and a reason for each."""

from __future__ import annotations

import pytest

from leakscope.errors import BadInputError
from leakscope.gate.suppressions import Suppression, found_in, names_of, parse_suppressions


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("keep", "main_keeps_it", True),
        ("^keep", "main_keeps_it", False),
        ("^main", "main_keeps_it", True),
        ("it$", "main_keeps_it", True),
        ("keeps$", "main_keeps_it", False),
        ("^main*it$", "main_keeps_it", True),
        ("^main_keeps_it$", "main_keeps_it", True),
        ("^main$", "main_keeps_it", False),
        ("ma*ee*it", "main_keeps_it", True),
        ("it*main", "main_keeps_it", False),
        ("^ab*ba$", "aba", False),  # begin and end may not overlap
        ("^ab*ba$", "abba", True),
        ("a**b", "a--b", True),
        ("f(int)", "f(int)", True),  # nothing but * ^ $ is special
        ("f.x", "fax", False),
        ("std::vector<*>::push", "std::vector<int>::push_back", True),
    ],
)
def test_patterns_are_those_of_leak_sanitizer(pattern: str, name: str, found: bool) -> None:
    assert found_in(pattern, name) is found


def test_hostile_patterns_take_linear_time() -> None:
    assert not found_in("a*" * 400 + "b", "a" * 100_000)


def test_functions_files_and_the_slab_cache_are_searched() -> None:
    names = names_of(["main", "keep (/src/pool.c:9)", "libx.so+0x10"], "kmalloc-64")
    assert names == ("main", "keep (/src/pool.c:9)", "keep", "/src/pool.c", "libx.so+0x10", "kmalloc-64")
    for pattern in ("^keep$", "pool.c$", "libx.so", "^kmalloc-64$"):
        assert Suppression(pattern, "why", "s.txt", 1).matches(names)


def test_a_reason_stands_above_or_behind() -> None:
    found = parse_suppressions(
        "# The pool is filled once,\n#   by design.\nleak:pool\nleak:arena\n\n"
        "leak:old#name  # goes with v2\n# only this one\nleak:last\r\n",
        "s.txt",
    )
    assert found == [
        Suppression("pool", "The pool is filled once, by design.", "s.txt", 3),
        Suppression("arena", "The pool is filled once, by design.", "s.txt", 4),
        Suppression("old#name", "goes with v2", "s.txt", 6),
        Suppression("last", "only this one", "s.txt", 8),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("leak:pool", "s.txt:1: leak:pool has no reason"),
        ("# why\n\nleak:pool", "s.txt:3: leak:pool has no reason"),
        ("# why\nrace:pool", "s.txt:2: race: is of another sanitizer"),
        ("# why\nleak:", "would suppress everything"),
        ("# why\nleak:**", "would suppress everything"),
        ("# why\nleak:^*$", "would suppress everything"),
        ("# why\njust text", "s.txt:2: not a suppression"),
        ("# why\nleak:" + "x" * 2000, "longer than"),
        ("#\nleak:pool", "has no reason"),
    ],
)
def test_anything_else_is_one_line_that_says_where(text: str, said: str) -> None:
    with pytest.raises(BadInputError) as refused:
        parse_suppressions(text, "s.txt")
    assert said in str(refused.value) and "\n" not in str(refused.value)

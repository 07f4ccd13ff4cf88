"""The classes of liveness are total and exclusive; the classic scheme is what it is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakscope.liveness.classes import Facts, classify, document_rules
from leakscope.model.liveness import CLASSES

S = 1_000_000_000
NAN, INF = math.nan, math.inf


def facts(*rows: tuple[float, bool, float, bool, float]) -> Facts:
    """(refcount, held, age_s, stale, ttl_left_s) a row."""
    refcount, held, age, stale, ttl = (np.array(column) for column in zip(*rows, strict=True))
    return Facts(
        refcount.astype(np.float64), held.astype(bool), age.astype(np.float64) * S, stale.astype(bool),
        ttl.astype(np.float64) * S,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ((2, True, 1.0, False, NAN), "strong"),
        ((2, True, 1.01, False, NAN), "normal"),
        ((1, True, 0.1, False, 9.99), "weak"),
        ((1, True, 0.1, False, 10), "normal"),
        ((1, True, 0.1, False, INF), "normal"),
        ((1, True, 0.1, False, NAN), "normal"),
        ((3, True, 500, True, 60), "held-stale"),
        ((3, True, 0.1, True, 60), "held-stale"),  # one of three has not let go, the others work on
        ((NAN, True, 500, True, NAN), "held-stale"),  # held, by how many is not known
        ((NAN, True, NAN, False, NAN), "normal"),
        ((2, True, 0.1, False, 0), "zombie"),
        ((0, False, 500, False, -3), "zombie"),
        ((NAN, False, NAN, False, -3), "zombie"),
        ((0, False, 500, False, INF), "immortal"),
        ((NAN, False, 500, False, INF), "immortal"),
        ((0, False, 500, False, 60), "idle-cached"),
        ((0, False, NAN, True, NAN), "idle-cached"),  # nobody holds it: not held for long
        ((NAN, False, 500, False, 60), "unknown-ref"),  # never taken for one reference
        ((NAN, False, NAN, True, NAN), "unknown-ref"),
    ],
)
def test_what_each_class_is(row: tuple[float, bool, float, bool, float], name: str) -> None:
    assert CLASSES[classify(facts(row))[0]] == name


numbers = st.one_of(st.just(NAN), st.just(0.0), st.integers(0, 3).map(float))
times = st.one_of(st.just(NAN), st.floats(0, 100))
ttls = st.one_of(st.just(NAN), st.just(INF), st.floats(-100, 100))


@given(st.lists(st.tuples(numbers, st.booleans(), times, st.booleans(), ttls), min_size=1, max_size=40))
def test_hypothesis_each_object_is_in_exactly_one_class(rows: list[tuple[float, bool, float, bool, float]]) -> None:
    of = facts(*rows)
    classes = classify(of)
    assert classes.shape == (len(rows),)
    for (refcount, held, age, stale, ttl), code in zip(rows, classes, strict=True):
        held = held or refcount > 0
        expired, forever = ttl <= 0, ttl == INF
        # each class by its own words; together they leave nothing out and share nothing
        strong = refcount >= 2 and age <= 1
        weak = refcount == 1 and ttl < 10
        members = {
            "zombie": expired,
            "held-stale": not expired and held and stale,
            "strong": not expired and not (held and stale) and strong,
            "weak": not expired and not (held and stale) and not strong and weak,
            "normal": not expired and held and not stale and not strong and not weak,
            "immortal": not expired and not held and forever,
            "idle-cached": not expired and not held and not forever and refcount == 0,
            "unknown-ref": not expired and not held and not forever and refcount != 0,
        }
        assert [name for name, member in members.items() if member] == [CLASSES[code]]
    # and classes do not depend on what else is there
    assert classes.tolist() == [int(classify(facts(row))[0]) for row in rows]


def test_the_classic_scheme_leaves_out_what_leaks() -> None:
    # given two strong, one weak, the classic leak (two references, old), a long TTL, an expired, an idle, an unknown
    of = facts(
        (2, True, 0.5, False, 60), (5, True, 1.0, False, NAN), (1, True, 30, False, 9), (2, True, 500, True, 60),
        (1, True, 0.5, False, 3600), (1, True, 0.5, False, -1), (0, False, 9, False, 60), (NAN, True, 9, False, NAN),
    )  # fmt: skip
    rules = document_rules(of, 10 ** np.arange(8))
    assert (rules.objects, rules.looked_at, rules.strong, rules.weak, rules.without_class) == (8, 5, 2, 1, 2)
    assert (rules.expired, rules.unreferenced, rules.unknown) == (1, 1, 1)
    assert (rules.hidden_bytes, rules.without_class_bytes) == (11_100_000, 11_000)
    values = rules.to_json()
    assert (values["scan_ms"], values["strong_share"], values["weak_share"]) == (500, 0.25, 0.125)
    assert len(values["faults"]) == 4

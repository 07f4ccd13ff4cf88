"""Lives, holds and classes of cache objects, on events whose truth is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leakscope.liveness.caches import add_cache
from leakscope.liveness.graph import Graph, GraphBuilder
from leakscope.liveness.lives import CacheLives, Latest, cache_lives, with_inferred
from leakscope.liveness.moments import Moment, moment, usual_holds
from leakscope.liveness.rows import rows_of
from leakscope.model.liveness import CLASSES, EDGE_KINDS
from leakscope.model.words import NEVER

S = 1_000_000_000
STALE = {"pin": 30.0 * S, "ref": 30.0 * S, "view": 30.0 * S, "inferred": 0.0}


def lives(*events: dict[str, Any] | tuple[Any, ...]) -> CacheLives:
    """Events as (seconds, op, object, owner) or dictionaries with further columns; ``t`` is in seconds."""
    rows = [dict(zip(("t", "op", "object", "owner"), e, strict=False)) if isinstance(e, tuple) else e for e in events]
    nothing: dict[str, Any] = {"refcount": math.nan}
    texts = ("op", "object", "owner", "base", "parent", "medium", "generation")
    columns = {
        name: [row.get(name, nothing.get(name, "" if name in texts else 0)) for row in rows]
        for name in (*texts, "size_bytes", "hold", "expires_ns", "refcount", "last_access_ns", "user_stack")
    }
    return cache_lives(rows_of(pa.table({"ts_ns": [round(row["t"] * S) for row in rows], **columns})))


def at(of: CacheLives, t: float) -> tuple[Moment, dict[str, tuple[str, float]]]:
    """The moment, and by object: class and reference count (-1 = not known)."""
    now = moment(of, round(t * S), STALE, 30.0 * S)
    names = of.names.take(pa.array(of.lives.object[now.rows])).to_pylist()
    counts = np.nan_to_num(now.facts.refcount, nan=-1).tolist()
    return now, dict(zip(names, zip((CLASSES[c] for c in now.classes), counts, strict=True), strict=True))


def graph_of(of: CacheLives, t: float) -> tuple[Graph, set[tuple[str, str, str]]]:
    """The graph, and its edges by name without those of the root."""
    builder = GraphBuilder()
    add_cache(builder, 0, "c", of, moment(of, round(t * S), STALE, 30.0 * S))
    graph = builder.build()
    edges = zip(*(graph.edges[name].tolist() for name in ("tail", "kind", "head")), strict=True)
    named = {(graph.name(t), EDGE_KINDS[k], graph.name(h)) for t, k, h in edges}
    return graph, {edge for edge in named if edge[1] != "roots"}


def test_holds_are_of_who_takes_them() -> None:
    # given a pin of a that is given up by who took it last, one of b by who took it first
    of = lives(
        (1, "insert", "x", "store"), (2, "pin", "x", "a"), (3, "pin", "x", "b"), (4, "unpin", "x", "a"),
        (5, "ref", "x", "a"), (6, "ref", "x", "a"), (7, "unref", "x", "a"), (8, "insert", "y", "store"),
    )  # fmt: skip
    now, found = at(of, 8)
    assert found == {"x": ("normal", 2.0), "y": ("idle-cached", 0.0)}
    assert [of.owners[int(o)].as_py() for o in now.holds.holds.owner] == ["b", "a"]
    assert [int(t) // S for t in now.holds.from_ns] == [3, 5]
    # and where releases are of somebody else the youngest is given up
    other = lives((1, "insert", "x", "s"), (2, "pin", "x", "a"), (3, "pin", "x", "b"), (4, "unpin", "x", "sweeper"))
    now, _ = at(other, 5)
    assert [other.owners[int(o)].as_py() for o in now.holds.holds.owner] == ["a"]


def test_numbered_holds_are_told_apart() -> None:
    take = [{"t": 1 + n, "op": "ref", "object": "x", "owner": "a", "hold": n, "user_stack": n} for n in (1, 2, 3)]
    give = [{"t": 10 + n, "op": "unref", "object": "x", "hold": n} for n in (3, 1)]
    of = lives({"t": 1, "op": "insert", "object": "x"}, *take, *give)
    now, found = at(of, 60)
    assert found == {"x": ("held-stale", 1.0)}
    assert (now.holds.from_ns.tolist(), now.holds.holds.stack.tolist()) == ([3 * S], [2])


def test_what_is_known_and_what_is_not() -> None:
    known = {"t": 5, "op": "state", "object": "counted", "refcount": 2}
    # given a source that never tells of holds, and one object that it counts
    of = lives((1, "insert", "x"), (2, "access", "x"), known, {"t": 6, "op": "state", "object": "none", "refcount": 0})
    _, found = at(of, 6)
    assert found == {"x": ("unknown-ref", -1.0), "counted": ("normal", 2.0), "none": ("idle-cached", 0.0)}
    # then an object that is only counted grows stale by its last use
    used = {"t": 90, "op": "state", "object": "used", "refcount": 1, "last_access_ns": 89 * S}
    old = {"t": 90, "op": "state", "object": "old", "refcount": 1, "last_access_ns": 3 * S}
    _, found = at(lives(used, old), 90)
    assert found == {"used": ("normal", 1.0), "old": ("held-stale", 1.0)}
    # and a count holds until a later hold or release
    later = lives(known, {"t": 6, "op": "unref", "object": "counted"}, {"t": 7, "op": "ref", "object": "counted"})
    assert at(later, 7)[1] == {"counted": ("normal", 1.0)}


def test_time_to_live_generations_and_unknown_ones() -> None:
    of = lives(
        {"t": 1, "op": "insert", "object": "over", "expires_ns": 4 * S},
        {"t": 1, "op": "insert", "object": "held", "expires_ns": 4 * S},
        {"t": 1, "op": "insert", "object": "renewed", "expires_ns": 4 * S},
        {"t": 1, "op": "insert", "object": "forever", "expires_ns": NEVER},
        {"t": 1, "op": "insert", "object": "old", "generation": "m1"},
        {"t": 2, "op": "pin", "object": "held", "owner": "a"},
        {"t": 3, "op": "access", "object": "renewed", "expires_ns": 20 * S},
        {"t": 5, "op": "invalidate", "generation": "m1"},
        {"t": 6, "op": "insert", "object": "new", "generation": "m1"},
    )
    _, found = at(of, 7)
    assert {name: cls for name, (cls, _) in found.items()} == {
        "over": "zombie", "held": "zombie", "renewed": "idle-cached", "forever": "immortal", "old": "zombie",
        "new": "idle-cached",
    }  # fmt: skip
    _, before = at(of, 3.5)
    assert (before["over"][0], before["held"][0], before["old"][0]) == ("idle-cached", "weak", "idle-cached")


def test_a_hold_is_stale_unless_its_holder_uses_the_object() -> None:
    # given two holders of one object, of whom one goes on using it, and an access by nobody in particular of another
    of = lives(
        (1, "insert", "x"), (1, "insert", "y"), (2, "pin", "x", "user"), (2, "pin", "x", "leaker"),
        (2, "pin", "y", "leaker"), (3, "pin", "z", "user"), (50, "access", "x", "user"), (50, "access", "y"),
        (50, "access", "z", "user"),
    )  # fmt: skip
    now, found = at(of, 60)
    assert found == {"x": ("held-stale", 2.0), "y": ("normal", 1.0), "z": ("normal", 1.0)}
    assert [of.owners[int(o)].as_py() for o in now.holds.holds.owner[now.holds.stale]] == ["leaker"]


def test_views_hold_their_base_until_they_are_evicted() -> None:
    of = lives(
        {"t": 1, "op": "insert", "object": "base", "size_bytes": 1000},
        {"t": 2, "op": "view", "object": "v", "base": "base", "owner": "a", "size_bytes": 8},
        {"t": 2, "op": "view", "object": "w", "base": "base", "owner": "b", "size_bytes": 8},
        {"t": 3, "op": "evict", "object": "w", "owner": "b"},
    )
    _, found = at(of, 3)
    assert found == {"base": ("normal", 1.0), "v": ("normal", 1.0)}
    assert at(of, 2)[1]["base"] == ("strong", 2.0)
    graph, edges = graph_of(of, 3)
    assert edges == {("a", "holds", "v"), ("v", "view-of", "base"), ("cache c", "evicted-by", "b")}
    names = {graph.name(node): int(graph.retained_bytes[node]) for node in range(len(graph))}
    assert names["a"] == names["v"] == 1008
    # and a view whose base was never seen holds nothing but itself
    assert at(lives({"t": 2, "op": "view", "object": "v", "base": "gone", "owner": "a"}), 3)[1] == {
        "v": ("normal", 1.0)
    }


def test_children_keep_their_prefix_and_the_cache_the_rest() -> None:
    blocks = [
        {"t": 1, "op": "insert", "object": name, "parent": parent, "size_bytes": 16, "medium": "GPU"}
        for name, parent in (("p", ""), ("q", "p"), ("r", "q"), ("idle", "p"), ("lost", "unknown"))
    ]
    of = lives(*blocks, (2, "ref", "r", "request-1"))
    graph, edges = graph_of(of, 3)
    assert edges == {
        ("request-1", "holds", "r"), ("r", "parent-block", "q"), ("q", "parent-block", "p"),
        ("idle", "parent-block", "p"), ("cache c, GPU", "caches", "idle"), ("cache c, GPU", "caches", "lost"),
    }  # fmt: skip
    retained = {graph.name(node): int(graph.retained_bytes[node]) for node in range(len(graph))}
    # p is kept by the idle block too, so that the request alone retains q and r
    assert (retained["request-1"], retained["cache c, GPU"], retained["root"]) == (32, 32, 80)


def test_clears_and_gaps() -> None:
    of = lives(
        {"t": 1, "op": "insert", "object": "g", "medium": "GPU"},
        {"t": 1, "op": "insert", "object": "c", "medium": "CPU"},
        (2, "pin", "c", "a"), {"t": 3, "op": "clear", "medium": "GPU"}, {"t": 4, "op": "access", "object": "g"},
        (5, "gap", ""), (6, "insert", "n", "s"), (7, "pin", "n", "a"),
    )  # fmt: skip
    assert set(at(of, 3)[1]) == {"c"}
    # then an object that is used after its medium was cleared is there again, its count not known after a gap
    _, found = at(of, 8)
    assert found == {"c": ("unknown-ref", -1.0), "g": ("unknown-ref", -1.0), "n": ("normal", 1.0)}
    everything = lives((1, "insert", "x"), {"t": 2, "op": "insert", "object": "y", "medium": "GPU"}, (3, "clear", ""))
    assert at(everything, 3)[1] == {}
    # and a gap before everything hides nothing
    assert at(lives((1, "gap", ""), (2, "insert", "x"), (3, "pin", "x", "a")), 3)[1] == {"x": ("normal", 1.0)}


def test_inferred_holds_are_known_to_be_held_and_not_by_how_many() -> None:
    of = with_inferred(lives((1, "insert", "x"), (1, "insert", "y"), (2, "evict", "gone")), "a request", ["x", "gone"])
    _, found = at(of, 3)
    assert found == {"x": ("held-stale", -1.0), "y": ("unknown-ref", -1.0)}
    assert ("a request", "holds", "x") in graph_of(of, 3)[1]


def test_how_long_holds_last_is_told_by_those_that_were_given_up() -> None:
    # given 100 pins of 1 s, one of 9 s, and two that their object's eviction ended
    events: list[tuple[Any, ...]] = []
    for number in range(103):
        events += [(number, "insert", f"o{number}"), (number, "pin", f"o{number}", "a")]
        end = (number + (9 if number == 50 else 1), "unpin" if number < 101 else "evict", f"o{number}", "a")
        events.append(end)
    of = lives(*sorted(events, key=lambda event: event[0]))
    usual = usual_holds(of, "pin", 7.0)
    assert usual.given_up == 101
    assert usual.limit_ns == 2 * S  # twice the 99th percentile
    assert usual_holds(of, "ref", 7.0) == (7.0, 0)


@pytest.mark.parametrize("most", [2**62, 4])
def test_the_last_row_of_a_key(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr("leakscope.liveness.lives.MAX_PLACE", most)  # 4: keys are numbered
    keys, rows = np.array([7, 0, 7, 5, 7]), np.array([1, 2, 4, 8, 9])
    latest = Latest(keys, rows, 10, rows * 100)
    for row, expected in ((0, [-1, -1, -1, -1]), (4, [4, 2, -1, -1]), (8, [4, 2, 8, -1]), (9, [9, 2, 8, -1])):
        found, values = latest.find(np.array([7, 0, 5, 6]), row)
        assert found.tolist() == expected
        assert [v for f, v in zip(found, values, strict=True) if f >= 0] == [f * 100 for f in expected if f >= 0]


Event = tuple[str, str, str, str]
objects, owners = st.sampled_from("xyz"), st.sampled_from(["a", "b", ""])
steps = st.one_of(
    st.tuples(st.sampled_from(["insert", "evict", "access", "state"]), objects, owners, st.just("")),
    st.tuples(st.sampled_from(["pin", "unpin", "ref", "unref"]), objects, owners, st.just("")),
    st.tuples(st.just("view"), st.sampled_from("vw"), owners, objects),
    st.tuples(st.just("evict"), st.sampled_from("vw"), owners, st.just("")),
    st.tuples(st.just("clear"), st.just(""), st.just(""), st.just("")),
)


class Plain:
    """One event after another: what lives, who holds it."""

    def __init__(self, events: list[Event], by_owner: dict[str, bool]) -> None:
        self.holds: dict[str, dict[str, list[tuple[str, int]]]] = {}  # object → kind → (owner, since)
        self.bases: dict[str, tuple[str, int]] = {}  # live view → its base and the birth of that
        self.born: dict[str, int] = {}
        self.mismatched: set[str] = set()
        for number, event in enumerate(events, 1):
            self.step(number, *event, by_owner)

    def end(self, name: str) -> None:
        self.holds.pop(name, None)
        self.bases.pop(name, None)

    def begin(self, name: str, number: int) -> None:
        self.end(name)
        self.holds[name], self.born[name] = {"pin": [], "ref": []}, number

    def step(self, number: int, op: str, name: str, owner: str, base: str, by_owner: dict[str, bool]) -> None:
        if op == "clear":
            for each in list(self.holds):
                self.end(each)
        elif op == "evict":
            self.end(name)
        elif op in ("unpin", "unref"):
            kind = op[2:]
            if name not in self.holds:
                return
            taken = self.holds[name][kind]
            own = [i for i, (holder, _) in enumerate(taken) if holder == owner or not by_owner[kind]]
            if own:
                del taken[own[-1]]
            else:
                self.mismatched.add(kind)
        else:
            if op in ("insert", "view") or name not in self.holds:
                self.begin(name, number)
            if op in ("pin", "ref"):
                self.holds[name][op].append((owner, number))
            if op == "view" and base in self.holds:
                self.bases[name] = base, self.born[base]

    def counts(self) -> dict[str, int]:
        views = [v for v in self.holds if v in "vw"]
        kept = [base for base, born in self.bases.values() if self.born.get(base) == born]
        return {
            name: len(held["pin"]) + len(held["ref"]) + (name in views) + kept.count(name)
            for name, held in self.holds.items()
        }


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, min_size=1, max_size=40))
def test_hypothesis_lives_and_holds_are_those_of_going_through_the_events(events: list[Event]) -> None:
    first = Plain(events, {"pin": True, "ref": True})
    plain = Plain(events, {kind: kind not in first.mismatched for kind in ("pin", "ref")})
    of = lives(*({"t": n, "op": o, "object": x, "owner": w, "base": b} for n, (o, x, w, b) in enumerate(events, 1)))
    now, found = at(of, len(events))
    holding = any(op in ("pin", "unpin", "ref", "unref", "view") for op, *_ in events)
    assert {name: count for name, (_, count) in found.items()} == {
        name: float(count) if holding else -1.0 for name, count in plain.counts().items()
    }
    mine = sorted(
        (of.names[int(of.lives.object[life])].as_py(), "" if o < 0 else of.owners[int(o)].as_py(), int(since) // S)
        for life, o, since, kind in zip(
            now.holds.holds.life, now.holds.holds.owner, now.holds.from_ns, now.holds.holds.kind, strict=True
        )
        if kind < 2
    )
    theirs = [(name, *hold) for name, held in plain.holds.items() for hold in held["pin"] + held["ref"]]
    assert mine == sorted(theirs)
    # and every object hangs on the root by some path
    graph, _ = graph_of(of, len(events))
    assert (graph.dominators >= 0).all()


def test_events_without_objects() -> None:
    of = lives({"t": 1, "op": "insert_fail"}, {"t": 2, "op": "unpin", "object": "x"})
    now, found = at(of, 3)
    assert (found, len(now.rows), of.failed_inserts) == ({}, 0, 1)

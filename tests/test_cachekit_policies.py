"""Eviction policies against their definitions, worked out from the whole list of references each time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakscope.cachekit import LRFU, LRU, LRUK, Cache, DecayedCount, Policy

References = list[tuple[int, int]]  # (seconds since the one before, key)
REFERENCES = st.lists(st.tuples(st.sampled_from([0, 1, 2, 7, 30, 400]), st.integers(0, 7)), min_size=1, max_size=60)


def replay(
    policy: Policy,
    references: References,
    size: int,
    expected: Callable[[list[tuple[float, int]], set[int], float], int],
) -> int:
    """Runs a cache of ``size`` keys; each victim must be the expected one. How many there were."""
    now, log, resident, victims = 1_000.0, list[tuple[float, int]](), set[int](), 0
    for gap, key in references:
        now += gap
        if key in resident:
            policy.touch(key, now)
        else:
            if len(resident) == size:
                victim = policy.victim(now)
                assert victim == expected(log, resident, now)
                assert isinstance(victim, int)
                policy.forget(victim, now)
                resident.remove(victim)
                victims += 1
            policy.admit(key, now)
            resident.add(key)
        log.append((now, key))
    return victims


@given(REFERENCES)
def test_lru_evicts_what_was_used_longest_ago(references: References) -> None:
    def expected(log: list[tuple[float, int]], resident: set[int], now: float) -> int:
        return min(resident, key=lambda key: max(i for i, (_, other) in enumerate(log) if other == key))

    replay(LRU(), references, 3, expected)


@pytest.mark.parametrize("k", [1, 2, 3])
@given(references=REFERENCES)
def test_lru_k_evicts_the_largest_backward_k_distance(k: int, references: References) -> None:
    """With all history retained: the K-th last reference ever, before the eviction too."""

    def expected(log: list[tuple[float, int]], resident: set[int], now: float) -> int:
        def order(key: int) -> tuple[float, float, int]:
            times = [at for at, other in log if other == key]
            last = max(i for i, (_, other) in enumerate(log) if other == key)
            return (times[-k] if len(times) >= k else -math.inf, times[-1], last)

        return min(resident, key=order)

    replay(LRUK(k, retained_s=math.inf), references, 3, expected)


def test_history_outlives_eviction_for_the_retained_time() -> None:
    def victim(retained_s: float) -> object:
        policy = LRUK(2, retained_s=retained_s)
        policy.admit("a", 0)
        policy.forget("a", 10)
        policy.admit("a", 100)  # its second reference, if the first is remembered
        policy.admit("b", 200)
        return policy.victim(210)

    assert (victim(100), victim(99)) == ("b", "a")


def test_histories_of_absent_keys_are_bounded() -> None:
    policy = LRUK(2, retained_s=math.inf, retained_keys=5)
    for number in range(1_000):
        policy.admit(number, number)
        policy.forget(number, number)
    assert len(policy._history) == len(policy._last) == len(policy._absent) == 5
    policy = LRUK(2, retained_s=50)
    for number in range(1_000):
        policy.admit(number, number)
        policy.forget(number, number)
    assert len(policy._history) == 51


def test_correlated_references_count_as_one_and_protect() -> None:
    policy = LRUK(2, correlated_s=5)
    policy.admit("burst", 0)
    for at in (1, 3, 6, 10):  # each at most 5 s after the one before: one reference
        policy.touch("burst", at)
    policy.admit("twice", 2)
    policy.touch("twice", 12)
    assert policy.victim(20) == "burst"
    assert policy.victim(14) == "burst"  # last referenced 4 s ago, but so is the other
    policy.admit("old", 0)
    assert policy.victim(14) == "old"  # the only one that was not referenced within 5 s
    policy.touch("burst", 30)  # the burst of 10 s is taken out of the time between the two references
    assert policy._history["burst"] == [30, 10]


def replay_weights(
    policy: DecayedCount | LRFU, references: References, later: float, weight: Callable[[list[float], float], float]
) -> None:
    """Each victim must have the least ``weight`` of its references since it came in, at any later time."""
    now, since = 1_000.0, dict[int, list[float]]()
    for gap, key in references:
        now += gap
        if key in since:
            policy.touch(key, now)
        else:
            if len(since) == 3:
                weights = {other: weight(times, now + later) for other, times in since.items()}
                victim = policy.victim(now)
                assert isinstance(victim, int)
                assert weights[victim] == pytest.approx(min(weights.values()), rel=1e-9)
                assert policy.weight(victim, now + later) == pytest.approx(weights[victim], rel=1e-9)
                policy.forget(victim, now)
                del since[victim]
            policy.admit(key, now)
        since.setdefault(key, []).append(now)


@pytest.mark.parametrize("rate", [0.1, 3.0])
@given(references=REFERENCES, later=st.sampled_from([0.0, 17.0, 3_000.0]))
def test_the_decayed_count_is_the_formula(rate: float, references: References, later: float) -> None:
    """k·e^(−rate·age/60), whenever it is asked: the order does not change with time."""
    replay_weights(
        DecayedCount(rate),
        references,
        later,
        lambda times, now: len(times) * math.exp(-rate * (now - times[-1]) / 60),
    )


@given(references=REFERENCES, later=st.sampled_from([0.0, 17.0, 300.0]))
def test_lrfu_is_the_sum_of_aged_references(references: References, later: float) -> None:
    replay_weights(LRFU(50.0), references, later, lambda times, now: sum(2.0 ** (-(now - time) / 50) for time in times))


def test_the_half_life_is_said_correctly() -> None:
    policy = DecayedCount()
    policy.admit("a", 0)
    assert policy.half_life_s == pytest.approx(415.888, abs=0.001)  # 60·ln 2/0.1; not 60
    assert policy.weight("a", policy.half_life_s) == pytest.approx(0.5)
    assert policy.weight("a", 60) == pytest.approx(0.9048, abs=1e-4)
    assert policy.weight("a", 300) == pytest.approx(0.6065, abs=1e-4)
    assert DecayedCount(60 * math.log(2) / 60).half_life_s == pytest.approx(60)
    assert LRFU().half_life_s == pytest.approx(policy.half_life_s)


@pytest.mark.parametrize(
    ("policy", "victim"), [(DecayedCount(), "steady"), (LRFU(), "once hot"), (LRUK(2, retained_s=1e9), "once hot")]
)
def test_one_more_reference_makes_all_earlier_ones_fresh(policy: Policy, victim: str) -> None:
    """Why the decayed count is neither LRU-K nor LRFU: a key hit 1,000 times days ago and once now."""
    policy.admit("once hot", 0.0)
    for _ in range(999):
        policy.touch("once hot", 0.0)
    policy.admit("steady", 499_000.0)
    for number in range(1, 10):
        policy.touch("steady", 499_000.0 + 100 * number)
    policy.touch("once hot", 500_000.0)
    assert policy.victim(500_000.0) == victim


@pytest.mark.parametrize("make", [LRU, LRUK, DecayedCount, LRFU])
def test_held_keys_are_no_victims(make: Callable[[], Policy]) -> None:
    policy = make()
    for number in range(4):
        policy.admit(number, number)
    policy.hold(0)
    policy.touch(0, 5)
    policy.hold(1)
    assert policy.victim(6) == 2
    policy.unhold(0, 7)
    policy.forget(2, 8)
    policy.forget(3, 8)
    assert policy.victim(9) == 0
    policy.hold(0)
    assert policy.victim(9) is None


@pytest.mark.parametrize("make", [LRUK, DecayedCount, LRFU])
def test_ranks_that_are_left_behind_do_not_pile_up(make: Callable[[], Policy]) -> None:
    policy = make()
    for number in range(10):
        policy.admit(number, 0)
    for number in range(10_000):
        policy.touch(number % 10, number)
    assert len(policy._heap) <= 2 * 10 + 65  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [LRU, LRUK, DecayedCount, LRFU])
def test_a_cache_takes_any_policy(make: Callable[[], Policy]) -> None:
    cache: Cache[int, int] = Cache(3, ttl=60, policy=make)
    for number in range(10):
        cache[number] = number
        _ = cache[number], cache.get(0)
    assert len(cache) == 3 and 0 in cache


@pytest.mark.parametrize("wrong", [lambda: LRUK(0), lambda: DecayedCount(0), lambda: LRFU(-1)])
def test_what_makes_no_policy(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"not (0|-1)"):
        wrong()

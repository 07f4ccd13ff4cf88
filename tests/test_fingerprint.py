"""The sequence of API calls as a fingerprint: what it decides where nothing stronger does, and when it says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import planted as p
import pytest
from planted import outcome

from leakscope.correlate.joins import fingerprint
from leakscope.correlate.joins.fingerprint import ApiCalls, same_calls, same_threads
from leakscope.correlate.joins.pair import join_pair

APIS = ("cudaMalloc", "cudaFree", "cudaMallocAsync", "cudaFreeAsync", "cudaHostAlloc")


def test_fingerprints_find_the_same_place_in_two_sequences() -> None:
    rng = np.random.default_rng(1)
    names = ["cudaMalloc", "cudaFree", "cudaMemcpy", "cudaLaunchKernel"]
    said = [names[i] for i in rng.integers(0, 4, 300)]
    suffixed = [f"{name}_v3020" for name in said[40:]]
    ones = np.ones(300, np.int64)
    left = fingerprint.api_fingerprints(ones, np.arange(300), fingerprint.api_numbers(said))
    right = fingerprint.api_fingerprints(ones[:260], 10_000 * np.arange(260), fingerprint.api_numbers(suffixed))
    a, b = fingerprint.unique_on_both(left, right)
    assert len(a) > 240 and (a == b + 40).all()
    assert (left[:7] == 0).all()


def calls(api: np.ndarray, at_ns: np.ndarray, thread: int = 1) -> ApiCalls:
    return ApiCalls(np.full(len(api), thread), at_ns.astype(np.int64), api.astype(np.int64))


def test_calls_of_one_run_agree_in_time_and_functions_of_one_side_are_left_out() -> None:
    # given 400 calls, of which the other side saw the last 300, 5 s off, and calls of a function of its own in between
    rng = np.random.default_rng(2)
    api, at = rng.integers(10, 15, 400), np.arange(400) * 1_000_000
    theirs = np.concatenate([api[100:], np.full(50, 99)])
    their_at = np.concatenate([at[100:], 100_000_000 + 500_000 + np.arange(50) * 4_000_000]) + 5 * p.SECOND
    # when they are compared
    agreed = same_calls(calls(api, at), calls(theirs, their_at, thread=8))
    # then every pair is the same call
    assert len(agreed.left.at_ns) > 280 and agreed.apart_ns == -5 * p.SECOND
    assert (agreed.left.at_ns == agreed.right.at_ns - 5 * p.SECOND).all() and agreed.rejected == 0
    assert same_threads(agreed.right.thread, agreed.left.thread) == {8: 1}


def test_the_same_calls_at_another_pace_and_a_single_burst_decide_nothing() -> None:
    rng = np.random.default_rng(2)
    api, at = rng.integers(10, 15, 400), np.arange(400) * 1_000_000
    other_run = same_calls(calls(api, at), calls(api, at + at // 50))
    assert len(other_run.left.at_ns) == 0 and other_run.rejected > 380
    burst = same_calls(calls(api, at), calls(api[:15], at[:15]))
    assert len(burst.left.at_ns) == 0 and burst.rejected == 8
    periodic = np.tile([10, 11, 12], 100)
    same = same_calls(calls(periodic, at[:300]), calls(periodic, at[:300]))
    assert (len(same.left.at_ns), same.ambiguous, same.rejected) == (0, 293, 0)


def test_a_thread_with_pairs_of_several_is_left_out() -> None:
    theirs, ours = np.array([1, 1, 1, 2, 2, 2, 2, 3, 3]), np.array([7, 7, 7, 8, 8, 8, 9, 6, 6])
    assert same_threads(theirs, ours) == {1: 7}


@pytest.fixture(scope="module")
def varied() -> p.Planted:
    """The planted run with one of five functions for each outer call."""
    run = p.planted()
    rng = np.random.default_rng(5)
    for row in run.calls:
        if not row["parent_id"]:
            row["api"] = APIS[int(rng.integers(0, len(APIS)))]
    return run


@pytest.fixture(scope="module")
def recording(varied: p.Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return p.write_recording(tmp_path_factory.mktemp("varied") / "run.lscope", varied)


def test_calls_alone_tell_the_process_and_the_clock(
    varied: p.Planted, recording: Path, opened: Any, tmp_path: Path
) -> None:
    # given exports without memory events and without a start, of either process that had the PID
    for life in p.LIVES[:2]:
        path = p.write_nsys(tmp_path / f"{life.steps}.lscope", varied, "relative", (life,), memory=False)
        evidence = opened(recording, path)
        # when they are joined
        joint = join_pair(*evidence.evidence)
        # then it is that process, at that time, and all other calls are found by it
        assert joint.lives[p.PID].start_ns == life.start_ns - 1_000
        assert joint.alignment.offset_ns == -p.nsys_source("relative")[1] and joint.alignment.residual_ns == (0, 0)
        told = outcome(evidence.joined(), "stack")
        assert told.matched > 100 and told.confidence == 1.0
        assert told.matched + told.ambiguous + told.refused == life.steps
        assert told.reasons == (
            "the order of API calls, 8 of a thread, tells which of 2 processes PID 700 is",
            "the order of API calls, 8 of a thread, tells where the report lies on the recording's clock",
        )
        assert outcome(evidence.joined(), "identity", "calls").matched == 2 * life.steps


def test_calls_alone_tell_the_threads_of_a_container_and_so_their_ranges(
    varied: p.Planted, recording: Path, opened: Any, tmp_path: Path
) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", varied, "monotonic", (p.LIVES[2],), memory=False)
    evidence = opened(recording, report)
    joint = join_pair(*evidence.evidence)
    assert joint.threads == {p.INNER_PID: {p.INNER_PID + 1: 903}}  # of the main one the PID tells
    joined = evidence.joined()
    assert outcome(joined, "range").matched == 400  # of both threads
    assert "tells which thread" in outcome(joined, "stack").reasons[0]


def test_calls_that_repeat_tell_nothing_and_that_is_said(opened: Any, tmp_path: Path) -> None:
    run = p.planted()
    recording = p.write_recording(tmp_path / "run.lscope", run)
    report = p.write_nsys(tmp_path / "n.lscope", run, "relative", p.LIVES[:1], memory=False)
    evidence = opened(recording, report)
    assert not join_pair(*evidence.evidence).lives
    refused = outcome(evidence.joined(), "stack")
    assert (refused.matched, refused.refused) == (0, 300)
    assert refused.reasons == (
        "the order of API calls does not tell which of 2 processes PID 700 is: none of them fit",
    )


def test_allocations_are_asked_first(varied: p.Planted, recording: Path, opened: Any, tmp_path: Path) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", varied, "relative", p.LIVES[:1])
    joined = opened(recording, report).joined()
    assert outcome(joined, "identity", "allocations").matched == 300
    assert not [o for o in joined.outcomes if o.rule == "stack"]

"""The search, nesting, clocks and identity against a planted run whose pairs are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import planted as p
import pytest
from planted import outcome

from leakscope.correlate.joins.clocks import align, measured
from leakscope.correlate.joins.identity import Allocations, same_allocations
from leakscope.correlate.joins.joint import owned
from leakscope.correlate.joins.nesting import Intervals, depths, nested_in
from leakscope.correlate.joins.pair import join_pair
from leakscope.correlate.joins.timeline import Timeline, combined, thread_key
from leakscope.model.manifest import Source

# ---- the search ----


@pytest.mark.parametrize("seed", range(5))
def test_the_timeline_finds_what_a_loop_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    key, at = rng.integers(0, 5, 200), rng.integers(0, 300, 200)
    asked_key, asked_at = rng.integers(-1, 7, 300), rng.integers(-10, 320, 300)
    timeline = Timeline(key, at)

    before, after = timeline.before(asked_key, asked_at), timeline.after(asked_key, asked_at)
    counts = timeline.count_until(asked_key, asked_at), timeline.count_until(asked_key, asked_at, inclusive=False)

    for i in range(300):
        own = at[key == asked_key[i]]
        earlier, later = own[own <= asked_at[i]], own[own > asked_at[i]]
        assert (before[i] >= 0) == bool(len(earlier)) and (after[i] >= 0) == bool(len(later))
        if len(earlier):
            assert key[before[i]] == asked_key[i] and at[before[i]] == earlier.max()
        if len(later):
            assert key[after[i]] == asked_key[i] and at[after[i]] == later.min()
        assert (counts[0][i], counts[1][i]) == (len(earlier), (own < asked_at[i]).sum())


def test_an_empty_timeline_finds_nothing() -> None:
    empty = np.empty(0, np.int64)
    timeline = Timeline(empty, empty)
    asked = np.array([1, 2])
    assert timeline.before(asked, asked).tolist() == timeline.after(asked, asked).tolist() == [-1, -1]
    assert timeline.count_until(asked, asked).tolist() == [0, 0]


def test_combined_numbers_differ_for_swapped_columns() -> None:
    a, b = np.array([1, 2, 1]), np.array([2, 1, 2])
    numbers = combined(a, b)
    assert numbers[0] == numbers[2] != numbers[1]


# ---- rule 1 ----


def test_nesting_is_exact(run: p.Planted) -> None:
    # given the kernel events of the planted run and its calls
    calls = pd.DataFrame(run.calls)
    intervals = Intervals(
        thread_key(calls["pid"].to_numpy(), calls["tid"].to_numpy()),
        calls["enter_ns"].to_numpy(), calls["exit_ns"].to_numpy(),
    )  # fmt: skip
    events = pd.DataFrame(run.kernel)
    # when they are joined
    found = nested_in(
        intervals, thread_key(events["pid"].to_numpy(), events["tid"].to_numpy()), events["ts_ns"].to_numpy()
    )
    got = np.where(found >= 0, calls["id"].to_numpy()[found], 0)
    # then each is in exactly the innermost call that was open: precision and recall 1
    truth = np.array(run.kernel_call)
    assert (got == truth).all()
    assert (truth > 0).sum() > 4_000 and (truth == 0).sum() > 1_700
    # and calls inside calls find their parents
    depth = depths(intervals)
    assert (depth == (calls["parent_id"] > 0)).all()


def test_calls_below_the_second_depth_nest_too() -> None:
    ones = np.ones(4, np.int64)
    calls = Intervals(ones, np.array([0, 10, 20, 200]), np.array([100, 90, 30, 300]))
    assert depths(calls).tolist() == [0, 1, 2, 0]
    found = nested_in(calls, np.array([1, 1, 1, 1, 1, 2]), np.array([25, 40, 95, 150, 300, 25]))
    assert found.tolist() == [2, 1, 0, -1, 3, -1]


def test_the_driver_counts_nested_events(run: p.Planted, recording: Path, opened: Any, tmp_path: Path) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", run, "monotonic", p.LIVES[:1])
    joined = opened(recording, report).joined()
    nested = outcome(joined, "nesting", right="calls of run")
    assert nested.matched == sum(call > 0 for call in run.kernel_call)
    assert (nested.ambiguous, nested.refused, nested.confidence) == (0, 0, 1.0)


# ---- clocks and identity ----


@pytest.mark.parametrize("clock", ["monotonic", "boottime", "utc", "relative"])
def test_every_allocation_is_found_on_the_other_clock(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path, clock: str
) -> None:
    # given an export of the first life of the PID and of the process in a container, on another clock
    report = p.write_nsys(tmp_path / "n.lscope", run, clock, (p.LIVES[0],))
    ours, theirs = opened(recording, report).evidence
    # when it is joined
    joint = join_pair(ours, theirs)
    # then each allocation has its partner, the reused addresses too
    truth = run.of_life(p.LIVES[0], "allocations")
    left, right = ours.table("allocations").iloc[joint.pairs[0]], owned(theirs).iloc[joint.pairs[1]]
    assert len(left) == len(truth) == 300
    assert (left["addr"].to_numpy() == right["addr"].to_numpy()).all()
    ahead = p.nsys_source(clock)[1]
    assert (left["ts_ns"].to_numpy() == right["ts_ns"].to_numpy() - ahead + 150_000).all()
    # and the residual is what the two ends of the call differ by, or nothing where the events gave the offset
    assert joint.alignment.residual_ns is not None and not joint.alignment.refused
    assert joint.alignment.residual_ns[1] == (150_000 if clock in ("monotonic", "boottime") else 0)
    assert joint.lives[p.PID].start_ns == p.LIVES[0].start_ns - 1_000


def test_a_reused_pid_is_told_apart_by_time_and_without_it_by_what_both_saw(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path
) -> None:
    for clock in ("monotonic", "relative"):
        report = p.write_nsys(tmp_path / f"{clock}.lscope", run, clock, (p.LIVES[1],))
        joint = join_pair(*opened(recording, report).evidence)
        assert joint.lives[p.PID].start_ns == p.LIVES[1].start_ns - 1_000
        assert len(joint.pairs[0]) == 200


@pytest.mark.parametrize("memory", [True, False])
def test_pids_of_a_container_are_mapped_and_its_threads_by_what_both_saw(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path, memory: bool
) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", run, "monotonic", (p.LIVES[2],), memory=memory)
    joint = join_pair(*opened(recording, report).evidence)
    assert joint.lives[p.INNER_PID].pid == p.OUTER_PID and not joint.lives[p.INNER_PID].same_namespace
    assert len(joint.pairs[0]) == (400 if memory else 0)
    pid, tid = joint.mapped(joint.report.table("calls"))
    assert set(pid) == {p.OUTER_PID}
    assert set(tid) == {p.OUTER_PID, 903 if memory else -1}  # calls that are always the same tell nothing


def test_another_boot_is_refused_and_pairs_nothing(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path
) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", run, "other_boot", (p.LIVES[0],))
    joined = opened(recording, report).joined()
    refused = outcome(joined, "identity")
    assert (refused.matched, refused.refused) == (0, 300)
    assert "another boot" in refused.reasons[-1]
    assert joined.clocks[0].value is None and "another boot" in joined.clocks[0].detail


def test_a_step_of_the_wall_clock_is_part_of_the_error() -> None:
    recording = Source(0, "recording", "r", "monotonic", anchors=p.anchors(step_ns=8_000_000))
    alignment = align(recording, Source(1, "torch_snapshot", "t", "utc"))
    assert alignment.error_ns == 1_000_000 + 4_000_000
    assert alignment.offset_ns == -p.UTC_AHEAD_NS - 4_000_000


def test_events_outrank_a_clock_that_is_wrong_by_its_own_word() -> None:
    recording = Source(0, "recording", "r", "monotonic", anchors=p.anchors())
    alignment = align(recording, Source(1, "nsys", "n", "utc"))
    at = np.arange(1, 10, dtype=np.int64) * p.SECOND
    found = measured(alignment, at, at + p.UTC_AHEAD_NS + 77_000_000)
    assert found.offset_ns == -p.UTC_AHEAD_NS - 77_000_000 and "77.000 ms" in found.how
    # but two events are no evidence
    assert measured(alignment, at[:2], at[:2] + p.UTC_AHEAD_NS + 77_000_000).offset_ns == alignment.offset_ns


def test_without_allocations_the_residual_comes_from_calls(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path
) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", run, "monotonic", (p.LIVES[0],), memory=False)
    joint = join_pair(*opened(recording, report).evidence)
    assert joint.alignment.seen_twice == 600 and joint.alignment.residual_ns == (0, 0)


def test_of_two_candidates_only_the_nearest_is_the_same_allocation() -> None:
    def side(*at: int) -> Allocations:
        n = len(at)
        return Allocations(np.ones(n, np.int64), np.full(n, 64, np.uint64), np.full(n, 8), np.array(at))

    same = same_allocations(side(0, 1_000_000), side(900_000))
    assert (same.left.tolist(), same.right.tolist(), same.ambiguous) == ([1], [0], 1)
    assert len(same_allocations(side(0), side(20_000_000)).left) == 0


def test_a_snapshot_finds_its_process_its_clock_and_gives_its_frames(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path
) -> None:
    # given a snapshot that names no process and whose clock is 30 ms off
    evidence = opened(recording, p.write_torch(tmp_path / "t.lscope", run, p.LIVES[2]))
    joint = join_pair(*evidence.evidence)
    # then what both saw tells the process and the clock, and pool blocks are no allocations of the driver
    assert joint.lives[0].pid == p.OUTER_PID and len(joint.pairs[0]) == len(owned(joint.report)) == 400
    assert joint.alignment.offset_ns == -p.UTC_AHEAD_NS - 30_000_000 and "ms off" in joint.alignment.how
    # and a site that mostly other processes allocate at gets no frames of it
    joined = evidence.joined()
    (of_site,) = joined.links[0].by_site().values()
    assert [(place, link.name) for place, link in of_site if place == "seen"] == [
        ("seen", "the same allocations in snapshot.pickle")
    ]
    assert not [link for place, link in of_site if place == "frame"]
    assert (len(joined.twice[1]), set(joined.twice[1]["pid"])) == (400, {0})


def test_python_frames_that_only_the_snapshot_has_come_in_their_order(tmp_path: Path, opened: Any) -> None:
    run = p.planted()
    run.allocations = run.of_life(p.LIVES[2], "allocations")
    recording = p.write_recording(tmp_path / "run.lscope", run)
    joined = opened(recording, p.write_torch(tmp_path / "t.lscope", run, p.LIVES[2])).joined()
    (of_site,) = joined.links[0].by_site().values()
    frames = [(link.name, link.rule, link.confidence, link.count) for place, link in of_site if place == "frame"]
    assert frames == [("train (train.py:3)", "identity", 1.0, 400), ("forward (model.py:14)", "identity", 1.0, 400)]


def test_a_moment_inside_the_call_is_nearer_than_the_next_calls() -> None:
    # given an address handed out twice within 5 ms, the first call held up at its end
    n = np.ones(2, np.int64)
    whole = Allocations(n, n.astype(np.uint64), n, np.array([5_000_000, 5_100_000]), np.array([0, 5_050_000]))
    moments = Allocations(n, n.astype(np.uint64), n, np.array([10_000, 5_060_000]))
    # then each moment belongs to the call that it lies in
    same = same_allocations(whole, moments)
    assert (same.left.tolist(), same.right.tolist(), same.ambiguous) == ([0, 1], [0, 1], 0)
    same = same_allocations(moments, whole)
    assert (same.left.tolist(), same.right.tolist(), same.ambiguous) == ([0, 1], [0, 1], 0)

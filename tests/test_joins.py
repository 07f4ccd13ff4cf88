"""Every join rule against a planted run whose pairs are known."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import planted as p
import pytest
from planted import outcome

from leakscope.correlate.joins import order, stack
from leakscope.correlate.joins.clocks import align, measured
from leakscope.correlate.joins.driver import JoinOptions
from leakscope.correlate.joins.identity import Allocations, same_allocations
from leakscope.correlate.joins.joint import owned
from leakscope.correlate.joins.nesting import Intervals, depths, nested_in
from leakscope.correlate.joins.pair import join_pair
from leakscope.correlate.joins.timeline import Timeline, combined, thread_key
from leakscope.correlate.joins.window import GPU_WINDOW_NS, KERNEL_WINDOW_NS, beyond_chance, covered_share, near_calls
from leakscope.correlate.stacks import Frame
from leakscope.model.manifest import Source
from nsight_parsers.launch_order import LaunchOrder
from nsight_parsers.launch_order import launch_order as rule_of
from nsight_parsers.ncu_command import parse_command_line

DOCS = Path(__file__).resolve().parent.parent / "docs" / "joins.md"


@pytest.fixture(scope="module")
def run() -> p.Planted:
    return p.planted()


@pytest.fixture(scope="module")
def recording(run: p.Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return p.write_recording(tmp_path_factory.mktemp("planted") / "run.lscope", run)


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


# ---- rule 2 ----


def profiled(run: p.Planted, life: p.Life, options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The order of an ncu command line and what ncu would have profiled by it, from the run alone."""
    launches = run.of_life(life, "launches")
    for option, keep in {
        "-s 5": lambda rows: rows[5:],
        "-c 40": lambda rows: rows[:40],
        "-k softmax": lambda rows: [r for r in rows if r["kernel"] == "softmax"],
        "-k regex:gem+": lambda rows: [r for r in rows if "gemm" in r["kernel"]],
    }.items():
        if option in options:
            launches = keep(launches)
    return asdict(rule_of(parse_command_line(f"ncu {options} ./app"))), launches


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("options", ["-o x", "-s 5", "-c 40", "-s 5 -c 40", "-k softmax", "-k regex:gem+"])
def test_order_is_exact(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path, number: int, options: str
) -> None:
    # given a report of one of the lives, in the zone +08:00, with launches left out by its options
    life = p.LIVES[number]
    how, launches = profiled(run, life, options)
    report = p.write_ncu(tmp_path / "k.lscope", run, life, how, launches, zone_s=8 * 3600)
    # when it is joined
    joined = opened(recording, report).joined()
    # then each action has its launch, and that launch's time: precision and recall 1
    pairs = joined.profiles["report.ncu-rep"]
    assert pairs["launch_id"].tolist() == [row["id"] for row in launches]
    assert pairs["ts_ns"].tolist() == [row["ts_ns"] for row in launches]
    found = outcome(joined, "order")
    assert (found.matched, found.refused) == (len(launches), 0)
    assert found.confidence == (0.95 if "-k" in options else 1.0)  # of one kernel only shapes tell


def drop(rows: list[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    return rows[:at] + rows[at + 1 :]


def swap(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    at = next(i for i in range(len(rows) - 1) if rows[i]["kernel"] != rows[i + 1]["kernel"])
    return [*rows[:at], rows[at + 1], rows[at], *rows[at + 2 :]]


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ("-o x", lambda rows: drop(rows, 7), "launches were recorded where the report has"),
        ("-o x", swap, "pairs differ in kernels"),
        ("-o x", lambda rows: [{**r, "tid": 4711} for r in rows], "pairs differ in threads"),
        ("-o x", lambda rows: [{**r, "grid": [99, 1, 1]} for r in rows], "pairs differ in grids or blocks"),
        ("-o x", lambda rows: [{**r, "ts_ns": r["ts_ns"] - 10 * i * p.SECOND} for i, r in enumerate(rows)], "outside"),
        ("--kernel-id ::gemm:3", lambda rows: rows, "--kernel-id"),
        ("--nvtx --nvtx-include step/", lambda rows: rows, "no range was recorded"),
        ("--nvtx --nvtx-include [step/", lambda rows: rows, "more than the name"),
        ("--nvtx --nvtx-include step/*/mlp/", lambda rows: rows, "more than the name"),
        ("--nvtx --nvtx-include step", lambda rows: rows, "more than the name"),
        ("--nvtx --nvtx-exclude regex:st.p/", lambda rows: rows, "more than the name"),
        ("--replay-mode application", lambda rows: rows, "ran several times"),
        ("-k regex:(gemm", lambda rows: rows, "no expression that can be evaluated"),
    ],
)  # fmt: skip
def test_order_is_refused_whole(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path, options: str, change: Any, reason: str
) -> None:
    how = asdict(rule_of(parse_command_line(f"ncu {options} ./app")))
    launches = change(run.of_life(p.LIVES[0], "launches"))
    report = p.write_ncu(tmp_path / "k.lscope", run, p.LIVES[0], how, launches)
    found = outcome(opened(recording, report).joined(), "order")
    assert (found.matched, found.refused) == (0, len(launches))
    assert reason in found.reasons[0]


@pytest.mark.parametrize(
    ("option", "domain", "usable"),
    [("mlp/", "", True), ("nn@mlp/", "nn", True), ("mlp/", "nn", False), ("other@mlp/", "nn", False)],
)
def test_ranges_make_the_order_usable_where_they_were_recorded(
    tmp_path: Path, opened: Any, option: str, domain: str, usable: bool
) -> None:
    marked = p.planted()
    for row in marked.marks:
        row["domain"] = domain
    marks = pd.DataFrame(marked.marks)
    for row in marked.launches:
        around = marks[
            (marks["tid"] == row["tid"]) & (marks["start_ns"] <= row["ts_ns"]) & (row["ts_ns"] < marks["end_ns"])
        ]
        row["mark_id"] = int(around["id"].iloc[-1])
    recording = p.write_recording(tmp_path / "run.lscope", marked, marks=True)
    inside = [
        r for r in marked.of_life(p.LIVES[0], "launches") if marks.set_index("id").at[r["mark_id"], "name"] == "mlp"
    ]
    how = asdict(rule_of(parse_command_line(f"ncu --nvtx --nvtx-include {option} ./app")))
    report = p.write_ncu(tmp_path / "k.lscope", marked, p.LIVES[0], how, inside)
    pairs = opened(recording, report).joined().profiles["report.ncu-rep"]
    assert pairs["launch_id"].tolist() == [row["id"] for row in inside if usable] and len(inside) > 100


def test_two_lives_that_fit_equally_are_refused(tmp_path: Path, opened: Any) -> None:
    run = p.planted()
    run.launches = [r for r in run.launches if r["pid"] == p.OUTER_PID]
    for number, life in enumerate(p.LIVES[:2]):
        for i in range(3):
            run.launches.append(
                {"pid": p.PID, "tid": p.PID, "id": 9000 + 10 * number + i, "ts_ns": life.start_ns + i, "kernel": "k",
                 "grid": [1, 1, 1], "block": [1, 1, 1]}
            )  # fmt: skip
    run.launches.sort(key=lambda r: r["ts_ns"])
    recording = p.write_recording(tmp_path / "run.lscope", run)
    profiles = pd.DataFrame(
        {"id": [1, 2, 3], "pid": p.PID, "tid": p.PID, "kernel": "k", "mangled": "", "grid": [(1, 1, 1)] * 3,
         "block": [(1, 1, 1)] * 3, "api_call_id": [1, 2, 3], "created_s": 0}
    )  # fmt: skip
    from leakscope.correlate.joins import profiles as joining

    evidence = opened(recording).evidence[0]
    pairs, why = joining._by_order(
        LaunchOrder("usable", ""), joining.outer_launches(evidence), profiles, evidence, p.PID
    )
    assert not len(pairs) and why == "2 lives of this PID fit equally well"


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("gemm", "gemm"),
        ("void ns::gemm<float, (int)4>(float*, int)", "gemm"),
        ("_Z4gemmPf", "gemm"),
        ("_ZN2ns4gemmIfEvPf", "gemm"),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEE", "vectorized_elementwise_kernel"),
        ("void (anonymous namespace)::elementwise<int>(int)", "elementwise"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_bare_name_of_a_kernel(name: str, bare: str) -> None:
    assert order.bare_name(name) == bare


# ---- rule 3 ----

LOADS = (10, 100, 1_000, 5_000, 20_000)


def figures(load: int, window_ns: int) -> tuple[float, float, float, float]:
    """(wrong among pairs with the nearest call, precision and recall of unambiguous pairs, ambiguous events)."""
    made = p.under_load(load, seconds=max(2.0, 2_000 / load))
    one = np.zeros(len(made["enter_ns"]), np.int64)
    near = near_calls(
        Intervals(one, made["enter_ns"], made["exit_ns"]),
        np.zeros(len(made["at_ns"]), np.int64),
        made["at_ns"],
        window_ns,
    )
    paired = near.row >= 0
    sure = near.candidates == 1
    right = near.row == made["cause"]
    caused = made["cause"] >= 0
    return (
        float((~right[paired]).mean()),
        float(right[sure].mean()),
        float((right & sure & caused).sum() / caused.sum()),
        float((near.candidates > 1).mean()),
    )


def window_table() -> str:
    lines = [
        "| calls/s of a process | window | nearest call is wrong | precision, unambiguous | recall | ambiguous |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for load in LOADS:
        for window_ns in (KERNEL_WINDOW_NS, GPU_WINDOW_NS):
            cells = " | ".join(f"{100 * value:.1f} %" for value in figures(load, window_ns))
            lines.append(f"| {load:,} | ±{window_ns // 1000} µs | {cells} |")
    return "\n".join(lines)


def test_the_page_has_the_windows_figures() -> None:
    assert window_table() in DOCS.read_text()


def test_the_nearest_call_counts_and_several_are_ambiguous() -> None:
    calls = Intervals(np.array([1, 1, 1, 2]), np.array([0, 1_000, 5_000, 990]), np.array([100, 1_100, 9_000, 995]))
    near = near_calls(calls, np.array([1, 1, 1, 1, 2, 3]), np.array([120, 540, 8_000, 9_051, 990, 990]), 50)
    assert near.row.tolist() == [0, -1, 2, -1, 3, -1]
    assert near.candidates.tolist() == [1, 0, 1, 0, 1, 0]
    assert near_calls(calls, np.array([1]), np.array([540]), 500).candidates.tolist() == [2]


def test_confidence_of_a_window_is_what_chance_does_not_explain() -> None:
    calls = Intervals(np.zeros(2, np.int64), np.array([100, 150]), np.array([110, 160]))
    assert covered_share(calls, 0, 0, 1_000, 10) == pytest.approx((30 + 30) / 1_000)
    assert covered_share(calls, 0, 0, 1_000, 40) == pytest.approx((200 - 60) / 1_000)
    assert covered_share(calls, 7, 0, 1_000, 40) == 0.0
    assert beyond_chance(0.5, 0.5) == 0.0 and beyond_chance(1.0, 0.3) == 1.0 and beyond_chance(1.0, 1.0) == 0.0


def test_no_window_for_what_nests(run: p.Planted, recording: Path, opened: Any, tmp_path: Path) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", run, "monotonic", p.LIVES[:1])
    joined = opened(recording, report).joined()
    nested = outcome(joined, "nesting", right="calls of run").matched
    rest = [o for o in joined.outcomes if o.left.startswith("kernel allocations")]
    assert sum(o.matched + o.ambiguous + o.refused for o in rest) == len(run.kernel)
    assert nested + sum(o.matched for o in rest if o.rule == "window") <= len(run.kernel)


# ---- rule 4 ----


def test_the_hash_of_top_frames_ignores_addresses_between_runs_and_uses_them_within_one() -> None:
    def frames(base: int, innermost: str = "cudaLaunchKernel") -> list[Frame]:
        cuda = Frame(innermost, module="/usr/lib/libcudart.so.12", offset=base + 1)
        names = ("main", "serve", "step", "attention")
        return [*(Frame(n, module="/srv/app", offset=base + 16 * i) for i, n in enumerate(names, 1)), cuda]

    one, two = frames(0x1000), frames(0x9000, "cudaMalloc")
    assert stack.top_hash(one) == stack.top_hash(two) != 0
    assert stack.top_hash(one) == stack.top_hash(one[1:]) != stack.top_hash(one[:-2])
    assert stack.top_hash(one, absolute=True) != stack.top_hash(two, absolute=True)
    assert stack.top_hash([Frame("", module="app", offset=7)]) == 0 and stack.top_hash(one[-1:]) == 0
    groups = stack.hash_groups({1: 5, 2: 5, 3: 0}, {8: 5, 9: 6})
    assert groups.values.tolist() == [[5, [1, 2], [8]]]


def test_a_refused_order_falls_back_to_stacks(run: p.Planted, tmp_path: Path, opened: Any) -> None:
    from capture_rows import rows

    from leakscope.capture import CaptureWriter
    from leakscope.model.manifest import Manifest

    def write(
        path: Path, source: Source, base: int, table: str, columns: dict[str, Any], count: int, outer: str = "main"
    ) -> Path:
        writer = CaptureWriter.create(path, Manifest(sources=[source]))
        functions = [outer, "attention", "mlp", "cudaLaunchKernel"]
        writer.write(
            "frames",
            rows("frames", 4, id=[1, 2, 3, 4], function=functions, module=["app", "app", "app", "libcudart.so.12"],
                 offset=[base + i for i in range(4)], kind=["native"] * 4),
        )  # fmt: skip
        writer.write("stacks", rows("stacks", 2, id=[1, 2], frames=[[1, 2, 4], [1, 3, 4]]))
        writer.write(table, rows(table, count, **columns))
        writer.finish()
        return path

    launches = {"id": [1, 2, 3], "ts_ns": [5, 6, 7], "pid": [9] * 3, "tid": [9] * 3, "user_stack": [1, 2, 2],
                "kernel": ["", "a", "b"]}  # fmt: skip
    recorded = write(tmp_path / "r.lscope", Source(0, "recording", "r", "monotonic"), 100, "launches", launches, 3)
    profiles = {"id": [1, 2, 3], "pid": [9] * 3, "kernel": ["a", "b", "c"], "user_stack": [1, 2, 2]}
    report = write(tmp_path / "k.lscope", Source(0, "ncu_rep", "k", "none"), 7000, "kernel_profiles", profiles, 3)

    joined = opened(recorded, report).joined()

    pairs = joined.profiles["k"]
    assert pairs[["profile_id", "launch_id", "rule"]].values.tolist() == [[1, 1, "stack"], [2, 3, "stack"]]
    by_stack = outcome(joined, "stack")
    assert (by_stack.matched, by_stack.ambiguous, by_stack.refused) == (2, 0, 1)
    # and where the frame around them has another name, only if the innermost one is asked for alone
    wrapped = write(
        tmp_path / "w.lscope", Source(0, "ncu_rep", "w", "none"), 7000, "kernel_profiles", profiles, 3, "run"
    )
    evidence = opened(recorded, wrapped)
    assert outcome(evidence.joined(), "stack").matched == 0
    assert outcome(evidence.joined(JoinOptions(stack_frames=1)), "stack").matched == 2


# ---- rule 5 ----


def test_ranges_of_a_report_are_found_by_thread_and_time(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path
) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", run, "utc", p.LIVES[:1])
    joined = opened(recording, report).joined()
    found = outcome(joined, "range")
    assert found.matched == 300
    links = [link for of_site in joined.links[0].by_site().values() for place, link in of_site if place == "range"]
    assert links == []  # the one site allocates in two ranges, in neither for half of what it allocates

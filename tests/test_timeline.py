"""Memory over time: points, slopes, moments and cohorts of captures and tables whose truth is known to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic import PID, SyntheticCapture
from three_leaks import CHURN_BYTES, DEVICE, GPU_KEPT, HOST_KEPT, KERNEL_KEPT, MMAP, SECONDS, three_leaks

from leakscope.cli.attribute import report_of
from leakscope.detect.attribution import Options
from leakscope.detect.timeline_counters import thinned
from leakscope.model.results import Report
from leakscope.model.timeline import COUNTER, FINDING, LIVE, MAX_POINTS, UNEXPLAINED, Series, Timeline


def reported(*evidence: Path, **options: object) -> Report:
    """The report of ``evidence`` with its timelines."""
    return report_of(evidence, Options(timelines=True, **options), "1GiB")  # type: ignore[arg-type]


def one_of(timeline: Timeline, what: str, name: str) -> Series:
    """The series of that kind and name."""
    (found,) = (one for one in timeline.series if (one.what, one.name) == (what, name))
    return found


def value_at(series: Series, at_s: float) -> float:
    """The last value at or before a time."""
    return float(series.value[np.searchsorted(series.t_s, at_s, "right") - 1])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Of a capture in which three layers leak."""
    return reported(three_leaks(tmp_path_factory.mktemp("timeline") / "run.lscope"))


@pytest.fixture(scope="module")
def timeline(report: Report) -> Timeline:
    """Its timeline."""
    (found,) = report.timelines
    return found


def test_a_report_has_no_timelines_unless_they_are_asked_for(tmp_path: Path) -> None:
    assert report_of([three_leaks(tmp_path / "run.lscope")], Options(), "1GiB").timelines == []


def test_live_bytes_end_at_the_totals_of_the_layers(report: Report, timeline: Timeline) -> None:
    kept = {total.layer: total.live_bytes for total in report.layers}
    assert kept == {"kernel": KERNEL_KEPT, "host": HOST_KEPT, "gpu": GPU_KEPT}
    assert {layer: one_of(timeline, LIVE, layer).value[-1] for layer in kept} == kept


def test_live_bytes_have_what_was_there_in_between(timeline: Timeline) -> None:
    host = one_of(timeline, LIVE, "host")
    # Of 37 maps, one each 10/37 s, 19 are there when 5.1 s are over; the churn is 30 ms in 50 each time.
    assert {value_at(host, 5.1 + step) - 19 * 4096 for step in np.arange(0, 0.04, 0.011)} == {0, CHURN_BYTES}
    assert value_at(one_of(timeline, LIVE, "gpu"), 2.01) == 11 * 65_536  # at 0.094 … 1.981 s


def test_findings_have_their_own_curves_and_slopes(report: Report, timeline: Timeline) -> None:
    findings = [v for v in (report.verdict, *report.findings) if v.verdict == "leak"]
    assert len(findings) == 3
    for verdict in findings:
        assert verdict.growth is not None
        series = one_of(timeline, FINDING, verdict.sites[0])
        (slope,) = (s for s in timeline.slopes if (s.series, s.what) == (series.name, FINDING))
        assert series.value[-1] == verdict.kept_bytes
        assert (slope.rate, slope.low, slope.high) == (
            verdict.growth.bytes_per_s, verdict.growth.ci_low, verdict.growth.ci_high,
        )  # fmt: skip
        # The rate is the mean from the end of the warm-up on: its line ends where the curve does.
        assert slope.at(slope.end_s) == pytest.approx(verdict.kept_bytes, abs=1)
        assert slope.at_s == pytest.approx(SECONDS / 5, abs=0.001)


def test_what_events_do_not_explain_is_exact(timeline: Timeline) -> None:
    # VSS was made of the maps that are kept; RSS rises by 1,000,000 bytes while maps of 33 × 4096 are made.
    vss, rss = (one_of(timeline, UNEXPLAINED, name) for name in ("vss", "rss"))
    assert vss.value.tolist() == [0.0] * 10
    assert rss.value[-1] == pytest.approx(1_000_000 - 33 * 4096)
    assert (rss.readings, one_of(timeline, COUNTER, "rss").value[0]) == (10, 5_000_000)


def test_moments_are_the_warm_up_and_where_leaks_begin(report: Report, timeline: Timeline) -> None:
    begun = sorted(v.leak_start_s for v in (report.verdict, *report.findings) if v.leak_start_s is not None)
    assert [m.t_s for m in timeline.moments if m.what == "leak"] == begun
    (warm,) = (m.t_s for m in timeline.moments if m.what == "warm-up")
    assert warm == pytest.approx(SECONDS / 5, abs=0.001)


def test_every_byte_is_born_in_one_window(timeline: Timeline) -> None:
    by_layer = {one.layer: one for one in timeline.survival}
    host = by_layer["host"]
    assert (int(host.allocated_bytes.sum()), int(host.kept_bytes.sum())) == (HOST_KEPT + 200 * CHURN_BYTES, HOST_KEPT)
    gpu = by_layer["gpu"]
    assert gpu.kept_bytes.tolist() == gpu.allocated_bytes.tolist()
    assert gpu.kept_bytes.tolist() == [
        65_536 * sum(a <= (n + 0.5) * SECONDS / 53 < b for n in range(53))
        for a, b in zip(gpu.edges_s[:-1], gpu.edges_s[1:], strict=True)
    ]


def test_a_layer_that_is_asked_for_is_the_only_one(tmp_path: Path) -> None:
    (timeline,) = reported(three_leaks(tmp_path / "run.lscope"), layer="gpu").timelines
    assert {one.name for one in timeline.series if one.what == LIVE} == {"gpu"}
    assert [one.layer for one in timeline.survival] == ["gpu"]


def test_what_survives_an_exit_stays_in_the_curve(tmp_path: Path) -> None:
    # given a process that keeps 20 × 65,536 bytes and exits at 8 s, which frees them
    run = SyntheticCapture(SECONDS)
    run.process(exit_s=8.0)
    for number in range(20):
        row = run.alloc(0.2 + number * 0.35, 65_536, python=["py:f@a.py:1"], **DEVICE)
        run.free(row, 8.01, "exit")
    # when it is attributed
    (timeline,) = reported(run.write(tmp_path / "run.lscope")).timelines
    # then the curve ends at what was kept when the exit began, as the report has it
    assert one_of(timeline, LIVE, "gpu").value[-1] == 20 * 65_536
    assert [(m.what, m.t_s) for m in timeline.moments if m.what == "exit"] == [("exit", 8.0)]


def test_a_finding_is_drawn_with_the_processes_that_it_is_about(tmp_path: Path) -> None:
    # given a process that leaks 50 × 4096 bytes, and one that keeps 20 × 4096 from its start on
    run = SyntheticCapture(SECONDS)
    run.process()
    run.process(PID + 1)
    run.leak(50, 4096, python=["py:f@a.py:1"], **MMAP)
    run.leak(20, 4096, start_s=0.0, end_s=0.5, python=["py:f@a.py:1"], pid=PID + 1, **MMAP)
    run.churn(100, 4096, python=["py:g@a.py:2"], pid=PID + 1, **MMAP)  # it goes on working
    report = reported(run.write(tmp_path / "run.lscope"))
    # then what the finding keeps is what the verdict says, and the layer has both
    assert report.verdict.kept_bytes == 50 * 4096
    (timeline,) = report.timelines
    assert one_of(timeline, FINDING, report.verdict.sites[0]).value[-1] == 50 * 4096
    assert one_of(timeline, LIVE, "host").value[-1] == 70 * 4096


def test_heap_alone_is_drawn_although_no_total_counts_it(tmp_path: Path) -> None:
    run = SyntheticCapture(SECONDS)
    run.process()
    run.leak(11, 1000, layer="host", kind="heap", api="malloc", user=["main", "keep"])
    (timeline,) = reported(run.write(tmp_path / "run.lscope")).timelines
    heap = one_of(timeline, LIVE, "heap")
    assert (heap.layer, heap.label, heap.value[-1]) == ("host", "live heap, by events", 11_000)
    assert [int(one.kept_bytes.sum()) for one in timeline.survival] == [11_000]


def test_frees_that_cannot_be_seen_are_not_live(tmp_path: Path) -> None:
    # given a cache whose objects end only by the reuse of their addresses (kfree_rcu), beside a leak
    run = SyntheticCapture(SECONDS)
    run.process()
    for number in range(300):
        row = run.alloc(number / 31, 512, addr=0x9000 + 0x1000 * (number % 100), kernel=["k:call_rcu_user"],
                        layer="kernel", kind="slab", api="kmem_cache_alloc", cache="maple_node")  # fmt: skip
        if number < 200:
            run.free(row, (number + 100) / 31 - 0.0001, "reuse")
    run.leak(40, 64, kernel=["k:leaks"], user=["main"], layer="kernel", kind="kmalloc", api="kmalloc")
    report = reported(run.write(tmp_path / "run.lscope"))
    # then what it seems to keep is in neither the total nor the curve
    (total,) = report.layers
    assert (total.live_bytes, total.frees_not_visible_bytes) == (40 * 64, 100 * 512)
    assert one_of(report.timelines[0], LIVE, "kernel").value[-1] == 40 * 64


def test_tables_of_counters_have_their_course_and_restarts(tmp_path: Path) -> None:
    # given RSS that rises by 4 KiB/s after a restart at 3000 s, and a counter that was never recorded
    table = tmp_path / "counters.csv"
    lines = ["t_s,rss_bytes,vss_bytes,gpu_used_bytes,cgroup_bytes,jobs_total,proc_start_s"]
    for t in range(0, 36_000, 10):
        lines.append(f"{t},{100_000_000 + 4096 * (t if t < 3000 else t - 3000)},0,0,0,{t},{0 if t < 3000 else 3000}")
    table.write_text("\n".join(lines) + "\n")
    # when it is attributed
    report = reported(table)
    (timeline,) = report.timelines
    # then there is one thinned series, and the restart; counts of work and what is 0 throughout are not drawn
    (series,) = timeline.series
    assert (series.name, series.what, series.layer, series.readings) == ("rss", COUNTER, "host", 3600)
    assert len(series.t_s) <= MAX_POINTS
    assert (series.value.min(), series.value.max()) == (100_000_000, 100_000_000 + 4096 * 32_990)
    assert [m.t_s for m in timeline.moments if m.what == "restart"] == [3000.0]


def test_the_slope_of_a_counter_is_that_of_the_verdict(tmp_path: Path) -> None:
    table = tmp_path / "counters.csv"
    noise = np.random.default_rng(5).normal(0, 50_000, 1440)
    rows = [f"{60 * i},{int(200_000_000 + 3000 * 60 * i + noise[i])},0,0,0" for i in range(1440)]
    table.write_text("\n".join(["t_s,rss_bytes,vss_bytes,gpu_used_bytes,cgroup_bytes", *rows]) + "\n")
    report = reported(table)
    (slope,) = report.timelines[0].slopes
    assert report.verdict.growth is not None
    assert (slope.rate, slope.low, slope.high) == (
        report.verdict.growth.bytes_per_s, report.verdict.growth.ci_low, report.verdict.growth.ci_high,
    )  # fmt: skip
    assert slope.at(43_200) == pytest.approx(200_000_000 + 3000 * 43_200, abs=100_000)


def test_cache_objects_are_live_and_pinned_to_the_byte(tmp_path: Path) -> None:
    # given 40 objects of 1000 bytes each second; every fourth stays pinned by a lookup, twice; the others are evicted
    events = []
    for number in range(40):
        at = (1 + number) * 10**9
        what = {"obj": f"o{number}", "size": 1000, "owner": "lookup"}
        events += [{"ts_ns": at, "op": "insert", **what}, {"ts_ns": at + 1000, "op": "pin", **what}]
        if number % 4:
            events += [{"ts_ns": at + 10**8, "op": "unpin", **what}, {"ts_ns": at + 2 * 10**8, "op": "evict", **what}]
        else:
            events.append({"ts_ns": at + 2000, "op": "pin", **what})
    log = tmp_path / "cache.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    # when it is attributed
    report = reported(log)
    (timeline,) = report.timelines
    # then at each time it is known what is there, and what is pinned
    live, pinned = one_of(timeline, COUNTER, "cache_live"), one_of(timeline, COUNTER, "pinned_bytes")
    for at, there, held in ((0.05, 1000, 1000), (5.05, 3000, 3000), (5.15, 3000, 2000), (5.5, 2000, 2000)):
        assert (value_at(live, at), value_at(pinned, at)) == (there, held)
    assert (live.value[-1], pinned.value[-1]) == (10_000, 10_000)
    # and the slope is the verdict's
    (slope,) = timeline.slopes
    assert report.verdict.growth is not None and report.verdict.kind == "pinned_never_unpinned"
    assert slope.rate == report.verdict.growth.bytes_per_s
    assert slope.at(slope.end_s) == pytest.approx(10_000)


def test_evidence_without_time_has_no_timeline(tmp_path: Path) -> None:
    run = SyntheticCapture(SECONDS)
    run.process()
    assert reported(run.write(tmp_path / "empty.lscope")).timelines == []


def test_thinning_keeps_peaks_troughs_and_ends() -> None:
    times = np.arange(100_000, dtype=np.float64)
    values = np.sin(times / 500)
    values[12_345], values[54_321] = 9.0, -7.0
    at, thin = thinned(times, values)
    assert len(at) <= MAX_POINTS
    assert (np.diff(at) > 0).all()
    assert (at[0], at[-1]) == (0, 99_999)
    assert {(12_345.0, 9.0), (54_321.0, -7.0)} <= set(zip(at.tolist(), thin.tolist(), strict=True))
    few = np.arange(5.0)
    assert thinned(few, few) == (few, few)


def test_the_pid_that_is_asked_for_is_the_only_one(tmp_path: Path) -> None:
    run = SyntheticCapture(SECONDS)
    run.process()
    run.process(PID + 1)
    run.leak(31, 4096, python=["py:f@a.py:1"], **MMAP)
    run.leak(7, 4096, python=["py:f@a.py:1"], pid=PID + 1, **MMAP)
    (timeline,) = reported(run.write(tmp_path / "run.lscope"), pid=PID + 1).timelines
    assert one_of(timeline, LIVE, "host").value[-1] == 7 * 4096

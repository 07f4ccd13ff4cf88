"""leakscope export --to perfetto: what a trace viewer gets, to the nanosecond and the byte."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import BEGIN_NS, LIVES, SECOND, Planted, planted, write_nsys, write_recording
from synthetic import SyntheticCapture
from test_census import census_of

from leakscope.capture import Capture
from leakscope.cli.main import main
from leakscope.correlate.joins.common_clock import common_clock
from leakscope.correlate.tracks import POINTS, nested_threads, tracks_of
from leakscope.model.manifest import Source

FILP = {"kind": "slab", "api": "kmem_cache_alloc", "cache": "filp"}
STRIDE, RANGES = 10_000_000, 5_000_000


@pytest.fixture(scope="module")
def run() -> Planted:
    run = planted()
    for allocation in run.allocations[::7]:  # and some of it is given back, 3 ms later
        run.frees.append(allocation | {"ts_ns": allocation["ts_ns"] + 3_000_000, "alloc_ts_ns": allocation["ts_ns"]})
    return run


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, run: Planted) -> Path:
    path = tmp_path_factory.mktemp("trace") / "run.lscope"
    samples = [(BEGIN_NS + SECOND, "700", "rss", 1e6 + 0.5), (BEGIN_NS + SECOND, "700", "bad", float("nan"))]
    return write_recording(path, run, marks=True, samples=samples)


def trace(out: Path, *evidence: Path, args: tuple[str, ...] = ()) -> dict[str, Any]:
    assert main(["export", *map(str, evidence), "--to", "perfetto", "-o", str(out), *args]) == 0
    return json.loads(out.read_text(), parse_float=Decimal)


def of(events: list[dict[str, Any]], phase: str, **where: Any) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == phase and all(e.get(key) == value for key, value in where.items())]


def ns(microseconds: Decimal | int) -> int:
    exact = Decimal(microseconds) * 1000
    assert exact == int(exact)
    return int(exact)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory, recording: Path) -> dict[str, Any]:
    return trace(tmp_path_factory.mktemp("out") / "trace.json", recording)


def test_every_call_range_and_launch_is_there_at_its_time(drawn: dict[str, Any], run: Planted) -> None:
    events = drawn["traceEvents"]
    assert (drawn["otherData"]["zero_ns"], drawn["displayTimeUnit"]) == (BEGIN_NS, "ns")
    slices = Counter((e["name"], e["pid"], e["tid"], ns(e["ts"]), ns(e["dur"])) for e in of(events, "X"))
    calls = [(c["api"], c["pid"], c["tid"], c["enter_ns"] - BEGIN_NS, c["exit_ns"] - c["enter_ns"]) for c in run.calls]
    ranges = [
        (m["name"], m["pid"], m["tid"] + RANGES, m["start_ns"] - BEGIN_NS, m["end_ns"] - m["start_ns"])
        for m in run.marks
    ]
    assert slices == Counter([*calls, *ranges])
    launches = Counter((e["name"], e["tid"], ns(e["ts"]), str(e["args"]["grid"])) for e in of(events, "i"))
    assert launches == Counter(
        (row["kernel"], row["tid"], row["ts_ns"] - BEGIN_NS, str(row["grid"])) for row in run.launches
    )
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in of(events, "M", name="thread_name")}
    assert names[700, 701] == "thread 701"
    assert names[700, 701 + RANGES] == "NVTX of thread 701"
    assert {e["pid"]: e["args"]["name"] for e in of(events, "M", name="process_name")} == {700: "app", 900: "app"}


def test_slices_nest_on_every_track_in_the_order_of_the_file(drawn: dict[str, Any]) -> None:
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in of(drawn["traceEvents"], "X"):
        start, stack = ns(event["ts"]), open_until[event["pid"], event["tid"]]
        while stack and stack[-1] <= start:
            stack.pop()
        assert not stack or start + ns(event["dur"]) <= stack[-1]
        stack.append(start + ns(event["dur"]))


def test_live_bytes_of_each_layer_are_those_at_each_point(drawn: dict[str, Any], run: Planted) -> None:
    device = [(r["ts_ns"], r["pid"], r["size_bytes"]) for r in run.allocations]
    device += [(r["ts_ns"], r["pid"], -r["size_bytes"]) for r in run.frees]
    kernel = [(r["ts_ns"], r["pid"], 64) for r in run.kernel]
    for layer, changes in (("gpu", device), ("kernel", kernel)):
        points = [e for e in of(drawn["traceEvents"], "C", name="live bytes") if layer in e["args"]]
        assert {e["pid"] for e in points} == {700, 900}
        assert 50 < len(points) <= 2 * POINTS
        for event in points:
            until = BEGIN_NS + ns(event["ts"])
            assert event["args"][layer] == sum(b for at, pid, b in changes if at < until and pid == event["pid"])
        last = {e["pid"]: e["args"][layer] for e in points}
        assert sum(last.values()) == sum(b for _, _, b in changes)


def test_counters_of_a_process_stand_with_it(drawn: dict[str, Any]) -> None:
    (rss,) = of(drawn["traceEvents"], "C", name="rss")
    assert (rss["pid"], ns(rss["ts"]), rss["args"]) == (700, SECOND, {"value": Decimal("1000000.5")})
    assert of(drawn["traceEvents"], "C", name="bad") == []  # NaN is no JSON


def test_a_second_source_has_its_own_processes_on_the_same_clock(
    recording: Path, run: Planted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nsys = write_nsys(tmp_path / "nsys.lscope", run, "utc", LIVES[2:])
    relative = write_nsys(tmp_path / "relative.lscope", run, "relative", LIVES[2:])
    drawn = trace(tmp_path / "trace.json", recording, nsys, relative)
    said = capsys.readouterr().err
    assert "relative.sqlite: it does not say when it began; it is not drawn" in said
    assert "utc.sqlite: UTC, through the recording's readings of the wall clock, within 1 ms" in said
    assert drawn["otherData"]["notes"][0] in said
    events = of(drawn["traceEvents"], "X", pid=STRIDE + 7)
    calls = Counter((e["name"], e["tid"], ns(e["ts"])) for e in events if e["tid"] < STRIDE + RANGES)
    threads = {900: STRIDE + 7, 903: STRIDE + 8}
    own = [call for call in run.calls if call["pid"] == 900]
    # the report's clock is 400 µs off UTC
    assert calls == Counter((c["api"], threads[c["tid"]], c["enter_ns"] - BEGIN_NS + 400_000) for c in own)
    assert {e["pid"] for e in drawn["traceEvents"]} == {700, 900, STRIDE + 7}
    names = {e["pid"]: e["args"]["name"] for e in of(drawn["traceEvents"], "M", name="process_name")}
    assert names[STRIDE + 7] == f"process 7 ({nsys})"


def test_only_a_process_and_a_layer(recording: Path, run: Planted, tmp_path: Path) -> None:
    events = trace(tmp_path / "t.json", recording, args=("--pid", "900", "--layer", "gpu"))["traceEvents"]
    assert {e["pid"] for e in events} == {900}
    assert {key for e in of(events, "C", name="live bytes") for key in e["args"]} == {"gpu"}
    assert len(of(events, "X")) == sum(r["pid"] == 900 for r in [*run.calls, *run.marks])


def test_a_census_ends_where_the_stream_does(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(53, 128, user=["main", "forget"], kernel=["k:do_open"], **FILP)
    capture.churn(97, 128, user=["main", "close_it"], kernel=["k:do_open"], **FILP)
    kept = [capture.alloc(1, 4096, layer="host", kind="mmap_anon", api="mmap") for _ in range(7)]
    capture.free(kept[0], 8)
    last = {}
    for name, one in (("stream", capture), ("census", census_of(capture, 0.5))):
        events = trace(tmp_path / f"{name}.json", one.write(tmp_path / f"{name}.lscope"))["traceEvents"]
        points = of(events, "C", name="live bytes", pid=100)
        last[name] = {layer: value for e in points for layer, value in e["args"].items()}
    assert last["census"] == last["stream"] == {"kernel": 53 * 128, "host": 6 * 4096}


def test_ranges_that_cross_and_hostile_names(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    name = 'a"},{"ph":"X\x1b</script>\u2028\x7f\\'
    for number, (start, end) in enumerate([(1, 3), (2, 4), (5, 0)], 1):  # the last is open at the end
        capture.rows["marks"].append(
            {"id": number, "pid": 100, "tid": 100, "name": name, "domain": "d", "start_ns": capture.ns(start),
             "end_ns": capture.ns(end) if end else 0}
        )  # fmt: skip
    capture.call("cudaMalloc", 2.5, 2.6)
    capture.alloc(1, 64)
    capture.sample(1.0, "meminfo_Slab", 7.0)
    capture.sample(1.0, "current", 8.0, "cgroup", "/a")
    events = trace(tmp_path / "t.json", capture.write(tmp_path / "c.lscope"))["traceEvents"]
    begins, ends = (of(events, phase, name=name, cat="d") for phase in "be")
    assert {(e["id"], ns(e["ts"])) for e in begins} == {
        ("range-1", SECOND), ("range-2", 2 * SECOND), ("range-3", 5 * SECOND),
    }  # fmt: skip
    assert {(e["id"], ns(e["ts"])) for e in ends} == {
        ("range-1", 3 * SECOND), ("range-2", 4 * SECOND), ("range-3", 10 * SECOND),
    }  # fmt: skip
    assert [e["name"] for e in of(events, "X")] == ["cudaMalloc"]
    places = {e["args"]["name"]: e["pid"] for e in of(events, "M", name="process_name")}
    values = {e["pid"]: (e["name"], e["args"]["value"]) for e in of(events, "C") if "value" in e["args"]}
    assert values == {places["host"]: ("meminfo_Slab", 7), places["cgroup /a"]: ("current", 8)}


def test_what_is_cut_off_is_counted(recording: Path, run: Planted) -> None:
    capture = Capture.open(recording)
    with capture.connect() as con:
        tracks = tracks_of(con, capture.manifest.sources, most=100)
    assert tracks.left_out == {
        "calls": len(run.calls) - 100, "ranges": len(run.marks) - 100, "launches": len(run.launches) - 100,
    }  # fmt: skip
    assert (len(tracks.slices), len(tracks.launches)) == (200, 100)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 12)), max_size=12))
@settings(max_examples=150, deadline=None)
def test_nesting_is_that_of_every_pair(slices: list[tuple[int, int, int]]) -> None:
    thread = np.array([t for t, _, _ in slices], np.int64)
    start = np.array([s for _, s, _ in slices], np.int64)
    end = start + np.array([d for _, _, d in slices], np.int64)
    crossing = {
        int(thread[i])
        for i in range(len(slices))
        for j in range(len(slices))
        if thread[i] == thread[j] and start[i] < start[j] < end[i] < end[j]
    }
    assert nested_threads(thread, start, end).tolist() == [int(t) not in crossing for t in thread]


def test_sources_without_a_recording() -> None:
    utc, other = Source(0, "nsys", "a", "utc"), Source(1, "torch_snapshot", "b", "utc")
    timeless = Source(2, "ncu_rep", "c", "none")
    placed = common_clock([timeless, utc, other])
    assert [p.offset_ns for p in placed] == [None, 0, 0]
    assert "no times" in placed[0].note
    assert [p.offset_ns for p in common_clock([timeless])] == [None]

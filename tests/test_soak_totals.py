"""Sums and restarts of a soak, reading by reading, and that they are those of the capture afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from synthetic import START_NS, SyntheticCapture

from leakscope.capture import Capture
from leakscope.detect.recorded import BRIEF_PID, Life, subjects
from leakscope.detect.recorded_lives import MANY_BRIEF
from leakscope.record.census.schedule import Schedule
from leakscope.soak.final import readings_and_lives
from leakscope.soak.totals import Restarts, Totals
from leakscope.soak.watch import Plan, Watch

MIB = 1 << 20


def test_each_process_counts_with_its_last_reading_while_it_is_read() -> None:
    totals = Totals()
    first = totals.add(
        [("process", "7", "rss", 3.0), ("process", "7", "pss", 2.0), ("process", "8", "rss", 5.0),
         ("process", "8", "rss_anon_peak", 9.0), ("host", "", "slab_x", 1.0)]
    )  # fmt: skip
    assert first == {"rss": 8.0, "pss": 2.0, "num_processes": 2.0}
    # a figure that is read seldom stands until it is read again; who is not read any more counts no more
    assert totals.add([("process", "7", "rss", 4.0), ("process", "7", "gpu_process_used", 1.0)]) == {
        "rss": 4.0, "pss": 2.0, "gpu_used": 1.0, "num_processes": 1.0,
    }  # fmt: skip
    assert totals.add([("host", "", "slab_x", 1.0)]) == {} and len(totals) == 0


def test_restarts_are_those_of_roots_that_all_ended() -> None:
    restarts = Restarts()
    restarts.add([Life(7, start_s=-5.0), Life(8, start_s=1.0, root=False)])
    restarts.add([Life(7, start_s=-5.0), Life(9, start_s=20.0)])  # a second root beside the first
    restarts.add([Life(7, start_s=-5.0, end_s=30.0), Life(9, start_s=20.0)])
    assert [life.pid for life in restarts.begun] == [7]
    restarts.add([Life(9, start_s=20.0, end_s=40.0), Life(10, start_s=40.0)])
    assert [life.pid for life in restarts.begun] == [7, 10]
    # a PID that is given out again is another process
    restarts.add([Life(10, start_s=40.0, end_s=50.0), Life(7, start_s=60.0)])
    assert [(life.pid, life.start_s) for life in restarts.begun] == [(7, -5.0), (10, 40.0), (7, 60.0)]


def test_a_target_that_was_started_again_while_nobody_looked() -> None:
    for after, begun in ((Life(7, start_s=-5.004), [7]), (Life(9, start_s=70.0), [7, 9])):
        restarts = Restarts()
        alive = Life(7, start_s=-5.0)
        restarts.load([alive], [alive])
        restarts.add([after])
        assert [life.pid for life in restarts.begun] == begun


def test_what_a_soak_sums_is_what_its_capture_gives(tmp_path: Path) -> None:
    # given two workers, one of which is replaced, read each minute
    capture = SyntheticCapture(3600)
    lives = {7: (0.0, None), 8: (0.0, 1795.0), 9: (1810.0, None)}
    for pid, (start, end) in lives.items():
        capture.process(pid, "root" if pid == 7 else "child", start, end)
    for at in range(0, 3600, 60):
        for pid, (start, end) in lives.items():
            if start <= at < (end or 1e9):
                capture.sample(at, "rss", pid * MIB + at, "process", str(pid))
    readings, processes = readings_and_lives(Capture.open(capture.write(tmp_path / "run.lscope")))
    (service,) = [one for one in subjects(readings, processes) if one.kind == "service"]
    # when they are taken one by one, as a recorder hands them over
    live = Watch(Plan("x", "x", 3600.0))
    rows = capture.table("samples")
    for at in range(0, 3600, 60):
        live.add(rows.filter(pa.compute.equal(rows["ts_ns"], capture.ns(at))), START_NS, processes)
    loaded = Watch(Plan("x", "x", 3600.0))
    loaded.load(readings, processes)
    # then all three ways give the same
    expected = {counter.name: counter for counter in service.counters}
    for watch in (live, loaded):
        found = {counter.name: counter for counter in watch.counters()}
        for name in ("rss", "num_processes"):
            np.testing.assert_array_equal(found[name].value, expected[name].value)
            np.testing.assert_allclose(found[name].t_s, expected[name].t_s)


def test_processes_of_a_moment_are_summed_where_they_are_many(tmp_path: Path) -> None:
    # given a server, and at each of ten readings 30 processes that are gone at the next
    capture = SyntheticCapture(600)
    capture.process(7)
    for number, at in enumerate(range(0, 600, 60)):
        capture.sample(at, "rss", 100.0, "process", "7")
        for pid in range(1000 + 30 * number, 1030 + 30 * number):
            capture.sample(at, "rss", 2.0, "process", str(pid))
    assert MANY_BRIEF < 30 * 10
    readings, processes = readings_and_lives(Capture.open(capture.write(tmp_path / "run.lscope")))
    assert {scope_id for _, scope_id, _ in readings.series} == {"7", str(BRIEF_PID)}
    service, single = subjects(readings, processes)
    assert (service.kind, single.name) == ("service", "p7 (PID 7)")  # no process of a moment is judged by itself
    rss = next(counter.value for counter in service.counters if counter.name == "rss")
    assert rss.tolist() == [160.0] * 10


def test_readouts_stay_steady_and_parts_bounded() -> None:
    schedule = Schedule(interval_s=30, flush_s=30, steady=True)
    # ten readings in each of the first ten intervals, then one each, after days too
    assert [schedule.readout_gap_s(at) for at in (0, 299, 300, 259_000)] == [3, 3, 30, 30]
    # a part at most each 5 minutes, 72 hours make fewer than a thousand
    parts, elapsed = 0, 0.0
    while elapsed < 72 * 3600:
        gap = schedule.write_gap_s(elapsed)
        assert 30 <= gap <= 300
        elapsed, parts = elapsed + gap, parts + 1
    assert parts < 1100

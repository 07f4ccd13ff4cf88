"""Counters of live recordings: whose they are, what they add to the verdict of events."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import SyntheticCapture

from leakscope.capture import Capture
from leakscope.detect.attribution import Options
from leakscope.detect.evidence import attribute_evidence
from leakscope.detect.recorded import Key, Life, Readings, Subject, generations, settled, subjects
from leakscope.model.results import Report

MIB = 1 << 20
HOURS = 6
EVERY_S = 60.0
TIMES = np.arange(0.0, HOURS * 3600, EVERY_S)


def noisy(level: float, seed: int = 1) -> np.ndarray:
    return level + np.random.default_rng(seed).normal(0.0, level / 500, len(TIMES))


def readings(**of: np.ndarray) -> Readings:
    """Readings of names such as `process_7_rss`, `cgroup_/a_cgroup_anon`, `host__slab_x` at TIMES; NaN: none."""
    series: dict[Key, tuple[np.ndarray, np.ndarray]] = {}
    for name, value in of.items():
        scope, scope_id, counter = name.split("__")
        known = ~np.isnan(value)
        series[scope, scope_id.replace("0x", "/"), counter] = (TIMES[known], value[known])
    return Readings(series)


def by_kind(found: list[Subject]) -> dict[str, list[Subject]]:
    kinds: dict[str, list[Subject]] = {}
    for one in found:
        kinds.setdefault(one.kind, []).append(one)
    return kinds


def value_of(subject: Subject, name: str) -> np.ndarray:
    return next(counter.value for counter in subject.counters if counter.name == name)


# --- subjects


def test_processes_are_summed_and_judged_one_by_one() -> None:
    # given two workers of which one was read an hour later, and a running maximum
    late = np.where(TIMES >= 3600, 5.0 * MIB, np.nan)
    given = readings(
        process__7__rss=np.full(len(TIMES), 3.0 * MIB), process__8__rss=late, process__7__rss_anon_peak=TIMES
    )  # fmt: skip
    found = by_kind(subjects(given, [Life(7, "a", -5.0), Life(8, "b", 3590.0, root=False)]))
    (service,) = found["service"]
    # then the sum has what each held at each time, and their number
    assert value_of(service, "rss")[[0, -1]].tolist() == [3 * MIB, 8 * MIB]
    assert value_of(service, "num_processes")[[0, -1]].tolist() == [1, 2]
    # and the maximum is left out
    assert {counter.name for counter in service.counters} == {"rss", "num_processes"}
    assert [one.name for one in found["process"]] == ["b (PID 8)", "a (PID 7)"]


def test_a_process_that_succeeds_another_is_its_next_life() -> None:
    # given a process that ends at half time, and one of the same name in its place
    half = TIMES[-1] / 2
    given = readings(
        process__7__rss=np.where(half >= TIMES, 3.0, np.nan), process__9__rss=np.where(half < TIMES, 2.0, np.nan)
    )
    lives = [Life(7, "a", -5.0, half + 1), Life(9, "a", half + 20)]
    found = by_kind(subjects(given, lives))
    # then both the sum and the one chain of processes have a restart
    for subject in (*found["service"], *found["process"]):
        starts = value_of(subject, "proc_start_s")
        assert np.unique(starts).tolist() == [-5.0, half + 20]
    assert [one.name for one in found["process"]] == ["a (PID 9)"]
    assert [life.pid for life in generations(lives)] == [7, 9]


def test_workers_that_overlap_are_no_restart() -> None:
    lives = [Life(7, "a", 0.0, 100.0), Life(8, "a", 50.0), Life(9, "a", 120.0)]
    assert [life.pid for life in generations(lives)] == [7]


def test_ends_that_a_killed_recorder_did_not_tell_are_taken_from_the_readings() -> None:
    given = readings(
        process__7__rss=np.where(TIMES < 3600, 3.0, np.nan), process__9__rss=np.where(TIMES >= 7200, 2.0, np.nan)
    )
    # a running maximum is told a little longer than its process lives
    given.series["process", "7", "rss_anon_peak"] = (np.array([0.0, 3700.0]), np.array([1.0, 2.0]))
    ended, begun = settled(given, [Life(7), Life(9)])
    assert (ended.start_s, ended.end_s) == (float("-inf"), 3540.0)
    assert (begun.start_s, begun.end_s) == (7200.0, float("inf"))
    # and one that was there before and joined late begins, for the recording, when it was first read
    assert settled(given, [Life(7, start_s=-9.0), Life(9, start_s=-5.0)])[1].start_s == 7200.0


@pytest.mark.parametrize(
    ("anon", "own"), [(1.02, True), (3.0, False)], ids=["the group is the processes' alone", "others are in it"]
)
def test_a_group_counts_with_the_processes_where_it_is_theirs(anon: float, own: bool) -> None:
    given = readings(process__7__rss_anon=noisy(100.0 * MIB), cgroup__0xa__cgroup_anon=noisy(anon * 100 * MIB, 2))
    given.series["process", "7", "rss"] = given.series["process", "7", "rss_anon"]
    found = by_kind(subjects(given, [Life(7)]))
    assert ("cgroup_anon" in {counter.name for counter in found["service"][0].counters}) == own
    assert [one.shared for one in found.get("cgroup", [])] == ([] if own else [True])


def test_host_wide_counters_are_filled_in_where_they_did_not_change() -> None:
    # given a cache that was read three times, as it only then changed, and one that gained little
    series: dict[Key, tuple[np.ndarray, np.ndarray]] = {
        ("host", "", "slab_big"): (TIMES[[0, 100, -1]], np.array([0.0, 0.0, 8.0 * MIB])),
        ("host", "", "slab_small"): (TIMES, np.linspace(0, MIB / 2, len(TIMES))),
        ("host", "", "meminfo_Active(file)"): (TIMES, np.linspace(0, 2 * MIB, len(TIMES))),
    }
    (host,) = subjects(Readings(series), [])
    assert host.shared and {counter.name for counter in host.counters} == {"slab_big", "meminfo_active_file"}
    big = value_of(host, "slab_big")
    assert len(big) == len(TIMES) and big[100] == 0 and big[-1] == 8 * MIB


# --- verdicts


def capture_of(rss: np.ndarray, times: np.ndarray, *, events: str, malloc: bool = False) -> SyntheticCapture:
    """A recording of PID 100 with these counters; `events`: 'leak', 'churn' or ''."""
    capture = SyntheticCapture(float(times[-1]))
    capture.options = {"malloc": malloc}
    capture.process()
    how = {"layer": "host", "kind": "mmap_anon", "api": "mmap", "user": ["main", "handle"]}
    if events == "leak":
        capture.leak(300, 4096, **how)
    if events:
        capture.churn(300, 4096, hold_s=1.0, **how)
    for t, value in zip(times.tolist(), rss.tolist(), strict=True):
        for counter in ("rss", "rss_anon"):
            capture.sample(t, counter, value, "process", "100")
    return capture


def report_of(capture: SyntheticCapture, path: Path) -> Report:
    opened = Capture.open(capture.write(path / "run.lscope"))
    with opened.connect() as con:
        return attribute_evidence(con, opened.manifest, Options())


RISING = noisy(500.0 * MIB) + 60.0 * MIB * TIMES / 3600


def test_what_no_event_shows_is_found_by_the_counters(tmp_path: Path) -> None:
    # given events that free all, and resident memory that rises by 60 MiB an hour
    report = report_of(capture_of(RISING, TIMES, events="churn"), tmp_path)
    # then the counters lead, and the events' verdict stands beside
    assert (report.verdict.verdict, report.verdict.kind) == ("leak", "retained_growth")
    assert report.verdict.growth and report.verdict.growth.counter == "rss_anon_bytes"
    assert report.verdict.growth.bytes_per_s == pytest.approx(60 * MIB / 3600, rel=0.1)
    assert [f.verdict for f in report.findings] == ["not_leak"]


def test_counters_alone_are_judged(tmp_path: Path) -> None:
    report = report_of(capture_of(RISING, TIMES, events=""), tmp_path)
    assert (report.verdict.verdict, report.verdict.layer) == ("leak", "host")


def test_events_decide_first_and_counters_confirm(tmp_path: Path) -> None:
    report = report_of(capture_of(RISING, TIMES, events="leak"), tmp_path)
    assert report.verdict.verdict == "leak" and report.verdict.sites
    assert "rss_anon_bytes rises as well" in report.verdict.reasons[-1]
    assert [f for f in report.findings if f.verdict == "leak"] == []


def test_memory_that_malloc_freed_and_its_allocator_kept_is_no_leak(tmp_path: Path) -> None:
    report = report_of(capture_of(RISING, TIMES, events="churn", malloc=True), tmp_path)
    assert report.verdict.verdict == "not_leak"


def test_flat_counters_change_nothing(tmp_path: Path) -> None:
    report = report_of(capture_of(noisy(500.0 * MIB), TIMES, events="churn"), tmp_path)
    assert (report.verdict.verdict, report.findings) == ("not_leak", [])


def test_a_short_recording_says_once_that_its_counters_prove_nothing(tmp_path: Path) -> None:
    times = np.arange(0.0, 60.0, 1.0)
    rising = 100.0 * MIB + MIB * times
    for number, events in enumerate(("churn", "leak")):
        report = report_of(capture_of(rising, times, events=events), tmp_path / str(number))
        assert report.verdict.verdict == ("leak" if events == "leak" else "not_leak")
        assert [f.kind for f in report.findings] == ["window_too_short"]


def test_growth_that_others_have_a_part_in_is_never_the_verdict(tmp_path: Path) -> None:
    # given a process that is flat while a slab cache of the host grows by 40 MiB an hour
    capture = capture_of(noisy(500.0 * MIB), TIMES, events="churn")
    for t in TIMES.tolist():
        capture.sample(t, "slab_kmalloc-64", 10 * MIB + 40 * MIB * t / 3600)
    report = report_of(capture, tmp_path)
    assert report.verdict.verdict == "not_leak"
    (finding,) = report.findings
    assert (finding.verdict, finding.kind) == ("inconclusive", "partial_data")
    assert finding.culprit and finding.culprit.slab_cache == "kmalloc-64"
    assert finding.reasons[0] == "the host counts others too, not only what was recorded"


def test_a_recording_is_calibrated_three_ways(tmp_path: Path) -> None:
    # given a process that uses 600 MiB of a device of which 650 MiB are in use, in 360 readings
    capture = capture_of(noisy(500.0 * MIB), TIMES, events="")
    for t in TIMES.tolist():
        capture.sample(t, "vss", 2000.0 * MIB, "process", "100")
        capture.sample(t, "gpu_process_used", 600.0 * MIB, "process", "100")
        capture.sample(t, "gpu_used", 650.0 * MIB, "device", "GPU-1")
    found = {one.dimension: one for one in report_of(capture, tmp_path).calibration}
    assert {name: one.reference for name, one in found.items()} == {
        "rss": "rss_anon", "vss": "rss", "gpu_used": "gpu_device_used",
    }  # fmt: skip
    # then the device's 50 MiB of others are the offset, and nothing strays after it
    gpu = found["gpu_used"]
    assert (gpu.offset_bytes, gpu.after_robust, gpu.divergences) == (-50 * MIB, 0.0, ())
    assert gpu.before == pytest.approx(50 / 650)

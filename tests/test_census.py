"""A census without probes: cohorts, schedules, sampling by bytes, and that it is attributed as the same stream is."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakscope.capture import Capture
from leakscope.detect.attribution import Options, attribute
from leakscope.model.results import Report
from leakscope.record import records
from leakscope.record.census.cohorts import window_starts
from leakscope.record.census.reader import BATCH_ENTRIES, CensusReader
from leakscope.record.census.schedule import Schedule
from leakscope.record.sampling import gaps
from tests.synthetic import SyntheticCapture

IDENTITY = (
    "pid", "layer", "kind", "api", "slab_cache", "call_site", "kernel_stack", "user_stack", "python_stack", "weight",
)  # fmt: skip
EVENT_OF_CAUSE = {"call": "freed", "reuse": "reused", "context": "context", "exit": "exit", "exec": "exit"}


# --- cohorts


@given(st.lists(st.integers(0, 10_000), min_size=1), st.integers(0, 20_000), st.integers(0, 20_000))
def test_windows_only_ever_merge(births: list[int], later: int, more: int) -> None:
    now = max(births) + later
    starts = window_starts(np.array(births, np.int64), now)
    assert (starts <= births).all()
    # a window found by its start is the one found by any birth in it, at any later time
    assert window_starts(starts, now + more).tolist() == window_starts(np.array(births, np.int64), now + more).tolist()


def test_young_windows_are_short_and_old_ones_few() -> None:
    starts = np.unique(window_starts(np.arange(25_921, dtype=np.int64), 25_920))  # 72 hours of 10 s
    assert starts[-4:].tolist() == [25_917, 25_918, 25_919, 25_920]
    assert len(starts) <= 4 * math.log2(25_920) + 4
    # none is wider than a quarter of its age
    widths = np.diff(starts)
    assert (widths <= np.maximum(1, (25_920 - starts[:-1]) / 4)).all()


# --- schedules


class FakeMap:
    """A live map of `freed` entries that ended long ago, and of `alive` objects of one identity."""

    def __init__(self, freed: int = 0, alive: int = 0, *, spilled: bool = False) -> None:
        self._freed, self._alive, self._spilled = freed, alive, spilled

    def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Entries of the hash map, or buckets of the table: in batches of ``size`` entries of the map."""
        each = 1 if self._spilled else records.LIVE_WAYS
        total = self._freed + self._alive
        assert total % each == 0
        for first in range(0, total, size * each):
            number = np.arange(first, min(first + size * each, total), dtype=np.uint64)
            freed = number < self._freed
            slots = np.zeros(len(number), records.LIVE_SLOT)
            slots["word"] = (number + 1) << np.uint64(3) | freed  # 1: freed
            slots["object"]["identity"] = 7
            slots["object"]["ts_ns"] = 1 + (number - self._freed * ~freed) * 1000
            if self._spilled:
                slots["object"]["ts_ns"][freed] = 0
            values = np.ascontiguousarray(slots["object"]) if self._spilled else slots
            yield number.view(np.uint8), values.view(np.uint8).reshape(len(number) // each, -1)


def census_reader(**maps: FakeMap) -> CensusReader:
    """A reader of these maps at the origin 0, its intervals 1 ms."""
    return CensusReader(SimpleNamespace(map=lambda name: maps.get(name, FakeMap())), 0, 1_000_000)  # type: ignore[arg-type]


def peak_bytes(reader: CensusReader, ts_ns: int) -> int:
    reader.live(ts_ns)
    tracemalloc.start()
    try:
        reader.live(ts_ns)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_readout_takes_no_more_memory_for_more_objects_dead_or_alive() -> None:
    few, many = 4 * BATCH_ENTRIES, 16 * BATCH_ENTRIES
    # given a map with few and with many entries of freed objects; many alive, born over few and over many intervals
    small = peak_bytes(census_reader(live=FakeMap(freed=few, alive=few)), few * 1000)
    large = peak_bytes(census_reader(live=FakeMap(freed=many, alive=many)), many * 1000)
    assert large < 1.1 * small


def test_live_objects_of_the_table_and_of_what_it_spilled_are_told_by_windows() -> None:
    alive, spilled = 10_000, 500
    reader = census_reader(live=FakeMap(freed=1 << 19, alive=alive), live_spilled=FakeMap(5, spilled, spilled=True))
    found = reader.live(alive * 1000)
    births = np.concatenate([np.arange(alive), np.arange(spilled)]) // 1000
    starts, objects = np.unique(window_starts(births, alive // 1000), return_counts=True)
    assert (found.births.tolist(), found.objects.tolist()) == (starts.tolist(), objects.tolist())
    assert set(found.numbers.tolist()) == {7}


def test_72_hours_are_some_thousand_readouts_and_parts() -> None:
    schedule = Schedule(interval_s=10, flush_s=10)
    readouts = parts = 0
    elapsed = 0.0
    while elapsed < 72 * 3600:
        elapsed += schedule.readout_gap_s(elapsed)
        readouts += 1
    elapsed = 0.0
    while elapsed < 72 * 3600:
        elapsed += schedule.write_gap_s(elapsed)
        parts += 1
    assert readouts < 4500 and parts < 1500
    # close together at first, then as asked, then ever rarer
    assert [schedule.readout_gap_s(s) for s in (0, 99, 100, 10_000, 259_200)] == [1, 1, 10, 10, pytest.approx(259.2)]


# --- sampling by bytes


@given(st.integers(1, 1 << 40))
def test_gaps_have_the_mean_that_was_asked_for(mean: int) -> None:
    drawn = gaps(mean).astype(np.float64)
    assert len(drawn) == 4096 and (np.diff(drawn) >= 0).all() and drawn[0] >= 1
    assert drawn.mean() == pytest.approx(mean, rel=2e-4, abs=1)


def test_a_countdown_over_these_gaps_samples_by_bytes() -> None:
    # given allocations of four sizes in random order, and the countdown of bpf_programs/sampling.bpf.h
    random = np.random.default_rng(7)
    mean, sizes = 10_000, np.array([64, 1024, 8192, 65_536])
    table = gaps(mean).astype(np.int64).tolist()
    order = random.integers(0, 4, 400_000)
    draws = iter(random.integers(0, 4096, len(order) + 1).tolist())
    sampled = np.zeros(4)
    left = table[next(draws)]
    for which in order.tolist():
        left -= int(sizes[which])
        if left <= 0:
            sampled[which] += 1
            left = table[next(draws)]
    # then each size is taken with its probability
    allocated = np.bincount(order)
    expected = 1 - np.exp(-sizes / mean)
    error = np.sqrt(expected * (1 - expected) / allocated)
    assert (np.abs(sampled / allocated - expected) <= 5 * error + 1e-4).all()


# --- attribution


def census_of(stream: SyntheticCapture, every_s: float) -> SyntheticCapture:
    """The census that a recorder would have made of the same run: differences between readouts, told site by site."""
    census = SyntheticCapture(stream.seconds)
    census.rows = {name: list(rows) for name, rows in stream.rows.items()}
    census.rows["mem_events"] = []
    exits = {row["pid"]: row["exit_ns"] for row in stream.rows["processes"] if row["exit_ns"]}
    ids: dict[tuple[Any, ...], int] = {}
    totals: dict[int, dict[str, int]] = {}
    written: dict[int, dict[str, int]] = {}
    events = sorted(stream.rows["mem_events"], key=lambda row: row["ts_ns"])
    for number in range(1, round(stream.seconds / every_s) + 1):
        readout_ns = stream.ns(number * every_s)
        while events and events[0]["ts_ns"] <= readout_ns:
            row = events.pop(0)
            exit_ns = exits.get(row["pid"], 0)
            made_ns = row["ts_ns"] if row["op"] == "alloc" else row["alloc_ts_ns"]
            if exit_ns and made_ns >= exit_ns:
                continue
            site = ids.setdefault(tuple(row[name] for name in IDENTITY), len(ids) + 1)
            sums = totals.setdefault(site, {"first_ns": made_ns, "smallest_bytes": 1 << 62})
            event = "allocated"
            if row["op"] == "alloc":
                sums["last_ns"] = made_ns
                sums["smallest_bytes"] = min(sums["smallest_bytes"], row["size_bytes"])
                sums["largest_bytes"] = max(sums.get("largest_bytes", 0), row["size_bytes"])
            else:
                event = "exit" if exit_ns and row["ts_ns"] >= exit_ns else EVENT_OF_CAUSE[row["cause"]]
            for unit, amount in (("objects", 1), ("bytes", row["size_bytes"])):
                sums[f"{event}_{unit}"] = sums.get(f"{event}_{unit}", 0) + amount
        for site, sums in totals.items():
            if written.get(site) != sums:
                written[site] = dict(sums)
                census.rows["census_totals"].append({"ts_ns": readout_ns, "site": site, **sums})
    census.rows["census_sites"] = [
        {"id": number, **dict(zip(IDENTITY, key, strict=True))} for key, number in ids.items()
    ]
    return census


def reported(capture: SyntheticCapture, path: Path) -> Report:
    opened = Capture.open(capture.write(path))
    with opened.connect() as con:
        return attribute(con, opened.manifest, Options())


def a_busy_service() -> SyntheticCapture:
    """Leaks, churn, a cache that fills, an exit, an untraceable site, sampled stacks, a worker that comes and goes."""
    capture = SyntheticCapture(20)
    capture.process(100)
    capture.process(200, "child", 1, 15)
    capture.process(300, "child", 3, 3.2)
    where = {"user": ["main", "serve"], "kernel": ["k:ksys_write", "k:alloc_thing"]}
    capture.leak(500, 128, cache="kmalloc-128", user=["main", "serve", "forget"], kernel=where["kernel"])
    capture.churn(3000, 128, cache="kmalloc-128", user=["main", "serve", "close_it"], kernel=where["kernel"])
    capture.leak(200, 4096, layer="host", kind="mmap_anon", api="mmap", user=["main", "fill_cache"], end_s=3)
    capture.leak(
        90, 1000, pid=200, start_s=2, end_s=15, layer="host", kind="heap", api="malloc", user=["main", "worker"]
    )
    for i in range(40):
        kept = capture.alloc(2 + i * 0.3, 512, pid=200, cache="msg", user=["main", "post"], kernel=["k:msgsnd"])
        if i % 4 == 0:
            capture.free(kept, 16, "exit")
    for i in range(30):
        short = capture.alloc(3 + i * 0.001, 64, pid=300, cache="filp", user=["child"], kernel=["k:open"])
        capture.free(short, 3.3, "exit")
    for i in range(400):
        seen = capture.alloc(i * 0.045, 96, cache="epi", user=["main", "watch"], kernel=["k:ep_insert"])
        if i < 390:
            capture.free(seen, i * 0.045 + 0.4, "reuse")
    for i in range(1280):
        hot = capture.alloc(i * 0.015, 256, cache="hot", user=["main", "hot_leak" if i % 2 else "hot_churn"],
                            kernel=["k:sys_hot", "k:hot"], weight=64 if i % 64 < 2 else 0)  # fmt: skip
        if i % 2 == 0:
            capture.free(hot, i * 0.015 + 0.01)
    for counter, first, last in (("slab_kmalloc-128", 0, 64_000), ("slab_epi", 1e5, 1e5)):
        capture.sample(0.0, counter, first)
        capture.sample(19.9, counter, last)
    capture.loss("on_kfree", "recursion_miss", 3)
    return capture


def test_a_census_is_attributed_as_its_stream_is(tmp_path: Path) -> None:
    stream = a_busy_service()
    first = reported(stream, tmp_path / "stream.lscope")
    # given readouts as often as the curves have points
    second = reported(census_of(stream, 20 / 240), tmp_path / "census.lscope")
    # then every site is the same, to the byte
    assert len(first.sites) >= 8
    figures = [{site.id: replace(site, growth=None) for site in report.sites} for report in (first, second)]
    assert figures[0] == figures[1]
    # and so are verdicts, losses and what counters say
    for report in (first, second):
        assert report.verdict.verdict == "leak"
    judged = [[(f.verdict, f.kind, f.layer, f.culprit and f.culprit.frame, f.kept_bytes, f.sites)
               for f in (report.verdict, *report.findings)] for report in (first, second)]  # fmt: skip
    assert judged[0] == judged[1] and len(judged[0]) >= 2
    assert first.losses == second.losses
    assert [(row.source, row.what) for row in first.reconciliation] == [
        (r.source, r.what) for r in second.reconciliation
    ]
    for one, other in zip(first.layers, second.layers, strict=True):
        assert replace(one, growth=None) == replace(other, growth=None)
        assert one.growth and other.growth
        assert other.growth.bytes_per_s == pytest.approx(one.growth.bytes_per_s, rel=0.1, abs=1)


def test_rare_readouts_lose_nothing_but_the_curve(tmp_path: Path) -> None:
    stream = a_busy_service()
    first = reported(stream, tmp_path / "stream.lscope")
    second = reported(census_of(stream, 20), tmp_path / "census.lscope")  # a single one, at the end
    keys = (
        "live_bytes",
        "live_objects",
        "allocated_bytes",
        "outlives_process_bytes",
        "first_ns",
        "last_ns",
        "kept_share",
    )
    figures = [{s.id: [getattr(s, key) for key in keys] for s in report.sites} for report in (first, second)]
    assert figures[0] == figures[1]


def test_a_capture_may_hold_both(tmp_path: Path) -> None:
    # given one source recorded as a stream and another as a census: their tables do not mix
    stream = a_busy_service()
    mixed = census_of(stream, 0.5)
    for name in ("census_sites", "census_totals"):
        mixed.rows[name] = [{**row, "source_id": 1} for row in mixed.rows[name]]
    mixed.rows["mem_events"] = stream.rows["mem_events"]
    mixed.rows["processes"] = [*stream.rows["processes"], *({**r, "source_id": 1} for r in stream.rows["processes"])]
    once = reported(stream, tmp_path / "stream.lscope")
    twice = reported(mixed, tmp_path / "mixed.lscope")
    assert {s.id: s.live_bytes * 2 for s in once.sites} == {s.id: s.live_bytes for s in twice.sites}


@pytest.mark.parametrize("as_census", [False, True])
def test_figures_of_a_sample_by_bytes_are_estimates(tmp_path: Path, as_census: bool) -> None:
    # given what was sampled of allocations with a mean of 1,000 bytes between samples
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(80, 500, user=["main", "leak"], kernel=["k:f"])
    capture.churn(700, 500, user=["main", "churn"], kernel=["k:f"])
    capture.leak(40, 4096, layer="host", kind="mmap_anon", api="mmap", user=["main", "map"])
    if as_census:
        capture = census_of(capture, 10 / 240)
    capture.options = {"sample_bytes": 1000}
    report = reported(capture, tmp_path / "sampled.lscope")
    sites = {site.stack[-1] if site.layer == "host" else site.stack[1]: site for site in report.sites}
    # then each stands for 1 / (1 - exp(-1/2)) of them, with the error of a sum of independent draws
    share = 1 - math.exp(-0.5)
    leak = sites["leak"]
    assert leak.live_bytes == 80 * round(500 / share)
    assert leak.live_objects == round(80 / share)
    assert leak.standard_error_bytes == pytest.approx(500 * math.sqrt(80 * (1 - share)) / share)
    assert leak.bytes_sampled
    # what was freed leaves nothing, and mappings are not sampled
    assert (sites["churn"].live_bytes, sites["churn"].live_objects) == (0, 0)
    assert sites["churn"].allocated_bytes == 700 * round(500 / share)
    assert (sites["map"].live_bytes, sites["map"].standard_error_bytes) == (40 * 4096, 0)
    assert not sites["map"].bytes_sampled
    # and the total says how far it can be trusted
    kernel = next(layer for layer in report.layers if layer.layer == "kernel")
    assert kernel.standard_error_bytes == pytest.approx(leak.standard_error_bytes)
    assert kernel.to_json()["standard_error_bytes"] > 0


def test_few_sampled_survivors_are_no_leak(tmp_path: Path) -> None:
    # given eight sampled survivors that stand for many
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(8, 64, user=["main", "few"], kernel=["k:f"])
    capture.options = {"sample_bytes": 100_000}
    report = reported(capture, tmp_path / "few.lscope")
    assert report.sites[0].live_objects > 10_000
    assert report.verdict.verdict != "leak"

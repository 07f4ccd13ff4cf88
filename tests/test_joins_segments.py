"""Segments of a snapshot that its trace does not reach back to, against the device memory that a recording has live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import planted as p
import pytest
from planted import outcome

LIFE = p.LIVES[2]
TRACED = 40
AT_NS = LIFE.end_ns - 1_000
FOREIGN = (0x1234_0000_0000, 1 << 21, "large")
MAPPED = (0x2345_0000_0000, 1 << 25, "expandable")


@pytest.fixture(scope="module")
def run() -> p.Planted:
    """The planted run in which addresses are handed out once, so that all of the process is live at its end."""
    run = p.planted()
    seen: set[int] = set()
    run.allocations = [r for r in run.allocations if not (r["addr"] in seen or seen.add(r["addr"]))]  # type: ignore[func-returns-value]
    return run


def held(run: p.Planted) -> list[tuple[int, int, str]]:
    """Three quarters of what the process has, one that the recording never saw, one that is mapped."""
    own = run.of_life(LIFE, "allocations")
    return [*((r["addr"], r["size_bytes"], "large") for r in own[len(own) // 4 :]), FOREIGN, MAPPED]


def test_older_segments_are_live_memory_of_the_recording(run: p.Planted, opened: Any, tmp_path: Path) -> None:
    # given a trace of the last allocations alone, and readings of NVML
    own = run.of_life(LIFE, "allocations")
    segments = held(run)
    used = [
        (AT_NS - 20_000_000, str(p.OUTER_PID), "gpu_process_used", 9e9),
        (AT_NS + p.SECOND, "1", "gpu_process_used", 5.0),
    ]
    recording = p.write_recording(tmp_path / "run.lscope", run, samples=used)
    report = p.write_torch(tmp_path / "t.lscope", run, LIFE, traced=TRACED, segments=segments)
    # when they are joined
    joined = opened(recording, report).joined()
    # then what the trace has is found by it, and the rest by being live
    assert outcome(joined, "identity", "allocations of snapshot").matched == TRACED
    older = outcome(joined, "identity", "older than its trace")
    assert (older.matched, older.ambiguous, older.refused) == (len(segments) - 2 - TRACED, 0, 2)
    assert older.reasons == (
        "expandable segments, which are mapped and not allocated: 1",
        "the recording holds no such memory then (it may have begun later): 1",
    )
    (of_site,) = joined.links[0].by_site().values()
    found = {link.name: link.count for place, link in of_site if place == "seen"}
    assert found == {
        "the same allocations in snapshot.pickle": TRACED, "segments in snapshot.pickle": len(segments) - 2 - TRACED,
    }  # fmt: skip
    # and what is reserved, live and used is reconciled, to the byte
    reserved = sum(size for _, size, _ in segments)
    common, live = reserved - FOREIGN[1] - MAPPED[1], sum(r["size_bytes"] for r in own)
    lines = [(row.source, row.what, row.value) for row in joined.reconciliation[3:]]
    assert lines == [
        ("snapshot.pickle", "reserved by PyTorch's allocator (its segments)", reserved),
        ("snapshot.pickle", "of these live device memory of the recording at the snapshot", common),
        ("snapshot.pickle", "unexplained", FOREIGN[1] + MAPPED[1]),
        ("run", "device memory live at the snapshot", live),
        ("snapshot.pickle", "of these segments of PyTorch's allocator", common),
        ("run", "unexplained", live - common),
        ("NVML", "GPU memory used by the process at the snapshot", 9_000_000_000),
        ("run", "device memory live at the snapshot", live),
        ("NVML", "unexplained", 9_000_000_000 - live),
    ]


def test_without_a_trace_segments_alone_tell_the_process(run: p.Planted, opened: Any, tmp_path: Path) -> None:
    segments = held(run)
    recording = p.write_recording(tmp_path / "run.lscope", run)
    report = p.write_torch(tmp_path / "t.lscope", run, LIFE, traced=0, segments=segments)
    joined = opened(recording, report).joined()
    assert outcome(joined, "identity", "older than its trace").matched == len(segments) - 2
    assert not [row for row in joined.reconciliation if row.source == "NVML"]  # not sampled


def test_memory_that_was_freed_before_the_snapshot_is_not_the_segment(
    run: p.Planted, opened: Any, tmp_path: Path
) -> None:
    # given one allocation that was freed long before the snapshot and one after it
    own = run.of_life(LIFE, "allocations")
    changed = p.Planted(allocations=list(run.allocations), kernel=run.kernel, calls=run.calls, launches=run.launches)
    freed_ns = {100: AT_NS - p.SECOND // 4, 101: AT_NS + 500}
    changed.frees = [own[i] | {"ts_ns": at, "alloc_ts_ns": own[i]["ts_ns"]} for i, at in freed_ns.items()]
    segments = [(own[i]["addr"], own[i]["size_bytes"], "large") for i in (100, 101, 102)]
    recording = p.write_recording(tmp_path / "run.lscope", changed)
    report = p.write_torch(tmp_path / "t.lscope", run, LIFE, traced=0, segments=segments)
    # when they are joined
    found = outcome(opened(recording, report).joined(), "identity", "older than its trace")
    # then the one that was free is not it
    assert (found.matched, found.ambiguous, found.refused) == (2, 0, 1)

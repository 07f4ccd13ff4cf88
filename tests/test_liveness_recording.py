"""Liveness of recordings and of PyTorch snapshots, whose truth is known to the byte."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leakscope.capture import Capture
from leakscope.ingest import import_files
from leakscope.liveness.analyse import Options, analyse
from leakscope.liveness.graph import Graph
from leakscope.model.liveness import CLASSES, EDGE_KINDS, Liveness, SourceLiveness, Stale
from tests.synthetic import SyntheticCapture

DATA = os.environ.get("LEAKSCOPE_TEST_DATA")
GPU = {"layer": "gpu", "kind": "device", "api": "cudaMalloc"}


class Recording(SyntheticCapture):
    """A synthetic capture with launches."""

    def launch(self, at_s: float, kernel: str, *pointers: int, approximate: int = 0) -> None:
        """A launch of a kernel with pointer arguments."""
        number = len(self.rows["launches"]) + 1
        common = {"ts_ns": self.ns(at_s), "pid": 100}
        self.rows["launches"].append({"id": number, "kernel": kernel, "api": "cuLaunchKernel", **common})
        for position, value in enumerate(pointers):
            self.rows["launch_arguments"].append(
                {"launch_id": number, "position": position, "value": value, "approximate": approximate, **common}
            )

    def block(self, at_s: float, addr: int, size: int, site: str) -> dict[str, Any]:
        """Device memory."""
        return self.alloc(at_s, size, addr=addr, user=["main", site, "cudaMalloc"], **GPU)


def analysed(path: Path, options: Options | None = None) -> tuple[Liveness, Graph]:
    capture = Capture.open(path)
    with capture.connect() as con:
        return analyse([(con, capture.manifest)], options)


def classes(source: SourceLiveness) -> dict[str, tuple[int, int]]:
    """(objects, bytes) of the classes that have some."""
    return {c.name: (c.objects, c.bytes) for c in source.classes if c.objects}


def edges(graph: Graph) -> set[tuple[str, str, str]]:
    rows = zip(*(graph.edges[name].tolist() for name in ("tail", "kind", "head")), strict=True)
    return {(graph.name(t), EDGE_KINDS[k], graph.name(h)) for t, k, h in rows if EDGE_KINDS[k] != "roots"}


def recorded() -> Recording:
    """100 s: device blocks in use, stale and never touched, one that was freed; host and kernel memory."""
    made = Recording(100)
    made.process()
    made.block(1, 0x10000, 4000, "serve")
    made.block(2, 0x20000, 2000, "serve")
    made.free(made.block(3, 0x30000, 5000, "serve"), 5)
    made.block(6, 0x30000, 1000, "never")
    for at in range(10, 95, 5):
        made.launch(at, "attend", 0x10000)
    made.launch(20, "fill", 0x20000)
    host = {"layer": "host", "kind": "mmap_anon", "api": "mmap", "user": ["main", "grow", "mmap"]}
    made.alloc(5, 300, **host)
    made.alloc(95, 700, **host)
    kernel = {"cache": "kmalloc-rnd-03-64", "user": ["main", "open"], "kernel": ["k:do_open", "k:alloc_file"]}
    made.leak(10, 64, start_s=0, end_s=100, **kernel)
    made.churn(100, 64, **kernel)
    return made


def test_device_memory_is_in_use_or_stale_by_its_last_touch(tmp_path: Path) -> None:
    # when what a process keeps is analysed, whose launches are known whole
    found, graph = analysed(recorded().write(tmp_path / "r.lscope"))
    (source,) = found.sources
    # then touched within 30 s is in use, longer ago or never is stale, and of other memory uses are not seen
    assert classes(source) == {"normal": (1, 4000), "held-stale": (2, 3000), "unknown-ref": (12, 1640)}
    by_name: dict[str, list[Stale]] = {}
    for row in found.stale:
        by_name.setdefault(row.name, []).append(row)
    (stale,) = by_name["device cudaMalloc of serve"]
    assert (stale.bytes, stale.age_s, stale.byte_seconds, stale.cls) == (2000, 80.0, 160_000.0, "held-stale")
    assert (stale.evidence, stale.approximate, stale.holder) == ("launch arguments", False, "process 100 p100")
    assert (by_name["device cudaMalloc of never"][0].bytes, by_name["device cudaMalloc of never"][0].age_s) == (
        1000,
        94,
    )
    # and the graph says which kernels touch what
    assert edges(graph) == {
        ("process 100 p100", "holds", name)
        for name in (
            "device cudaMalloc of serve", "device cudaMalloc of never", "mmap_anon mmap of grow",
            "kmalloc kmalloc-64 of open",
        )
    } | {("device cudaMalloc of serve", "touched-by", kernel) for kernel in ("attend", "fill")}  # fmt: skip
    assert found.keepers[0].retained_bytes == 4000 + 3000 + 1000 + 640 == int(graph.retained_bytes[0])
    assert found.keepers[0].objects == 15


def test_what_is_not_touched_is_ranked_by_bytes_and_age_of_its_cohorts(tmp_path: Path) -> None:
    found, _ = analysed(recorded().write(tmp_path / "r.lscope"))
    kernel = next(row for row in found.stale if row.layer == "kernel")
    # ten objects, made at 5, 15 … 95 s: seven are older than 30 s, on average 65 s
    assert (kernel.objects, kernel.bytes, kernel.cls) == (7, 448, "unknown-ref")
    assert kernel.byte_seconds == pytest.approx(64 * sum(range(35, 105, 10)))
    assert kernel.cohorts == ((1.0, 1, 64), (10.0, 2, 128), (30.0, 3, 192), (60.0, 4, 256))
    assert (kernel.evidence, kernel.approximate) == ("time of allocation", True)
    host = next(row for row in found.stale if row.layer == "host")
    assert (host.objects, host.bytes, host.age_s) == (1, 300, 95.0)
    assert [row.byte_seconds for row in found.stale] == sorted((r.byte_seconds for r in found.stale), reverse=True)
    # and another threshold moves what counts
    found, _ = analysed(tmp_path / "r.lscope", Options(stale_after_s=90))
    (source,) = found.sources
    assert classes(source) == {"normal": (2, 6000), "held-stale": (1, 1000), "unknown-ref": (12, 1640)}


@pytest.mark.parametrize("how", ["guessed", "graph"])
def test_approximate_touches_are_never_the_only_evidence(tmp_path: Path, how: str) -> None:
    # given at 50 s a launch of which only a guess, or nothing, is known
    made = recorded()
    if how == "guessed":
        made.launch(90, "guess", 0x20000, approximate=1)
    else:
        made.call("cuGraphLaunch", 90, 90.001)
    found, _ = analysed(made.write(tmp_path / "r.lscope"))
    (source,) = found.sources
    # then neither use nor disuse of what has no exact touch since is claimed
    expected = {"guessed": {"held-stale": (1, 1000), "unknown-ref": (13, 3640)}, "graph": {"unknown-ref": (14, 4640)}}
    assert classes(source) == {"normal": (1, 4000)} | expected[how]
    unknown = 2000 if how == "guessed" else 3000
    assert any(f"{unknown:,} bytes of device memory are unknown-ref" in note for note in source.notes)


def test_classes_over_time(tmp_path: Path) -> None:
    found, _ = analysed(recorded().write(tmp_path / "r.lscope"), Options(windows=4))
    windows = found.sources[0].windows
    assert [window.t_s for window in windows] == [25, 50, 75, 100]
    named = [dict(zip(CLASSES, window.bytes, strict=True)) for window in windows]
    assert [(w["normal"], w["held-stale"]) for w in named] == [(7000, 0), (6000, 1000), (4000, 3000), (4000, 3000)]
    assert named[-1]["unknown-ref"] == 1640
    assert named[0]["unknown-ref"] < named[-1]["unknown-ref"]


def test_without_launch_arguments_nothing_is_said_of_use(tmp_path: Path) -> None:
    made = recorded()
    made.rows["launches"], made.rows["launch_arguments"] = [], []
    found, _ = analysed(made.write(tmp_path / "r.lscope"))
    (source,) = found.sources
    assert classes(source) == {"unknown-ref": (15, 8640)}
    assert any("no launch arguments" in note for note in source.notes)


def test_short_lived_processes_and_exits(tmp_path: Path) -> None:
    # given memory that outlives a short process, some that ends with it, and a root that has exited
    made = Recording(100)
    made.process(exit_s=80)
    made.process(200, "child", 10, 11)
    how = {"kernel": ["k:do_open", "k:alloc_file"], "user": ["main", "open"], "cache": "filp"}
    made.alloc(10.5, 256, pid=200, **how)
    made.free(made.alloc(10.6, 1000, pid=200, **how), 11.1, cause="exit")
    made.free(made.alloc(20, 512, **how), 80.1, cause="exit")
    made.churn(50, 64, end_s=79, **how)
    found, graph = analysed(made.write(tmp_path / "r.lscope"))
    assert classes(found.sources[0]) == {"unknown-ref": (2, 768)}
    holders = {(k.name, k.bytes) for k in found.keepers}
    assert {name for name, _ in holders} == {"process 100 p100 (exited)", "short-lived processes"}
    assert int(graph.retained_bytes[0]) == 768


def prefork(tmp_path: Path) -> Path:
    """Three workers with one site, a 10th of whose memory is as old as they are, and a small site each."""
    made = Recording(100)
    for number in range(3):
        made.process(100 + number)
        how = {"layer": "host", "kind": "mmap_anon", "api": "mmap", "pid": 100 + number}
        made.alloc(1, 100, user=["main", "load", "mmap"], **how)
        made.alloc(99, 900, user=["main", "load", "mmap"], **how)
        made.alloc(50, 10 + number, user=["main", f"small_{number}", "mmap"], **how)
    return made.write(tmp_path / "p.lscope")


def test_each_process_retains_its_own_and_sites_are_ranked_together(tmp_path: Path) -> None:
    found, _ = analysed(prefork(tmp_path))
    assert {k.name: k.retained_bytes for k in found.keepers} == {
        "process 100 p100": 1010, "process 101 p101": 1011, "process 102 p102": 1012,
    }  # fmt: skip
    load = found.stale[0]
    assert (load.name, load.objects, load.bytes, load.age_s) == ("mmap_anon mmap of load", 3, 300, 99.0)
    assert load.cohorts == ((1.0, 3, 2700), (60.0, 3, 300))
    assert [row.bytes for row in found.stale[1:]] == [12, 11, 10]
    assert found.nodes == {"root": 1, "holder": 3, "site": 6}


def test_what_has_no_node_of_its_own_is_counted_in_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakscope.liveness.recording.MAX_NODES", 2)
    found, graph = analysed(prefork(tmp_path))
    assert found.nodes == {"root": 1, "holder": 3, "site": 3}
    assert classes(found.sources[0]) == {"unknown-ref": (9, 3033)}
    assert int(graph.retained_bytes[0]) == 3033
    others = next(keeper for keeper in found.keepers if keeper.name == "other processes")
    assert (others.objects, others.bytes) == (5, 1033)
    assert sum(row.bytes for row in found.stale) == 333


def test_a_census_has_the_ages_of_its_cohorts(tmp_path: Path) -> None:
    made = SyntheticCapture(100)
    made.process()
    stack = made.stack(["main", "grow"])
    made.rows["census_sites"].append(
        {"id": 1, "pid": 100, "layer": "host", "kind": "mmap_anon", "api": "mmap", "user_stack": stack, "weight": 1}
    )
    totals = {"site": 1, "allocated_objects": 6, "allocated_bytes": 600, "freed_objects": 1, "freed_bytes": 100}
    totals |= {"first_ns": made.ns(1), "last_ns": made.ns(91), "smallest_bytes": 100, "largest_bytes": 100}
    made.rows["census_totals"].append({"ts_ns": made.ns(99), **totals})
    for at, cohort, objects in ((50, 10, 3), (99, 10, 2), (99, 90, 3)):  # the second readout replaces the first
        made.rows["census"].append(
            {"ts_ns": made.ns(at), "site": 1, "cohort_ns": made.ns(cohort), "objects": objects, "bytes": 100 * objects}
        )
    found, _ = analysed(made.write(tmp_path / "c.lscope"))
    assert classes(found.sources[0]) == {"unknown-ref": (5, 500)}
    (stale,) = found.stale
    assert (stale.objects, stale.bytes, stale.age_s) == (2, 200, 90.0)
    assert stale.cohorts == ((10.0, 3, 300), (60.0, 2, 200))


def block(size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "state": state, "frames": frames}


def segment(address: int, blocks: list[dict[str, Any]], pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    placed, at = [], address
    for one in blocks:
        placed.append({"address": at, **one})
        at += one["size"]
    return {
        "device": 0, "address": address, "total_size": at - address, "stream": 0, "segment_type": "large",
        "segment_pool_id": pool, "is_expandable": False, "frames": [], "blocks": placed,
    }  # fmt: skip


def frames(name: str) -> list[dict[str, Any]]:
    return [{"name": name, "filename": "model.py", "line": 5}, {"name": "train", "filename": "model.py", "line": 70}]


def snapshot(tmp_path: Path) -> Path:
    """One segment that two stacks share, one of attention alone, one that waits for a stream, one that is free."""
    trace = [
        {"action": "alloc", "time_us": 1_000_000, "addr": 0x1000, "size": 100, "stream": 0, "frames": frames("embed")},
        {"action": "alloc", "time_us": 2_000_000, "addr": 0x2000, "size": 70, "stream": 0, "frames": frames("attend")},
        {"action": "free_completed", "time_us": 3_000_000, "addr": 0x2000, "size": 70, "stream": 0, "frames": []},
        {"action": "alloc", "time_us": 90_000_000, "addr": 0x2000, "size": 70, "stream": 0, "frames": frames("attend")},
        {"action": "snapshot", "time_us": 101_000_000, "addr": 0, "size": 0, "stream": 0, "frames": []},
    ]
    used, free = "active_allocated", "inactive"
    segments = [
        segment(0x1000, [block(100, used, frames("embed")), block(30, used, frames("attend")), block(900, free, [])]),
        segment(0x2000, [block(70, used, frames("attend")), block(2000, free, []), block(500, free, [])]),
        segment(0x3000, [block(40, "active_awaiting_free", frames("embed"))], (0, 1)),
        segment(0x4000, [block(5000, free, [])]),
    ]
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps({"segments": segments, "device_traces": [trace]}))
    return path


def test_a_snapshot_says_what_keeps_its_segments(tmp_path: Path) -> None:
    import_files([snapshot(tmp_path)], tmp_path / "s.lscope")
    found, graph = analysed(tmp_path / "s.lscope")
    (source,) = found.sources
    assert (source.kind, source.at_ns) == ("allocator snapshot", 101_000_000_000)
    assert classes(source) == {"zombie": (1, 40), "idle-cached": (4, 8400), "unknown-ref": (3, 200)}
    # then a stack retains its blocks and the free pieces of segments that it alone keeps from being given back
    keepers = {k.name: (k.objects, k.bytes, k.retained_bytes) for k in found.keepers}
    cache = "caching allocator of snapshot.json: segments without a block in use"
    assert keepers == {
        "tensors of attend (model.py:5)": (2, 100, 30 + 70 + 2500),
        "tensors of embed (model.py:5)": (1, 100, 100),
        "work on other streams that is not done": (1, 40, 40),
        cache: (1, 0, 5000),
    }
    assert int(graph.retained_bytes[0]) == 8640
    main, waiting = source.pools
    assert (main.reserved_bytes, main.active_bytes, main.pending_bytes, main.free_bytes) == (8600, 200, 0, 8400)
    assert (main.free_split_bytes, main.largest_free_bytes, main.segments, main.blocks) == (3400, 5000, 3, 7)
    assert main.fragmentation == pytest.approx(1 - 5000 / 8400)
    assert (waiting.pool, waiting.pending_bytes, waiting.fragmentation) == ("0,1", 40, 0.0)
    # and the age of blocks is that of the last allocation in the trace
    assert [(s.name, s.bytes, s.age_s) for s in found.stale] == [("block 0x1000, active_allocated", 100, 100.0)]


def test_why_a_free_piece_is_alive(tmp_path: Path) -> None:
    import_files([snapshot(tmp_path)], tmp_path / "s.lscope")
    found, _ = analysed(tmp_path / "s.lscope", Options(why=("block 0x1082, inactive", "0x2046")))
    shared, alone = found.whys
    # the free piece behind both stacks' blocks: no stack alone could let it go
    assert (shared.bytes, shared.cls, shared.dominator, shared.keepers) == (
        900,
        "idle-cached",
        "segment 0x1000, large, device 0",
        1,
    )
    assert [step.edge for step in alone.paths[0]] == ["", "holds", "occupies", "contains"]
    assert alone.paths[0][0].name == "tensors of attend (model.py:5)"
    assert alone.paths[0][1].stack == ("train (model.py:70)", "attend (model.py:5)")


@pytest.mark.skipif(DATA is None, reason="NOT TESTED: real snapshots; set LEAKSCOPE_TEST_DATA to their folder")
@pytest.mark.parametrize("name", ["snapshot_windows_python-frames", "snapshot_linux_cpp-frames_annotations"])
def test_real_snapshots_add_up(tmp_path: Path, name: str) -> None:
    assert DATA is not None
    import_files([Path(DATA) / "torch_snapshot" / f"{name}.pickle"], tmp_path / "s.lscope")
    found, graph = analysed(tmp_path / "s.lscope")
    (source,) = found.sources
    reserved = sum(pool.reserved_bytes for pool in source.pools)
    assert sum(c.bytes for c in source.classes) == int(graph.retained_bytes[0]) == reserved
    free = sum(pool.free_bytes for pool in source.pools)
    assert classes(source)["idle-cached"][1] == free
    held = [i for i in range(len(graph)) if graph.kind(i) == "holder"]
    assert np.asarray(graph.retained_bytes)[held].sum() <= reserved

"""PyTorch snapshots: real ones, made ones of every protocol, and pickles that want to do something."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import pytest

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.plain_pickle import PickleRefusedError, PlainPickle
from nsight_parsers.recognise import recognise
from nsight_parsers.torch_snapshot import parse_torch_snapshot

DATA = os.environ.get("LEAKSCOPE_TEST_DATA")
needs_data = pytest.mark.skipif(
    DATA is None, reason="NOT TESTED: real snapshots; set LEAKSCOPE_TEST_DATA to their folder"
)

# name → (segments, blocks, active blocks, allocs, completed frees, first µs, last µs, annotations)
REAL = {
    "snapshot_windows_python-frames": (216, 455, 229, 1721, 1721, 1776479641085368, 1776479641333549, 0),
    "snapshot_linux_cpp-frames_annotations": (96, 550, 447, 2162, 2162, 1773270053858957, 1773270053909604, 1),
    "snapshot_linux_forward_net-growth": (1722, 4158, 3478, 4138, 2405, 1754643471271249, 1754643471354315, 0),
}


def real(name: str) -> Path:
    assert DATA is not None
    return Path(DATA) / "torch_snapshot" / f"{name}.pickle"


def rows(report: ParsedReport, table: str) -> list[dict[str, Any]]:
    found = report.tables.get(table)
    return found.to_pylist() if found is not None else []


def frame(name: str, line: int = 1, file: str = "model.py") -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}


def event(action: str, time_us: int | None, addr: int, size: int, frames: list[Any] | None = None) -> dict[str, Any]:
    row = {"action": action, "addr": addr, "size": size, "stream": 0, "frames": frames or []}
    return row if time_us is None else row | {"time_us": time_us}


def block(size: int, state: str = "active_allocated", requested: int | None = None, **more: Any) -> dict[str, Any]:
    return {"size": size, "requested_size": requested or size, "state": state, "frames": [], **more}


def segment(address: int, blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    at, placed = address, []
    for one in blocks:
        placed.append({"address": at, **one})
        at += one["size"]
    return {
        "device": device, "address": address, "total_size": at - address, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": placed,
    }  # fmt: skip


STEP = [frame("torch::unwind()", 0, "??"), frame("relu", 7), frame("train", 70)]  # innermost first


def snapshot() -> dict[str, Any]:
    trace = [
        event("free_completed", 1_000, 0x9000, 10),
        event("segment_alloc", 1_001, 0x1000, 4096, STEP),
        event("alloc", 1_002, 0x1000, 100, STEP),
        event("alloc", 1_003, 0x1200, 200),
        event("free_requested", 1_004, 0x1000, 100),
        event("free_completed", 1_005, 0x1000, 100),
        event("alloc", 1_006, 0x1000, 50, STEP),
        event("segment_free", 1_007, 0x8000, 8192),
        {"action": "oom", "size": 3000, "device_free": 77, "stream": 0, "frames": [], "time_us": 1_008},
        event("snapshot", 1_009, 0, 0),
    ]
    segments = [
        segment(0x1000, [block(512, requested=50), block(512), block(1024, "inactive"), block(2048, "inactive")]),
        segment(0x4000, [block(1024, "inactive")]),
        segment(0x6000, [block(256, "active_awaiting_free"), block(768, "inactive")], device=1),
    ]
    notes = [
        {"stage": "START", "name": "step", "device": 0, "time_us": 1_002},
        {"stage": "START", "name": "open", "device": 0, "time_us": 1_003},
        {"stage": "END", "name": "step", "device": 0, "time_us": 1_006},
    ]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "secret:1", "max_split_size": -1}
    traces = [trace, []]
    return {
        "segments": segments,
        "device_traces": traces,
        "external_annotations": notes,
        "allocator_settings": settings,
    }


@needs_data
@pytest.mark.parametrize("name", REAL)
def test_real_snapshots(name: str) -> None:
    segments, blocks, active, allocs, frees, first_us, last_us, notes = REAL[name]

    report = parse_torch_snapshot(real(name), pid=7)

    assert recognise(real(name)) == "torch_snapshot"
    figures = report.facts["fragmentation"]["0"]
    assert (figures["segments"], figures["blocks"]) == (segments, blocks)
    assert sum(row["state"] == "active_allocated" for row in rows(report, "segments")) == active
    assert report.facts["actions"]["alloc"] == allocs and report.facts["actions"]["free_completed"] == frees
    assert report.facts["actions"]["free_requested"] == frees
    events = rows(report, "mem_events")
    assert (events[0]["ts_ns"], events[-1]["ts_ns"]) == (first_us * 1000, last_us * 1000)
    assert {e["pid"] for e in events} == {7} and report.clock == "utc"
    assert report.tables["marks"].num_rows == notes if notes else "marks" not in report.tables


@needs_data
@pytest.mark.parametrize("name", REAL)
def test_real_snapshots_agree_with_a_plain_unpickler(name: str) -> None:
    # given: what pickle makes of it
    whole = pickle.loads(real(name).read_bytes())
    live: dict[int, int] = {}
    for row in whole["device_traces"][0]:
        if row["action"] == "alloc":
            live[row["addr"]] = row["size"]
        elif row["action"] == "free_completed":
            live.pop(row["addr"], None)

    report = parse_torch_snapshot(real(name))

    events = rows(report, "mem_events")
    kept = sum(e["size_bytes"] for e in events if e["op"] == "alloc")
    kept -= sum(e["size_bytes"] for e in events if e["op"] == "free" and e["alloc_ts_ns"])
    assert kept == sum(live.values())
    assert {e["kind"] for e in events} == {"pool_block"}
    figures = report.facts["fragmentation"]["0"]
    for key, ours in (
        ("total_size", "reserved_bytes"),
        ("allocated_size", "allocated_bytes"),
        ("active_size", "active_bytes"),
    ):
        assert figures[ours] == sum(s[key] for s in whole["segments"])


@needs_data
def test_real_frames_python_and_native() -> None:
    windows = parse_torch_snapshot(real("snapshot_windows_python-frames"))
    linux = parse_torch_snapshot(real("snapshot_linux_cpp-frames_annotations"))

    trace = pickle.loads(real("snapshot_windows_python-frames").read_bytes())["device_traces"][0]
    assert len(trace) == 5163 and sum(not row["frames"] for row in trace) == 3742
    allocated_with_frames = sum(bool(row["frames"]) for row in trace if row["action"] == "alloc")
    events = rows(windows, "mem_events")
    assert sum(e["op"] == "alloc" and e["python_stack"] > 0 for e in events) == allocated_with_frames > 600
    assert {row["kind"] for row in rows(windows, "frames")} == {"python"}
    assert any(row["file"].endswith("model.py") and row["line"] == 54 for row in rows(windows, "frames"))
    assert {row["kind"] for row in rows(linux, "frames")} == {"python", "native"}
    native = [row for row in rows(linux, "frames") if row["kind"] == "native"]
    assert any("torch::unwind" in row["function"] for row in native)
    assert not any(row["file"] == "??" or row["file"].endswith(".py") for row in native)
    (mark,) = rows(linux, "marks")
    assert (mark["name"], mark["start_ns"], mark["end_ns"]) == (
        "Optimizer.step#AdamW.step", 1773270053883781000, 1773270053896695000,
    )  # fmt: skip


@pytest.mark.parametrize("form", ["2", "3", "4", "5", "json", "4 optimized", "python pickler"])
def test_a_made_snapshot_in_every_form(tmp_path: Path, form: str) -> None:
    path = tmp_path / "made"
    if form == "json":
        path.write_text(json.dumps(snapshot()))
    elif form == "python pickler":
        with path.open("wb") as file:
            pickle._Pickler(file, 4).dump(snapshot())  # type: ignore[attr-defined]
    else:
        data = pickle.dumps(snapshot(), int(form[0]))
        path.write_bytes(pickletools.optimize(data) if "optimized" in form else data)

    report = parse_torch_snapshot(path, pid=9)

    assert recognise(path) == "torch_snapshot"
    got = [
        (e["op"], e["kind"], e["addr"], e["size_bytes"], e["ts_ns"], e["alloc_ts_ns"])
        for e in rows(report, "mem_events")
    ]
    assert got == [
        ("free", "pool_block", 0x9000, 10, 1_000_000, 0),
        ("alloc", "pool_segment", 0x1000, 4096, 1_001_000, 0),
        ("alloc", "pool_block", 0x1000, 100, 1_002_000, 0),
        ("alloc", "pool_block", 0x1200, 200, 1_003_000, 0),
        ("free", "pool_block", 0x1000, 100, 1_005_000, 1_002_000),
        ("alloc", "pool_block", 0x1000, 50, 1_006_000, 0),
        ("free", "pool_segment", 0x8000, 8192, 1_007_000, 0),
    ]
    allocated, freed = rows(report, "mem_events")[2], rows(report, "mem_events")[4]
    assert [freed[c] for c in ("api", "python_stack", "user_stack")] == [
        allocated[c] for c in ("api", "python_stack", "user_stack")
    ]
    frames = {row["id"]: row for row in rows(report, "frames")}
    stack = {row["id"]: row["frames"] for row in rows(report, "stacks")}
    assert [frames[i]["function"] for i in stack[allocated["python_stack"]]] == ["train", "relu"]
    assert [frames[i]["function"] for i in stack[allocated["user_stack"]]] == ["torch::unwind()"]
    assert report.facts["fragmentation"] == {
        "0": {
            "segments": 2, "blocks": 5, "reserved_bytes": 5120, "allocated_bytes": 1024, "active_bytes": 1024,
            "requested_bytes": 562, "inactive_bytes": 4096, "inactive_split_bytes": 3072,
            "largest_inactive_block_bytes": 2048,
        },
        "1": {
            "segments": 1, "blocks": 2, "reserved_bytes": 1024, "allocated_bytes": 0, "active_bytes": 256,
            "requested_bytes": 256, "inactive_bytes": 768, "inactive_split_bytes": 768,
            "largest_inactive_block_bytes": 768,
        },
    }  # fmt: skip
    samples = {(s["scope_id"], s["counter"]): s["value"] for s in rows(report, "samples")}
    assert samples["0", "gpu_inactive_split"] == 3072.0 and samples["1", "gpu_reserved"] == 1024.0
    assert {s["ts_ns"] for s in rows(report, "samples")} == {1_009_000}
    assert [(m["name"], m["start_ns"], m["end_ns"]) for m in rows(report, "marks")] == [
        ("step", 1_002_000, 1_006_000), ("open", 1_003_000, 0),
    ]  # fmt: skip
    assert (
        "device 0 ran out of memory: 3,000 bytes asked for, 77 free on the device; the pool holds 4,096 bytes in free "
        "blocks, the largest 2,048: fragmentation"
    ) in report.findings
    assert "1 annotations were never closed" in report.findings
    assert report.facts["allocator_settings"] == {"max_split_size": -1}  # the text comes from the environment
    assert [row["pid"] for row in rows(report, "processes")] == [9]


def test_more_rows_than_a_pickler_appends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "long.pickle"
    trace = [event("alloc", i, 0x1000 + 512 * i, i, STEP) for i in range(1, 3502)]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[], trace]}, 4))
    seen: list[tuple[int, int]] = []

    report = parse_torch_snapshot(path, progress=lambda done, total: seen.append((done, total)))

    assert report.tables["mem_events"].num_rows == 3501
    assert report.tables["mem_events"]["size_bytes"].to_pylist() == list(range(1, 3502))
    assert seen[-1][0] == seen[-1][1] == path.stat().st_size


def test_a_bare_list_of_segments_and_a_trace_without_times(tmp_path: Path) -> None:
    bare, old = tmp_path / "bare.pickle", tmp_path / "old.pickle"
    bare.write_bytes(pickle.dumps([segment(0x1000, [block(512)])], 4))
    trace = [event("alloc", None, 0x1000, 5), event("free_completed", None, 0x1000, 5)]
    old.write_bytes(pickle.dumps({"segments": [segment(0x1000, [block(512)])], "device_traces": [trace]}, 4))

    report, timeless = parse_torch_snapshot(bare), parse_torch_snapshot(old)

    assert rows(report, "segments")[0]["size_bytes"] == 512 and "mem_events" not in report.tables
    assert "no allocation history in it" in report.findings[0]
    assert timeless.clock == "none" and any("rates have no meaning" in f for f in timeless.findings)
    assert [e["alloc_ts_ns"] for e in rows(timeless, "mem_events")] == [0, 1]


# Hostile files.


class Runs:
    """Pickles to a call of os.system."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/leakscope-was-here",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"segments": Runs()}, 4),
        pickle.dumps({"segments": Runs()}, 2),
        b"\x80\x04cos\nsystem\n.",
        b"\x80\x02}(X\x08\x00\x00\x00segmentsPpersistent\nu.",
        b"\x80\x04\x82\x01.",  # an extension
        b"\x80\x05\x97.",  # an out-of-band buffer
    ],
    ids=["protocol 4", "protocol 2", "global", "persistent id", "extension", "buffer"],
)
def test_hostile_pickles_that_ask_for_code_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "hostile.pickle"
    path.write_bytes(data)

    with pytest.raises(ReportError, match="asks for more than plain data"):
        parse_torch_snapshot(path)
    assert not Path("/tmp/leakscope-was-here").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04.",
        b"\x80\x04N.",
        b"\x80\x04K\x01.",
        b"\x80\x04}\x94}\x94s.",
        b"\x80\x04h\x07.",
        b"\x80\x04]\x94r" + struct.pack("<I", 0xFFFFFFF0) + b".",  # a memo of 4 billion places
        b"\x80\x04X" + struct.pack("<I", 0xFFFFFFF0) + b"abc.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc.",
        b"\x80\x04" + b"(" * 10_000 + b".",
        b"\x80\x04" + b"]" * 30_000_000,
        b"\x80\x04]" + b"]a" * 10_000_000,
        b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b".",
        b"\x80\x04]\x94(h\x00h\x00e.",  # a list in itself
        b"\x80\x04}(" + b"\x8c\x08segments\x8c\x01x" + b"u.",
        pickle.dumps({"segments": [{"blocks": 5, "total_size": "x"}]}, 4),
        pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]}, 4),
        pickle.dumps({"segments": [], "device_traces": [[event("alloc", 1, -5, 1)]]}, 4),
        pickle.dumps({"segments": [], "device_traces": [[event("alloc", 1 << 70, 5, 1)]]}, 4),
        pickle.dumps({"segments": [], "device_traces": [[event("alloc", 1, 5, 1, [{"name": 5}])]]}, 4),
    ],
)
def test_hostile_or_damaged_pickles_are_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "damaged.pickle"
    path.write_bytes(data)

    with pytest.raises(ReportError) as refused:
        parse_torch_snapshot(path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def test_hostile_rows_that_multiply_by_reference_are_refused(tmp_path: Path) -> None:
    # given: one list of 1,000 blocks that each of 1,000 segments refers to, in some 20 kB
    blocks = [block(512)] * 1000
    one = {"device": 0, "address": 1, "total_size": 1, "blocks": blocks}
    path = tmp_path / "multiplied.pickle"
    path.write_bytes(pickle.dumps({"segments": [dict(one) for _ in range(1000)]}, 4))

    with pytest.raises(ReportError, match="more rows than a file of its size can hold"):
        parse_torch_snapshot(path)


def test_hostile_reference_to_a_row_that_was_taken_is_refused() -> None:
    row = event("alloc", 1, 5, 1)
    data = pickle.dumps([[row], [row]], 4)
    taken: list[Any] = []

    def append(target: list[Any], items: list[Any]) -> bool:
        if type(items[0]) is not dict:
            return False
        taken.extend(dict(item) for item in items)
        for item in items:
            reader.forget(item)
        return True

    reader = PlainPickle(io.BytesIO(data), append)
    top = reader.load()

    assert len(taken) == 1 and len(top[1]) == 1 and not isinstance(top[1][0], dict)


def test_hostile_cut_anywhere(tmp_path: Path) -> None:
    data = pickle.dumps(snapshot(), 4)
    path = tmp_path / "cut.pickle"
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(ReportError):
            parse_torch_snapshot(path)


def test_the_reader_agrees_with_pickle_on_plain_data() -> None:
    value = {
        "none": None, "yes": True, "no": False, "ints": [0, 255, 256, 65535, 65536, -1, 1 << 31, -(1 << 62), 1 << 63],
        "floats": [0.5, -1e300], "texts": ["", "ä", "x" * 300, "y" * 70_000],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1,) * 9],
        "nested": {"a": {"b": [{"c": []}]}}, "shared": [[1]] * 3,
    }  # fmt: skip
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(value, protocol)
        assert PlainPickle(io.BytesIO(data), lambda target, items: False).load() == value
    with pytest.raises(PickleRefusedError):
        PlainPickle(io.BytesIO(pickle.dumps(value, 1)), lambda target, items: False).load()

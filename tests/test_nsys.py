"""Nsight Systems exports: what real ones say, what hand-made ones show, what hostile ones cannot do."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.interning import StackInterner
from nsight_parsers.nsys import parse_nsys
from nsight_parsers.nsys.chains import read_chains
from nsight_parsers.nsys.database import Export
from nsight_parsers.recognise import recognise
from tests.nsys_files import (
    ALLOC,
    DEVICE_STATIC,
    FREE,
    MANAGED,
    OTHER_TID,
    PID,
    PINNED,
    SYSTEM_CLOCK_NS,
    TID,
    UTC_NS,
    NsysFile,
    global_tid,
    leaky_export,
)  # fmt: skip

DATA = os.environ.get("LEAKSCOPE_TEST_DATA")
needs_data = pytest.mark.skipif(
    DATA is None, reason="NOT TESTED: real exports; set LEAKSCOPE_TEST_DATA to their folder"
)

# file → facts of the data set's own README: (version, schema, clock, calls, launches, marks, active pids)
REAL: dict[str, tuple[str, str, str, int, int, int, list[int]]] = {
    "nsys-2022.2.1_ncar-miniweather-openacc": ("2022.2.1.31", "2.9.1", "utc", 11419, 2596, 0, [235583]),
    "nsys-2024.6.2_fuser-test-matmul": ("2024.6.2.25", "3.16.1", "utc", 968, 19, 652, [30156]),
    "nsys-2025.1.1_fuser-pytest-two-procs": ("2025.1.1.110", "3.17.1", "utc", 990, 18, 13513, [50556, 50922]),
    "nsys-2025.3.1_nsightful-power-iteration": ("2025.3.1.90", "3.20.2", "utc", 7417, 3689, 786, [9946]),
    "nsys-2025.5.1_weatherbench-fortran": ("2025.5.1.121", "3.23.3", "utc", 23, 0, 0, [2568473]),
    "nsys-2026.1.1_jacc-no-cuda": ("2026.1.1.204", "3.24.14", "monotonic", 0, 0, 0, []),
    "nsys-2026.1.1_testcuda-async-a": ("2026.1.1.204", "3.24.14", "monotonic", 44, 4, 0, [17068]),
    "nsys-2026.1.1_testcuda-async-b": ("2026.1.1.204", "3.24.14", "monotonic", 45, 4, 0, [58972]),
    "nsys-2026.2.1_jacc-cpu-callchains": ("2026.2.1.210", "3.25.0", "monotonic", 0, 0, 0, []),
    "nsys-2026.2.1_nsysai-h100-two-procs": ("2026.2.1.210", "3.25.0", "monotonic", 5796, 3442, 16782, [111, 112]),
}
ALLOCATING = {
    "nsys-2022.2.1_ncar-miniweather-openacc": ({"cuMemAlloc": 30, "cuMemAllocHost": 1, "cuMemHostAlloc": 1}, {}),
    "nsys-2024.6.2_fuser-test-matmul": ({"cudaHostAlloc": 1, "cudaMalloc": 10}, {"cudaFree": 1}),
    "nsys-2025.1.1_fuser-pytest-two-procs": ({"cudaMalloc": 11}, {"cudaFree": 7}),
    "nsys-2025.5.1_weatherbench-fortran": ({"cudaHostAlloc": 1, "cudaMalloc": 1}, {"cudaFree": 1}),
    "nsys-2026.1.1_testcuda-async-a": ({"cudaHostAlloc": 3, "cudaMalloc": 3}, {"cudaFree": 3, "cudaFreeHost": 3}),
}


def real(name: str) -> Path:
    assert DATA is not None
    return Path(DATA) / "nsys" / f"{name}.sqlite"


def rows(report: ParsedReport, table: str) -> list[dict[str, Any]]:
    found = report.tables.get(table)
    return found.to_pylist() if found is not None else []


def stack_of(report: ParsedReport, stack: int) -> list[str]:
    frames = {row["id"]: row["function"] for row in rows(report, "frames")}
    return next([frames[i] for i in row["frames"]] for row in rows(report, "stacks") if row["id"] == stack)


@needs_data
@pytest.mark.parametrize("name", REAL)
def test_real_exports(name: str) -> None:
    version, schema, clock, calls, launches, marks, pids = REAL[name]

    report = parse_nsys(real(name))

    assert recognise(real(name)) == "nsys"
    assert (report.version, report.facts["schema"], report.clock) == (version, schema, clock)
    counts = [
        report.tables[table].num_rows if table in report.tables else 0 for table in ("calls", "launches", "marks")
    ]
    assert counts == [calls, launches, marks]
    assert report.facts["processes"] == pids
    assert "mem_events" not in report.tables
    assert "--cuda-memory-usage=true" in report.findings[0]


@needs_data
@pytest.mark.parametrize("name", ALLOCATING)
def test_real_allocating_and_freeing_calls(name: str) -> None:
    report = parse_nsys(real(name))

    assert (report.facts["allocation_calls"], report.facts["free_calls"]) == ALLOCATING[name]


@needs_data
def test_real_frees_come_from_other_threads() -> None:
    report = parse_nsys(real("nsys-2025.1.1_fuser-pytest-two-procs"))
    calls = rows(report, "calls")

    assert {c["tid"] for c in calls if c["api"] == "cudaMalloc"} == {50556}
    assert sum(c["tid"] != 50556 for c in calls if c["api"] == "cudaFree") == 6
    assert len({c["tid"] for c in calls if c["pid"] == 50556}) == 7


@needs_data
def test_real_clocks_of_one_boot_agree_to_the_nanosecond() -> None:
    facts = [parse_nsys(real(f"nsys-2026.1.1_testcuda-async-{which}")).facts for which in "ab"]

    offsets = [f["session_start_utc_ns"] - f["session_start_system_clock_ns"] for f in facts]
    assert facts[0]["session_start_system_clock_ns"] == 6324391262083
    assert offsets[0] == offsets[1]


@needs_data
def test_real_names_that_stand_only_in_textid_and_a_domain() -> None:
    report = parse_nsys(real("nsys-2025.3.1_nsightful-power-iteration"))
    marks = rows(report, "marks")

    assert all(mark["name"] for mark in marks)
    assert {mark["domain"] for mark in marks} <= {"", "CCCL"}
    assert any(mark["parent_id"] for mark in marks) and all(mark["end_ns"] >= mark["start_ns"] for mark in marks)
    assert all(launch["kernel"] and len(launch["grid"]) == 3 for launch in rows(report, "launches"))


@needs_data
@pytest.mark.parametrize(
    ("name", "table", "expected"),
    [
        ("nsys-2022.2.1_ncar-miniweather-openacc", "SAMPLING_CALLCHAINS", 21541),
        ("nsys-2026.2.1_jacc-cpu-callchains", "SAMPLING_CALLCHAINS", 10669),
    ],
)
def test_real_call_chains_have_the_shape_of_cuda_ones(name: str, table: str, expected: int) -> None:
    stacks = StackInterner()
    with Export(real(name)) as export:
        column = export.ints(table, "id", "stackDepth")
        chains = read_chains(export, table, column["id"], stacks)
        depth = {i: int(column["stackDepth"][column["id"] == i].max()) + 1 for i in list(chains)[:50]}

    assert len(column["id"]) == expected
    assert len(chains) == len(set(column["id"].tolist()))
    frames_of = {row["id"]: row["frames"] for row in stacks.tables()["stacks"].to_pylist()}
    named = [row["function"] for row in stacks.tables()["frames"].to_pylist()]
    assert "[Max depth]" not in named and any(named)
    assert all(depth[i] - 1 <= len(frames_of[chains[i]]) <= depth[i] for i in depth)  # a cut mark is no frame


def test_memory_usage_of_a_hand_made_export(tmp_path: Path) -> None:
    report = parse_nsys(leaky_export(tmp_path / "hand-made.sqlite", steps=3))
    events = rows(report, "mem_events")

    assert [(e["op"], e["kind"], e["size_bytes"]) for e in events] == [
        ("alloc", "device", 1 << 20), ("alloc", "device", 4 << 20), ("free", "device", 4 << 20),
    ] * 3  # fmt: skip
    first, used, freed = events[:3]
    assert first["ts_ns"] == SYSTEM_CLOCK_NS + 1_000_500
    assert stack_of(report, first["user_stack"]) == ["main", "handle", "cudaMalloc"]
    assert (first["api"], first["tid"], first["alloc_ts_ns"]) == ("cudaMalloc", TID, 0)
    # A free is of its allocation's site, made by its own thread and call.
    assert (freed["api"], freed["user_stack"]) == ("cudaMalloc", used["user_stack"])
    assert (freed["tid"], freed["alloc_ts_ns"]) == (OTHER_TID, used["ts_ns"])
    calls = {call["id"]: call for call in rows(report, "calls")}
    assert calls[freed["call_id"]]["api"] == "cudaFree" and calls[first["call_id"]]["api"] == "cudaMalloc"
    marks = {mark["id"]: mark["name"] for mark in rows(report, "marks")}
    assert {marks[e["mark_id"]] for e in events} == {"request"}
    assert report.facts["static_memory"] == {"device static": {"variables": 1, "bytes": 4096}}
    assert not any("broken" in finding for finding in report.findings)


def test_kinds_pools_and_addresses_that_come_back(tmp_path: Path) -> None:
    export = NsysFile()
    export.memory(10, ALLOC, 0xA, 100, kind=PINNED)
    export.memory(20, ALLOC, 0xB, 200, kind=MANAGED)
    export.memory(30, ALLOC, 0xC, 300, pool=(0xF00, 7, 4096, 300))
    export.memory(40, ALLOC, 0xA, 111, kind=PINNED)  # given out again, its free was not seen
    export.memory(50, FREE, 0xD, 400)  # older than the capture
    export.memory(60, ALLOC, 0xB, 201, kind=MANAGED, context=2)  # another context: another memory
    export.memory(70, FREE, 0xB, 200, kind=MANAGED)
    export.memory(80, ALLOC, 0xE, 500, kind=7)
    export.memory(90, ALLOC, 0xF, 600, pc=0x1234)
    report = parse_nsys(export.write(tmp_path / "kinds.sqlite"))

    base = SYSTEM_CLOCK_NS
    got = [
        (
            e["ts_ns"] - base,
            e["op"],
            e["cause"],
            e["layer"],
            e["kind"],
            e["size_bytes"],
            max(0, e["alloc_ts_ns"] - base),
        )
        for e in rows(report, "mem_events")
    ]
    assert got == [
        (10, "alloc", "call", "host", "pinned", 100, 0),
        (20, "alloc", "call", "gpu", "managed", 200, 0),
        (30, "alloc", "call", "gpu", "async", 300, 0),
        (40, "free", "reuse", "host", "pinned", 100, 10),
        (40, "alloc", "call", "host", "pinned", 111, 0),
        (50, "free", "call", "gpu", "device", 400, 0),
        (60, "alloc", "call", "gpu", "managed", 201, 0),
        (70, "free", "call", "gpu", "managed", 200, 20),
        (80, "alloc", "call", "gpu", "device", 500, 0),
        (90, "alloc", "call", "gpu", "device", 600, 0),
    ]
    samples = {s["counter"]: (s["ts_ns"] - base, s["scope_id"], s["value"]) for s in rows(report, "samples")}
    assert samples == {
        "gpu_pool_reserved": (30, "0", 4096.0), "gpu_pool_used": (30, "0", 300.0),
        "gpu_pool_release_threshold": (30, "0", 7.0),
    }  # fmt: skip
    last = rows(report, "mem_events")[-1]
    (frame,) = (f for f in rows(report, "frames") if f["offset"] == 0x1234)
    assert next(s["frames"] for s in rows(report, "stacks") if s["id"] == last["user_stack"]) == [frame["id"]]
    assert "1 addresses were handed out again although no deallocation was seen" in report.findings
    assert "1 deallocations of memory that was allocated before the capture" in report.findings
    assert "1 memory events of an unknown kind, taken for device memory" in report.findings


@pytest.mark.parametrize("how", ["one time", "no deallocation"])
def test_a_broken_capture_is_refused(tmp_path: Path, how: str) -> None:
    # given: the two ways in which captures have been seen to be broken
    export = NsysFile()
    for step in range(20):
        at = 1000 * step
        number = export.call(at, at + 10, "cudaMalloc_v3020")
        export.memory(0 if how == "one time" else at, ALLOC, 0x1000 * (step + 1), 512, correlation=number)
        export.call(at + 20, at + 30, "cudaFree_v3020")

    report = parse_nsys(export.write(tmp_path / "broken.sqlite"))

    assert "mem_events" not in report.tables
    assert any(f.startswith("a broken capture") and "nothing is a leak by them" in f for f in report.findings)


def test_all_kept_with_one_cudafree_is_no_broken_capture(tmp_path: Path) -> None:
    export = NsysFile()
    export.call(0, 5, "cudaFree_v3020")  # cudaFree(0), how programs create a context
    for step in range(20):
        export.memory(1000 * step, ALLOC, 0x1000 * (step + 1), 512)

    assert parse_nsys(export.write(tmp_path / "leak.sqlite")).tables["mem_events"].num_rows == 20


def test_static_memory_alone_is_no_event(tmp_path: Path) -> None:
    export = NsysFile()
    for variable in range(3):
        export.memory(0, ALLOC, 0x100 * variable, 64, kind=DEVICE_STATIC, context=0)

    report = parse_nsys(export.write(tmp_path / "static.sqlite"))

    assert "mem_events" not in report.tables and not any("broken" in f for f in report.findings)
    assert report.facts["static_memory"] == {"device static": {"variables": 3, "bytes": 192}}


def test_calls_nest_and_lose_their_version(tmp_path: Path) -> None:
    export = NsysFile()
    export.call(100, 200, "cudaMallocAsync_v11020_ptsz")
    export.call(110, 190, "cuMemAllocAsync_ptsz")
    export.call(150, 160, "cuCtxGetCurrent", tid=OTHER_TID)
    export.call(300, 310, "cuMemFree_v2", result=201)
    calls = rows(parse_nsys(export.write(tmp_path / "calls.sqlite")), "calls")

    assert [(c["api"], c["parent_id"], c["tid"], c["result"]) for c in calls] == [
        ("cudaMallocAsync", 0, TID, 0), ("cuMemAllocAsync", 1, TID, 0), ("cuCtxGetCurrent", 0, OTHER_TID, 0),
        ("cuMemFree", 0, TID, 201),
    ]  # fmt: skip
    assert (calls[0]["enter_ns"], calls[0]["exit_ns"]) == (SYSTEM_CLOCK_NS + 100, SYSTEM_CLOCK_NS + 200)


def test_correlation_ids_are_of_a_process(tmp_path: Path) -> None:
    # given: two processes that use the same correlation id
    export = NsysFile()
    for pid in (PID, 77):
        export.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=pid, end=pid + 9, globalTid=global_tid(pid, pid), correlationId=5,
            nameId=export.string("cudaLaunchKernel_v7000"), returnValue=0,
        )  # fmt: skip
        export.add(
            "CUPTI_ACTIVITY_KIND_KERNEL", start=9000 + pid, end=9100 + pid, correlationId=5, contextId=1, streamId=7,
            globalPid=global_tid(pid, 0), demangledName=export.string(f"kernel_of_{pid}"), gridX=pid, gridY=2, gridZ=3,
            blockX=4, blockY=5, blockZ=6,
        )  # fmt: skip
    launches = rows(parse_nsys(export.write(tmp_path / "two.sqlite")), "launches")

    assert [(la["kernel"], la["pid"], la["ts_ns"] - SYSTEM_CLOCK_NS, la["grid"]) for la in launches] == [
        ("kernel_of_77", 77, 77, [77, 2, 3]), (f"kernel_of_{PID}", PID, PID, [PID, 2, 3]),
    ]  # fmt: skip
    assert {(la["api"], la["stream"], tuple(la["block"])) for la in launches} == {("cudaLaunchKernel", 7, (4, 5, 6))}


def test_ranges_of_all_kinds(tmp_path: Path) -> None:
    export = NsysFile()
    thread, other = global_tid(), global_tid(tid=OTHER_TID)
    add = lambda **row: export.add("NVTX_EVENTS", **{"domainId": 0, "globalTid": thread, **row})  # noqa: E731
    add(start=-50, end=None, eventType=75, text="library", domainId=3)
    add(start=-10, end=100, eventType=59, text="outer")
    add(start=10, end=None, eventType=59, text="never closed")
    add(start=20, end=30, eventType=59, textId=export.string("inner"))
    add(start=20, end=25, eventType=59, text="elsewhere", domainId=3)
    add(start=22, end=90, eventType=60, text="across", globalTid=other)
    add(start=40, end=None, eventType=34, text="instant")
    export.call(23, 24, "cudaLaunchKernel_v7000")
    report = parse_nsys(export.write(tmp_path / "nvtx.sqlite"))
    marks = rows(report, "marks")

    base = SYSTEM_CLOCK_NS
    got = [
        (m["name"], m["domain"], m["parent_id"], m["start_ns"] - base, m["end_ns"] and m["end_ns"] - base)
        for m in marks
    ]
    assert got == [
        ("outer", "", 0, -10, 100),
        ("never closed", "", 1, 10, 0),
        ("inner", "", 2, 20, 30),
        ("elsewhere", "library", 0, 20, 25),
        ("across", "", 0, 22, 90),
        ("instant", "", 0, 40, 40),
    ]
    (launch,) = rows(report, "launches")
    assert launch["mark_id"] == 4  # of the ranges open at 23 the one that started last
    assert "1 NVTX ranges were never closed" in report.findings


def test_clocks(tmp_path: Path) -> None:
    export = NsysFile()
    export.call(5, 6, "cudaMalloc_v3020")
    path = export.write(tmp_path / "clock.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE TARGET_INFO_SESSION_START_TIME SET systemClockNs = NULL")
    utc = parse_nsys(path)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE TARGET_INFO_SESSION_START_TIME")
    relative = parse_nsys(path)

    assert (utc.clock, rows(utc, "calls")[0]["enter_ns"]) == ("utc", UTC_NS + 5)
    assert (relative.clock, rows(relative, "calls")[0]["enter_ns"]) == ("relative", 5)


def test_what_must_be_exported_or_fetched_first_is_said(tmp_path: Path) -> None:
    raw, pointer, other = tmp_path / "run.nsys-rep", tmp_path / "run.sqlite", tmp_path / "app.sqlite"
    raw.write_bytes(b"\x01\x02quadd")
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    sqlite3.connect(other).execute("CREATE TABLE users (name TEXT)").connection.commit()

    with pytest.raises(ReportError, match=r"nsys export --type sqlite -o run\.sqlite run\.nsys-rep"):
        parse_nsys(raw)
    with pytest.raises(ReportError, match="git lfs pull"):
        parse_nsys(pointer)
    with pytest.raises(ReportError, match="not an export of Nsight Systems"):
        parse_nsys(other)
    assert [recognise(path) for path in (raw, pointer, other)] == ["nsys", "nsys", "nsys"]


# Hostile files.


def test_hostile_secrets_of_the_target_are_never_read(tmp_path: Path) -> None:
    export = NsysFile()
    export.settings |= {"PROCESS_0:ENVIRONMENT_VARIABLE": "TOKEN=hf_secret", "PROCESS_0:COLLECT_CUDA_TRACE": "true"}
    export.string("AWS_SECRET=hf_secret")  # leftovers of the environment stand in StringIds
    export.call(1, 2, "cudaMalloc_v3020")
    export.extra_sql = "INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, '', 'DeviceEnvironment', 0, 'TOKEN=hf_secret')"
    report = parse_nsys(export.write(tmp_path / "secret.sqlite"))

    everything = str(report) + "".join(str(table.to_pylist()) for table in report.tables.values())
    assert "secret" not in everything and "somebody" not in everything
    assert rows(report, "processes")[0]["name"] == "server"


@pytest.mark.parametrize(
    "definition",
    [
        "CREATE VIEW CUPTI_ACTIVITY_KIND_RUNTIME AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL "
        "SELECT start + 1 FROM n) SELECT start, 0 AS end, 0 AS globalTid, 0 AS correlationId, 0 AS nameId FROM n",
        "CREATE VIEW CUPTI_ACTIVITY_KIND_RUNTIME AS SELECT length(value) AS start FROM TARGET_INFO_SYSTEM_ENV",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (globalTid INTEGER, start AS (length(hex(zeroblob(99999999)))))",
        "CREATE VIRTUAL TABLE CUPTI_ACTIVITY_KIND_RUNTIME USING fts5(start, end)",
    ],
    ids=["endless view", "view of secrets", "computed column", "virtual table"],
)
def test_hostile_tables_that_are_no_tables_are_not_read(tmp_path: Path, definition: str) -> None:
    export = NsysFile()
    export.extra_sql = definition
    report = parse_nsys(export.write(tmp_path / "hostile.sqlite"))

    assert "calls" not in report.tables
    assert any("are not read: CUPTI_ACTIVITY_KIND_RUNTIME" in finding for finding in report.findings)


def test_hostile_triggers_and_indices_change_nothing(tmp_path: Path) -> None:
    export = NsysFile()
    export.call(1, 2, "cudaMalloc_v3020")
    export.extra_sql = (
        "CREATE TRIGGER t AFTER INSERT ON StringIds BEGIN DELETE FROM StringIds; END;"
        "CREATE INDEX i ON StringIds (length(value));"
    )
    path = export.write(tmp_path / "trigger.sqlite")
    before = path.read_bytes()

    assert rows(parse_nsys(path), "calls")[0]["api"] == "cudaMalloc"
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["trigger.sqlite"]


def test_hostile_values_of_wrong_types(tmp_path: Path) -> None:
    export = NsysFile()
    export.call(1, 2, "cudaMalloc_v3020")
    path = export.write(tmp_path / "types.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = 'text', globalTid = x'00ff', nameId = 1e300")
        connection.execute("INSERT INTO StringIds VALUES (9, zeroblob(100))")
    (call,) = rows(parse_nsys(path), "calls")

    assert (call["enter_ns"], call["pid"], call["api"]) == (SYSTEM_CLOCK_NS, 0, "")


def test_hostile_huge_text_is_left_out(tmp_path: Path) -> None:
    export = NsysFile()
    export.call(1, 2, "a" * 5_000_000)
    export.call(3, 4, "b" * 5_000)
    report = parse_nsys(export.write(tmp_path / "huge.sqlite"))

    assert [len(c["api"]) for c in rows(report, "calls")] == [0, 4096]
    assert "1 texts of more than 4 MiB are left out" in report.findings


def test_hostile_cut_file_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = leaky_export(tmp_path / "whole.sqlite").read_bytes()
    cut = tmp_path / "cut.sqlite"
    for size in (16, 100, 4096, len(whole) // 2, len(whole) - 4096):
        cut.write_bytes(whole[:size])
        with pytest.raises(ReportError) as refused:
            parse_nsys(cut)
        assert "\n" not in str(refused.value) and str(cut) in str(refused.value)

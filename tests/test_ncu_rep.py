"""Nsight Compute reports: real files by what is known about each, hand-made ones for what no public file shows."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import ncu_files as made
import pyarrow as pa
import pytest

from leakscope.model.tables import TABLES
from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.ncu_container import Walk, walk_blocks
from nsight_parsers.ncu_rep import parse_ncu_rep
from nsight_parsers.ncu_report_backend import is_available, parse_with_ncu_report
from nsight_parsers.recognise import parse, recognise
from nsight_parsers.wire import messages, texts

DATA = "LEAKSCOPE_TEST_DATA"

REAL: dict[str, dict[str, Any]] = {
    "ncu-2020.3.0_mistic-susynode": {
        "version": "2020.3.0.0", "pids": [253227], "tids": [253227], "kernels": ["nodeByPoint5"], "streams": [22],
        "devices": [1], "writable": [21001573427], "metrics": 680, "order": "refused", "stacks": 0,
    },
    "ncu-2020.3.1_speedy-scan": {
        "version": "2020.3.1.0", "pids": [2063114], "kernels": ["kernel"], "streams": [7], "writable": [88545208],
        "order": "refused",
    },
    "ncu-2021.2.2_mistic-two-threads": {
        "version": "2021.2.2.0", "pids": [1271307], "tids": [1271307, 1271309, 1271307, 1271309],
        "streams": [15, 16, 15, 16], "api": [900, 905, 1050, 1054],
        "created": [1657742765, 1657742765 + 88, 1657742765 + 174, 1657742765 + 206],
        "writable": [17142070256, 17142070256, 18057704124, 18057704124], "steps": [0, 915633868, 0],
        "shape": "one step", "order": "refused",
    },
    "ncu-2022.1.1_indexspaces-julia": {
        "version": "2022.1.1.0", "pids": [69163], "streams": [13, 13], "writable": [1719665220] * 2, "shape": "flat",
        "order": "refused",
    },
    "ncu-2022.2.0_ncar-miniweather-launchskip": {
        "version": "2022.2.0.0", "pids": [34005], "first_api": 1616, "actions": 5, "order": "shifted", "skip": 29,
        "limit": 5, "program": "mpiexec",
    },
    "ncu-2022.4.0_mojo-divergence": {
        "version": "2022.4.0.0", "pids": [45625], "kernels": ["warmingUp", "mathKernel1", "mathKernel2", "mathKernel3"],
        "writable": [8389200] * 4, "shape": "flat", "order": "usable",
    },
    "ncu-2022.4.0_mistic-two-threads-growth": {
        "version": "2022.4.0.0", "pids": [2099727], "tids": [2099740, 2099727, 2099727, 2099740],
        "streams": [31, 30, 30, 31], "gaps": [459, 875, 375], "steps": [0, 4265688, 0],
        "writable": [16404903464, 16404903464, 16409169152, 16409169152], "order": "needs_kernel_filter",
        "kernel_filter": "nodeByPoint5",
    },
    "ncu-2023.1.1_esmm-six-kernels": {
        "version": "2023.1.1.0", "pids": [4215], "actions": 6, "distinct_kernels": 6, "shape": "flat",
        "order": "usable",
    },
    "ncu-2023.1.1_esmm-growth": {
        "version": "2023.1.1.0", "pids": [22965], "api": [521, 526, 531, 1600, 1604],
        "writable": [209716269] * 3 + [218237117] * 2, "steps": [0, 0, 8520848, 0], "shape": "one step",
        "order": "usable",
    },
    "ncu-2023.3.0_sglang-podattn-growth": {
        "version": "2023.3.0.0", "pids": [406854], "steps": [2097152, 20971520, 20971520, 33], "shape": "rising",
        "first_writable": 29578585, "ranges": [[]] * 5, "order": "usable", "zone_hint_s": 28800,
    },
    "ncu-2024.1.1_cutlass-nvtx-callstack": {
        "version": "2024.1.1.0", "pids": [306999], "tids": [306999] * 2, "ranges": [["NCUTEST"]] * 2,
        "streams": [1013, 7], "api": [3672, 35673], "depths": [8, 7], "order": "needs_nvtx_range",
        "epoch": "arbitrary",
    },
    "ncu-2024.1.1_cutlass-nvtx-callstack-three": {
        "version": "2024.1.1.0", "pids": [63122], "ranges": [["Fused-GEMM"], ["Non-fused-GEMM"], ["Non-fused-GEMM"]],
        "depths": [10, 9, 9], "writable": [20777170, 17237074, 17237074], "steps": [-3540096, 0], "shape": "falling",
        "order": "needs_nvtx_range", "epoch": "arbitrary",
    },
    "ncu-2024.3.2_hyperspec-python": {
        "version": "2024.3.2.0", "pids": [64], "kernels": ["hd_enc_lvid_packed_cuda"] * 8,
        "writable": [42653044] * 7 + [41123908], "order": "needs_kernel_filter", "kernel_filter": "regex:cuda",
    },
    "ncu-2025.2.1_nukexc": {
        "version": "2025.2.1.0", "pids": [1713165], "streams": [13], "actions": 1, "order": "needs_kernel_filter",
        "kernel_filter": "regex:[Bb]enchmark", "has_metric": "launch__stack_size",
    },
}  # fmt: skip
"""What the origin of each file and an independent reading of it establish."""


ALLOWED = {"Fused-GEMM", "Non-fused-GEMM", "NCUTEST"}
"""Words with a slash that are launch filters."""


def data_file(folder: str, name: str) -> Path:
    root = os.environ.get(DATA)
    if not root:
        pytest.skip(f"NOT TESTED: {DATA} names no folder of real reports")
    return Path(root) / folder / name


def column(report: ParsedReport, name: str) -> list[Any]:
    return report.tables["kernel_profiles"].column(name).to_pylist()


def write(folder: Path, content: bytes, name: str = "made.ncu-rep") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", sorted(REAL))
def test_what_is_known_about_a_real_report_is_read(name: str) -> None:
    known = REAL[name]
    path = data_file("ncu_rep", f"{name}.ncu-rep")

    report = parse(path)

    assert (report.kind, report.tool, report.version) == ("ncu_rep", "Nsight Compute", known["version"])
    assert report.facts["pids"] == known["pids"]
    assert column(report, "pid") == known["pids"] * len(column(report, "pid"))
    assert report.facts["launch_order"]["status"] == known["order"]
    columns = {
        "tids": "tid", "streams": "stream", "api": "api_call_id", "created": "created_s", "devices": "device",
        "writable": "writable_bytes", "ranges": "ranges",
    }  # fmt: skip
    for key, of_table in columns.items():
        if key in known:
            assert column(report, of_table) == known[key], key
    names = [mangled_or_plain.split("(")[0] for mangled_or_plain in column(report, "kernel")]
    ids = column(report, "api_call_id")
    assert ids == sorted(set(ids))
    assert column(report, "context") == [1] * len(names)
    (growth,) = report.facts["growth"]
    order = report.facts["launch_order"]
    filters = report.facts["launch_filters"]
    clock = report.facts.get("gpu_clock", {})
    actual = {
        "kernels": names,
        "actions": len(names),
        "distinct_kernels": len(set(names)),
        "first_api": ids[0],
        "first_writable": column(report, "writable_bytes")[0],
        "gaps": [
            after - before for before, after in zip(*[column(report, "created_s")[i:] for i in (0, 1)], strict=False)
        ],
        "steps": list(growth["step_bytes"]),
        "shape": growth["shape"],
        "skip": order["skip_launches"],
        "limit": order["limit"],
        "kernel_filter": order["kernel"],
        "program": filters and filters["program"],
        "zone_hint_s": clock.get("zone_hint_s"),
        "epoch": clock.get("epoch"),
        "metrics": report.tables["kernel_metrics"].num_rows,
        "stacks": report.tables["stacks"].num_rows if "stacks" in report.tables else 0,
    }
    for key, value in actual.items():
        if key in known:
            assert value == known[key], key
    if "has_metric" in known:
        assert known["has_metric"] in report.tables["kernel_metrics"].column("metric").to_pylist()
    assert not [f for f in report.findings if "truncated" in f or "damaged" in f or "not read" in f]


@pytest.mark.parametrize("name", [n for n in sorted(REAL) if "depths" in REAL[n]])
def test_call_stacks_are_outermost_first_and_reach_the_launch(name: str) -> None:
    report = parse_ncu_rep(data_file("ncu_rep", f"{name}.ncu-rep"))

    stacks = dict(zip(*[report.tables["stacks"].column(c).to_pylist() for c in ("id", "frames")], strict=True))
    frames = {row["id"]: row for row in report.tables["frames"].to_pylist()}
    of_actions = [[frames[f] for f in stacks[stack]] for stack in column(report, "user_stack")]

    assert [len(stack) for stack in of_actions] == REAL[name]["depths"]
    assert {stack[0]["function"] for stack in of_actions} == {"_start"}
    assert all("cudaLaunchKernel" in [frame["function"] for frame in stack[-2:]] for stack in of_actions)
    assert all(frame["offset"] > 1 << 40 and frame["kind"] == "native" for stack in of_actions for frame in stack)


def test_every_action_has_its_duration_and_grid_in_the_metrics_too() -> None:
    report = parse_ncu_rep(data_file("ncu_rep", "ncu-2022.4.0_mojo-divergence.ncu-rep"))

    rows = report.tables["kernel_metrics"].to_pylist()
    durations = [(r["profile_id"], r["value"], r["unit"]) for r in rows if r["metric"] == "gpu__time_duration.sum"]
    grids = [r["value"] for r in rows if r["metric"] == "launch__grid_dim_x"]
    text = next(r for r in rows if r["metric"] == "launch__func_cache_config")

    assert durations == [(1, 1600.0, "ns"), (2, 1472.0, "ns"), (3, 1568.0, "ns"), (4, 1504.0, "ns")]
    assert grids == [grid[0] for grid in column(report, "grid")]
    assert text["text"] == "CachePreferNone" and text["value"] != text["value"]
    assert {r["section"] for r in rows if r["metric"] == "launch__grid_size"} == {"Launch Statistics"}


def test_the_legacy_report_says_what_it_lacks() -> None:
    report = parse(data_file("ncu_rep", "ncu-legacy_darknet.nsight-cuprof-report"))

    assert [kernel.split("(")[0] for kernel in column(report, "kernel")] == ["fill_kernel"] * 7
    assert column(report, "pid") == [0] * 7 and "processes" not in report.tables
    assert all(value != value for value in column(report, "writable_bytes"))
    assert "the report names no process: its kernels cannot be joined by PID" in report.findings
    assert any("known at 0 of 7 launches" in finding for finding in report.findings)


def private_words(path: Path) -> set[str]:
    """Computer name, addresses, paths and the command line's words, as the container stores them."""
    words: set[str] = set()
    for block in walk_blocks(path, Walk()):
        words |= {path.rpartition("/")[0] for path in texts(block.process, 3)}
        for line in texts(block.session, 11):
            words |= {word for word in line.split() if "/" in word or word.startswith("--")}
        for system in messages(block.session, 4):
            words |= {*texts(system, 2), *texts(system, 3), *texts(system, 5)}
            words |= {text for address in messages(system, 7) for text in texts(address, 1)}
    return {word.rstrip("/") for word in words if len(word) > 2} - ALLOWED


@pytest.mark.parametrize("name", sorted(REAL))
def test_nothing_private_of_a_real_report_is_kept(name: str) -> None:
    path = data_file("ncu_rep", f"{name}.ncu-rep")

    report = parse_ncu_rep(path)

    kept = json.dumps([report.facts, report.tables["processes"].to_pylist()])
    assert len(private_words(path)) >= 3
    assert not [word for word in private_words(path) if word in kept]


def test_tables_have_the_schemas_of_a_capture() -> None:
    report = parse_ncu_rep(data_file("ncu_rep", "ncu-2024.1.1_cutlass-nvtx-callstack.ncu-rep"))

    assert set(report.tables) == {"kernel_profiles", "kernel_metrics", "processes", "stacks", "frames"}
    for name, table in report.tables.items():
        assert table.schema == TABLES[name], name


def test_a_report_cut_short_gives_what_was_whole(tmp_path: Path) -> None:
    content = data_file("ncu_rep", "ncu-2022.4.0_mojo-divergence.ncu-rep").read_bytes()
    path = write(tmp_path, content[: len(content) * 6 // 10])

    report = parse(path)

    assert column(report, "kernel") == ["warmingUp(float *)"]
    assert f"truncated at byte {len(content) * 6 // 10}: 1 of at least 2 results are whole, the rest is lost" in (
        report.findings
    )


def test_a_compressed_report_reads_as_the_plain_one(tmp_path: Path) -> None:
    content = data_file("ncu_rep", "ncu-2022.4.0_mojo-divergence.ncu-rep").read_bytes()
    plain = write(tmp_path, content)
    packed = write(tmp_path, pa.compress(content, codec="zstd", asbytes=True), "made.ncu-repz")

    assert recognise(packed) == "ncu_rep"
    rows = [{n: repr(t.to_pylist()) for n, t in parse_ncu_rep(path).tables.items()} for path in (packed, plain)]
    assert rows[0] == rows[1] and len(rows[0]) == 3


def test_a_compressed_report_cut_short_gives_what_was_whole(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(600_000)
    block, last = made.block(results=[made.result("k")]), made.block(sources=[noise], results=[made.result("l", api=2)])
    packed = pa.compress(made.report(block, last), codec="zstd", asbytes=True)
    path = write(tmp_path, packed[:-1000], "made.ncu-repz")

    report = parse(path)

    assert column(report, "kernel") == ["k()"]
    (finding,) = [f for f in report.findings if "the rest is lost" in f]
    assert finding.startswith("unpacking failed at byte ") and "1 of at least 2 results are whole" in finding


def test_a_large_compressed_report_is_recognised_by_its_beginning(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(300_000)
    content = made.report(made.block(sources=[noise]), made.block(results=[made.result("k")]))
    packed = write(tmp_path, pa.compress(content, codec="zstd", asbytes=True), "made.ncu-repz")

    assert packed.stat().st_size > 256 << 10 and recognise(packed) == "ncu_rep"
    assert column(parse(packed), "kernel") == ["k()"]


def test_hand_made_report_of_two_processes_with_python_frames(tmp_path: Path) -> None:
    # Given two processes whose names end like Windows paths do, NVTX domains, and a stack with Python frames.
    stack = made.frame("libcudart.so.12", 0x7F01, "", "cudaLaunchKernel") + made.frame("app", 0x5501, "", "run")
    stack += made.frame("", 0, "/srv/app/serve.py", "step", 41) + made.frame("", 0, "/srv/app/main.py", "main", 7)
    ranges = made.nvtx(12, ["request", "decode"], "server")
    first = made.result("alpha", tid=12, api=5, metrics=[made.metric(0, 1048576.0)], nvtx=ranges, stack=stack)
    second = made.result("beta", tid=99, api=3, metrics=[made.metric(0, 2097152)], context=2)
    third = made.result("alpha", tid=12, api=9, metrics=[made.metric(0, 3145728.0), made.metric(1, 2**60)])
    one, two = made.process(12, "C:\\tools\\python.exe\0"), made.process(99, "/usr/bin/worker")
    path = write(
        tmp_path,
        made.report(
            made.block(session=made.tool_session("2026.9.0.0")),
            made.block(session=made.command_session("/opt/ncu -f -o out python.exe serve.py --token hf_secret")),
            made.block(results=[first], strings=[made.ACCESSIBLE, "huge"], program=one),
            made.block(results=[second], program=two),
            made.block(results=[third], program=one),
        ),
    )

    report = parse(path)

    # Then each launch belongs to its process, thread and context, and Python frames are stacks of their own.
    assert report.version == "2026.9.0.0" and report.facts["pids"] == [12, 99]
    assert list(zip(*[column(report, c) for c in ("pid", "tid", "context")], strict=True)) == [
        (12, 12, 1), (99, 99, 2), (12, 12, 1),
    ]  # fmt: skip
    assert column(report, "ranges") == [["server@request", "server@decode"], [], []]
    assert report.tables["processes"].select(["pid", "name"]).to_pylist() == [
        {"pid": 12, "name": "python.exe"}, {"pid": 99, "name": "worker"},
    ]  # fmt: skip
    assert column(report, "user_stack") == [1, 0, 0] and column(report, "python_stack") == [2, 0, 0]
    frames = [(r["function"], r["file"], r["line"], r["kind"]) for r in report.tables["frames"].to_pylist()]
    assert frames == [
        ("run", "", 0, "native"), ("cudaLaunchKernel", "", 0, "native"),
        ("main", "/srv/app/main.py", 7, "python"), ("step", "/srv/app/serve.py", 41, "python"),
    ]  # fmt: skip
    assert [one["step_bytes"] for one in report.facts["growth"]] == [(2097152,), ()]
    assert report.tables["kernel_metrics"].to_pylist()[-1]["text"] == str(2**60)
    assert report.facts["launch_order"]["status"] == "usable"
    assert "hf_secret" not in json.dumps(report.facts)


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        (made.report(made.block()), "the report holds no kernel result: nothing was profiled"),
        (made.report(made.block(extra=made.number(8, 3))), "the report holds no kernel result: none of a known kind"),
        (
            made.report(made.block(extra=made.number(8, 3))),
            "not read: results of an unknown kind (block header field 8) (3 times)",
        ),
        (made.report(made.block(others=[b"\x08\x01"])), "not read: messages of an unknown kind (1 times)"),
        (made.report(made.block(), version=8), "file version 8 is not known to this reader"),
        (made.report(made.block(results=[b"\xff"])), "1 damaged results were left out"),
        (made.report(made.block(), b"\0\0\0\0"), "damaged at byte "),
        (made.report(made.block(), b"\x07\0"), "truncated at byte "),
        (made.block(session=made.tool_session("2021.1.0.0")), "the file does not start with NVR: an unfinished report"),
        (
            made.report(made.block(results=[made.result("k", metrics=[made.metric(5, 1.0)])])),
            "1 metrics have no name in the report's string table and were left out",
        ),
        (
            made.report(made.block(results=[made.result("k", extra=made.number(77, 1))])),
            "not read: result field 77 (1 times)",
        ),
    ],
)
def test_what_a_report_lacks_is_said(tmp_path: Path, content: bytes, finding: str) -> None:
    path = write(tmp_path, content)

    report = parse(path)

    assert [f for f in report.findings if f.startswith(finding)], report.findings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: ncu or the program was stopped"),
        (b"hello, world\n" * 40, "is no Nsight Compute report"),
        (b"NVR\0", "no whole Nsight Compute report: truncated at byte 4"),
        (b"NVR\0\x02\0\0\0\xff\xff", "no whole Nsight Compute report"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path, content)

    with pytest.raises(ReportError, match=message) as caught:
        parse_ncu_rep(path)

    assert "\n" not in str(caught.value)


def test_directories_pipes_and_missing_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    for name, message in (("", "no regular file"), ("pipe", "no regular file"), ("none", "No such file")):
        with pytest.raises(ReportError, match=message):
            parse(tmp_path / name)


def test_api_call_ids_that_fall_refuse_the_launch_order(tmp_path: Path) -> None:
    results = [made.result("k", api=9), made.result("k", api=8)]
    session = made.command_session("ncu ./app")
    path = write(tmp_path, made.report(made.block(session=session), made.block(results=results)))

    assert "do not rise" in parse_ncu_rep(path).facts["launch_order"]["reason"]


@pytest.mark.parametrize("name", sorted(REAL))
def test_nvidias_package_reads_the_same(name: str) -> None:
    if os.environ.get("LEAKSCOPE_TEST_NCU_REPORT") != "1" or not is_available():
        pytest.skip("NOT TESTED: against ncu_report; install it on a GPU host and set LEAKSCOPE_TEST_NCU_REPORT=1")
    path = data_file("ncu_rep", f"{name}.ncu-rep")

    ours, theirs = parse_ncu_rep(path), parse_with_ncu_report(path)

    for same in ("kernel", "mangled", "grid", "block", "context", "stream", "device", "ranges", "writable_bytes"):
        assert column(ours, same) == column(theirs, same), same
    wanted = {
        (r["profile_id"], r["metric"]): (r["value"], r["text"]) for r in ours.tables["kernel_metrics"].to_pylist()
    }
    given = {
        (r["profile_id"], r["metric"]): (r["value"], r["text"]) for r in theirs.tables["kernel_metrics"].to_pylist()
    }
    assert {key for key in given if key not in wanted} == set()
    assert [key for key in wanted if key in given and repr(wanted[key]) != repr(given[key])] == []


def test_recognising_a_file_imports_no_parser(tmp_path: Path) -> None:
    path = write(tmp_path, made.report())
    code = "import sys; from nsight_parsers.recognise import recognise; print(recognise(sys.argv[1]))"
    code += "; print([m for m in sys.modules if m.startswith(('nsight_parsers.ncu', 'pyarrow', 'leakscope'))])"

    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)

    assert done.stdout == "ncu_rep\n[]\n"

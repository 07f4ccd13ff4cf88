"""NVTX ranges: the injection library by itself, and as recorded from C and Python, exact by range and byte."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest
from recording import BIN, LEAKSCOPE, PAGE, ROOT, Recorder, Recording, record, sample, waiting

import bpf_programs
from leakscope.correlate.aggregate import ALLOC, CALL, EXIT, IDENTITY
from leakscope.correlate.lives import FOLDED_PID
from leakscope.correlate.marks import MIN_SHARE, RULE, RangePath, range_links, site_ranges
from leakscope.model.results import ChainLink
from leakscope.record import records
from leakscope.record.decode.marks import Marks, mark_ids
from leakscope.record.probes.nvtx import VARIABLE, command_environment, is_injected, is_injection_library
from leakscope.report.terminal import _name, _shortened

SOURCES = bpf_programs.DIRECTORY / "nvtx"
HOST = ROOT / "tests" / "nvtx_host.c"
TARGET = ROOT / "tests" / "nvtx_target.py"
LIBRARIES = [word for name in ("libcudart.so.12", "libcuda.so.1") for word in ("--library", BIN / name)]
FLAGS = ["-std=gnu17", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
recorded = pytest.mark.usefixtures("bpf", "library")

NAMED = "mem_events e LEFT JOIN marks m ON m.id = e.mark_id LEFT JOIN marks o ON o.id = m.parent_id"


@pytest.fixture(scope="module")
def library() -> Path:
    """The injection library, built from the sources as they are."""
    done = subprocess.run(["make", "-C", str(SOURCES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return bpf_programs.NVTX_LIBRARY


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C program with NVTX inside."""
    program = tmp_path_factory.mktemp("nvtx") / "nvtx_host"
    subprocess.run(["gcc", *FLAGS, "-O1", "-o", program, HOST, "-ldl"], check=True)
    return program


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )


# The library by itself


def test_levels_and_errors_are_those_of_nvtx(library: Path, host: Path) -> None:
    # the host compares what each push and pop returns
    done = run(host, "scenario", **{VARIABLE: str(library)})
    assert (done.returncode, done.stderr) == (0, "")
    assert run(host, "scenario").returncode == 3  # no library, no ranges: the host tells them apart


def test_what_no_application_should_do_does_no_harm(library: Path, host: Path) -> None:
    done = run(host, "abuse", **{VARIABLE: str(library)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "survived\n", "")


@pytest.mark.parametrize("mode", ["scenario", "abuse"])
def test_sanitizers_find_nothing(tmp_path: Path, mode: str) -> None:
    program = tmp_path / "sanitized"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-DLINKED_IN", "-O1"]
    built = subprocess.run(
        ["gcc", *FLAGS, *sanitizers, "-o", program, HOST, SOURCES / "injection.c", "-ldl"],
        capture_output=True,
        text=True,
    )
    if "asan" in built.stderr or "ubsan" in built.stderr:
        pytest.skip(f"NOT TESTED: no sanitizers here: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    done = run(program, mode)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_library_loads_into_old_systems_and_pulls_nothing_in(library: Path) -> None:
    symbols = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", symbols)]
    assert versions and max(versions) <= (2, 17)
    needed = subprocess.run(["objdump", "-p", library], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED\s+(\S+)", needed)) <= {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def test_what_carries_probes_begins_with_an_instruction_that_is_not_single_stepped(library: Path) -> None:
    code = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True).stdout
    first = dict(re.findall(r"<(leakscope_nvtx_\w+)>:\n\s+\S+:\s+(\S+)", code))
    assert len(first) == 6 and set(first.values()) == {"nop"}


# A command's environment


def test_a_command_gets_the_library_unless_somebody_chose_another(library: Path) -> None:
    assert command_environment({"A": "b"}, True) == ({"A": "b", VARIABLE: str(library)}, "")
    assert command_environment({"A": "b"}, False) == ({"A": "b"}, "")
    copy = {VARIABLE: f"/container/{library.name}"}
    assert command_environment(copy, True) == (copy, "")
    other = {VARIABLE: "/opt/nvidia/libToolsInjection64.so"}
    environment, why = command_environment(other, True)
    assert environment == other and "/opt/nvidia/libToolsInjection64.so already" in why


def test_a_process_is_known_by_its_maps_or_its_variable(library: Path, tmp_path: Path) -> None:
    texts = {
        1: ("", b"A=b\0" + VARIABLE.encode() + b"=" + os.fsencode(library) + b"\0"),
        2: (f"7f r-xp {library}\n", b""),
    }
    texts |= {3: ("7f r-xp /lib/libc.so.6\n", VARIABLE.encode() + b"=/opt/other.so\0"), 4: ("", b"A=b")}
    for pid, (maps, environ) in texts.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "maps").write_text(maps)
        (tmp_path / str(pid) / "environ").write_bytes(environ)
    assert [is_injected(pid, tmp_path) for pid in (1, 2, 3, 4, 5)] == [True, True, False, False, False]
    assert not is_injection_library(f"/tmp/not-{library.name}")


# Recorded from C

DEEP = "deep"
EXPECTED_MARKS = Counter(
    [  # thread, domain, name, enclosing range, whether it ended
        ("main", "", "outer", None, True),
        ("main", "", "ещё 🜚", "outer", True),
        ("main", "serving", "registered", "ещё 🜚", True),
        ("main", "serving", "inner", "registered", True),
        ("main", "", "across threads", None, True),
        ("main", "", "a mark", "inner", True),
        ("main", "", "n" * 96, "outer", True),
        ("main", "", "c" * 95 + "…", "outer", True),  # cut within a character
        ("main", "", "", "outer", True),
        ("main", "", DEEP, None, True),
        ("main", "", "never closed", None, False),
        ("worker", "", "worker", None, True),
        ("worker", "", "left open by a thread", None, False),
        ("child", "кэш", "größe 🜚", None, True),
    ]
) + Counter({("main", "", DEEP, DEEP, True): 63})  # fmt: skip
EXPECTED_PAGES = {
    1000: "outer", 1001: "ещё 🜚", 1002: "registered", 1003: "inner", 1004: None, 1005: "worker", 1006: None,
    1007: "left open by a thread", 1008: None, 1009: "größe 🜚", 1010: "outer", 1011: DEEP, 1012: None,
    1013: "never closed",
}  # fmt: skip
"""Pages of a mapping → the range that it was made in."""


def assert_scenario(recording: Recording, before: int = 0) -> None:
    """The marks and mark ids are those of nvtx_host's scenario; `before` ranges were open when the recording began."""
    rows = recording.rows(
        """SELECT CASE WHEN m.tid = p.root THEN 'main' WHEN m.pid = p.root THEN 'worker' ELSE 'child' END,
                  m.domain, m.name, o.name, m.end_ns > 0
           FROM marks m LEFT JOIN marks o ON o.id = m.parent_id
                CROSS JOIN (SELECT min(pid) AS root FROM marks) p"""
    )
    assert Counter(rows) == EXPECTED_MARKS
    total, distinct, wrong = recording.rows(
        "SELECT count(*), count(DISTINCT id), sum((end_ns > 0 AND end_ns < start_ns)::INT) FROM marks"
    )[0]
    assert (total, distinct, wrong) == (EXPECTED_MARKS.total(), EXPECTED_MARKS.total(), 0)
    # a range of one domain may end before those of another inside it; a mark has no length
    ends = dict(
        recording.rows("SELECT name, end_ns FROM marks WHERE name IN ('ещё 🜚', 'inner', 'registered', 'outer')")
    )
    assert ends["ещё 🜚"] < ends["inner"] < ends["registered"] < ends["outer"]
    assert recording.rows("SELECT end_ns - start_ns FROM marks WHERE name = 'a mark'") == [(0,)]
    # allocations carry the innermost range of their thread, frees that of their allocation
    made = recording.rows(
        f"SELECT requested_bytes // {PAGE}, m.name FROM {NAMED} WHERE e.api = 'mmap' AND op = 'alloc'"
        f" AND requested_bytes // {PAGE} BETWEEN 1000 AND 1099"
    )
    assert dict(made) == EXPECTED_PAGES and len(made) == len(EXPECTED_PAGES)
    freed = recording.rows(
        f"SELECT m.name FROM {NAMED} WHERE op = 'free' AND cause = 'call' AND size_bytes = 1002 * {PAGE}"
    )
    assert freed == [("registered",)]
    ended = recording.rows(f"SELECT size_bytes // {PAGE}, m.name FROM {NAMED} WHERE op = 'free' AND cause = 'exit'")
    kept = {pages: name for pages, name in EXPECTED_PAGES.items() if pages != 1002}
    assert {pages: name for pages, name in ended if pages in EXPECTED_PAGES} == kept
    # what was not followed is counted
    lost = dict(recording.rows("SELECT probe, sum(count)::BIGINT FROM losses WHERE what = 'mark_lost' GROUP BY probe"))
    assert lost == {"injection library": 6} | ({"NVTX ranges": before} if before else {})


@recorded
@pytest.mark.parametrize("loader", ["bcc", "core"])
def test_ranges_of_a_command_are_exact(host: Path, core: None, tmp_path: Path, loader: str) -> None:
    recording = record(tmp_path / "c.lscope", [str(host), "scenario"], "--loader", loader)
    assert recording.code == 0, recording.stderr
    assert recording.capture.manifest.sources[0].exit_status == 0
    assert_scenario(recording)
    assert recording.capture.manifest.sources[0].limits == []


@recorded
def test_ranges_through_perf_events_are_the_same(host: Path, core: None, tmp_path: Path) -> None:
    command = [str(host), "scenario"]
    recording = record(tmp_path / "c.lscope", command, "--loader", "core", env={"LEAKSCOPE_UPROBES": "perf"})
    assert recording.code == 0, recording.stderr
    assert_scenario(recording)


@recorded
def test_a_process_that_was_started_with_the_library_is_recorded(host: Path, library: Path, tmp_path: Path) -> None:
    # given a process that runs with the library, inside a range
    with subprocess.Popen(
        [host, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, VARIABLE: str(library)},
    ) as target:  # fmt: skip
        assert target.stdin and target.stdout and target.stdout.readline() == "ready\n"
        with Recorder(tmp_path / "p.lscope", "-p", target.pid) as recorder:
            recorder.wait_ready()
            # when it goes on while recorded
            target.stdin.write("\n")
            target.stdin.flush()
            recording = recorder.result()
    assert recording.code == 0, recording.stderr
    # then its ranges are there, and the one that began before is counted
    assert_scenario(recording, before=1)
    assert recording.capture.manifest.sources[0].limits == []


@recorded
def test_a_process_without_the_library_is_told(library: Path, tmp_path: Path) -> None:
    with waiting("leak_eventfd", "--count", 3) as target, Recorder(tmp_path / "p.lscope", "-p", target.pid) as recorder:
        recorder.wait_ready()
        target.go()
        recording = recorder.stop()
    note = f"NVTX ranges of process {target.pid} are not available: it was not started with {VARIABLE}={library}"
    assert f"leakscope: {note}\n" in recording.stderr
    assert recording.capture.manifest.sources[0].limits == [note]
    assert recording.rows("SELECT count(*), count(*) FILTER (mark_id <> 0) FROM mem_events")[0][1] == 0
    assert not any("nvtx" in probe for probe in recording.capture.manifest.sources[0].probes)


@recorded
@pytest.mark.parametrize(
    ("options", "chosen", "seen"),
    [([], None, str(bpf_programs.NVTX_LIBRARY)), (["--no-nvtx"], None, ""), ([], "/opt/other.so", "/opt/other.so")],
)
def test_the_variable_of_a_command(
    core: None, tmp_path: Path, options: list[str], chosen: str | None, seen: str
) -> None:
    script = ["/bin/sh", "-c", f'printf %s "${VARIABLE}"']
    recording = record(
        tmp_path / "v.lscope", script, "--loader", "core", *options, env={VARIABLE: chosen} if chosen else None
    )
    assert (recording.code, recording.stdout) == (0, seen)
    limits = recording.capture.manifest.sources[0].limits
    assert [("set to /opt/other.so already" in limit) for limit in limits] == ([True] if chosen else [])
    assert all(limit in recording.stderr for limit in limits)


@recorded
def test_ids_stay_distinct_when_programs_replace_each_other(host: Path, tmp_path: Path) -> None:
    # given three programs in one process, one after another, each with ranges that it left open
    again = f'exec "{host}" scenario'
    script = f"{host} abuse; {host} scenario; {again}"
    recording = record(tmp_path / "exec.lscope", ["/bin/sh", "-c", script])
    assert recording.code == 0, recording.stderr
    total, distinct, names = recording.rows(
        "SELECT count(*), count(DISTINCT id), count(*) FILTER (name = 'never closed') FROM marks"
    )[0]
    assert total == distinct and names == 2
    # then what the next program allocates before its first range carries none
    early = "e.mark_id <> 0 AND e.op = 'alloc' AND (m.id IS NULL OR e.ts_ns < m.start_ns)"
    assert recording.rows(f"SELECT count(*) FROM {NAMED} WHERE {early}") == [(0,)]


# Recorded from Python


def in_range(recording: Recording, layer: str, op: str = "alloc") -> dict[tuple[Any, ...], tuple[int, int]]:
    """(events, bytes) by enclosing range and range of a layer's events."""
    rows = recording.rows(
        f"SELECT o.name, m.name, count(*), sum(size_bytes)::BIGINT FROM {NAMED} WHERE e.layer = ? AND op = ?"
        " AND cause = 'call' GROUP BY ALL",
        layer, op,
    )  # fmt: skip
    return {(outer, name): (count, size) for outer, name, count, size in rows}


@recorded
@pytest.mark.parametrize("loader", ["bcc", "core"])
def test_allocations_and_launches_of_python_carry_their_ranges(core: None, tmp_path: Path, loader: str) -> None:
    command = [sample("x.py")[0], str(TARGET), str(BIN / "libcudart.so.12")]
    recording = record(tmp_path / "t.lscope", command, "--launches", "--loader", loader, *LIBRARIES)
    assert recording.code == 0, recording.stderr
    device = {key: count for key, (count, _) in in_range(recording, "gpu").items()}
    assert device == {(None, "step"): 12, ("step", "forward"): 20, (None, "worker"): 11, (None, None): 13}
    launches = recording.rows(
        """SELECT o.name, m.name, count(*) FROM launches l LEFT JOIN marks m ON m.id = l.mark_id
           LEFT JOIN marks o ON o.id = m.parent_id WHERE l.parent_id = 0 GROUP BY ALL"""
    )
    assert {(outer, name): count for outer, name, count in launches} == {
        (None, None): 1, ("step", "forward"): 28, (None, "step"): 8,
    }  # fmt: skip
    marks = recording.rows(
        """SELECT m.domain, m.name, o.name, count(*), count(DISTINCT m.tid) FROM marks m LEFT JOIN marks o
           ON o.id = m.parent_id WHERE m.end_ns > 0 GROUP BY ALL"""
    )
    assert sorted(marks, key=str) == sorted(
        [
            ("training", "step", None, 4, 1),
            ("", "forward", "step", 4, 1),
            ("training", "a mark", "step", 4, 1),
            ("training", "worker", None, 1, 1),
            ("", "across threads", None, 1, 1),
        ],
        key=str,
    )


@pytest.fixture(scope="module")
def service(bpf: None, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A recorded service.py: 800 requests, half of them in a worker thread."""
    path = tmp_path_factory.mktemp("service") / "service.lscope"
    recording = record(path, sample("service.py", "--count", 800, "--pause-us", 2000), *LIBRARIES)
    assert recording.code == 0, recording.stderr
    return recording


def test_ranges_of_a_service_are_exact_in_all_three_layers(service: Recording) -> None:
    report = service.reports["service.py"]
    objects = {site["function"]: site["objects"] for site in report["sites"]}
    prefixes = report["cached"][1]["objects"]
    blocks, kib = objects["kv_block_alloc"], 1024
    assert in_range(service, "gpu") == {
        ("request", "kv_block"): (blocks, blocks * 256 * kib),
        ("request", "activations"): (800, 800 * 256 * kib),
        (None, "prefix_cache"): (prefixes, prefixes * 4096 * kib),
    }
    assert in_range(service, "gpu", "free") == {("request", "activations"): (800, 800 * 256 * kib)}
    # by thread, as the service itself saw it
    by_thread = service.rows(
        f"SELECT e.tid, count(*) FROM {NAMED} WHERE op = 'alloc' AND layer = 'gpu' AND m.name = 'kv_block' GROUP BY 1"
    )
    assert dict(by_thread) == {thread["tid"]: thread["kv_blocks"] for thread in report["threads"]}
    assert len(by_thread) == 2
    # the kernel's memory and maps
    where = "kind = 'kmalloc' AND slab_cache = 'kmalloc-cg-4k' AND mark_id > 0"
    name = "(SELECT m.name FROM marks m WHERE m.id = mark_id)"
    sessions = objects["session_open_without_close"]
    assert service.live(name, where) == {"session_open": (sessions, sessions * 4096)}
    responses = objects["response_buffer_map"]
    own = "kind = 'mmap_anon' AND requested_bytes = 65536 AND mark_id > 0"
    assert service.live(name, own) == {"response_buffer": (responses, responses * 65536)}
    # each range of a request is inside it, and all have ended
    counts = dict(service.rows("SELECT name, count(*) FROM marks WHERE end_ns > start_ns GROUP BY 1"))
    assert counts["request"] == counts["activations"] == counts["staging_buffer"] == 800
    assert counts["kv_block"] == blocks and counts["session_open"] == sessions


def test_the_chain_of_the_gpu_leak_has_range_and_python_line(service: Recording) -> None:
    done = subprocess.run(
        [*LEAKSCOPE, "attribute", str(service.path), "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    blocks = {thread["kv_blocks"] for thread in service.reports["service.py"]["threads"]}
    leak = next(f for f in (report["verdict"], *report["findings"]) if (f["layer"], f["verdict"]) == ("gpu", "leak"))
    assert re.fullmatch(r"Service\.kv_block_alloc \(.*/service\.py:\d+\)", leak["culprit"]["frame"])
    chains = [chain["links"] for chain in report["chains"] if chain["site"] in leak["sites"]]
    assert len(chains) == 2  # one a thread
    for links in chains:
        outer, inner, *rest = links
        assert [(link["what"], link["name"], link["rule"]) for link in (outer, inner)] == [
            ("range", "request", RULE), ("range", "kv_block", RULE),
        ]  # fmt: skip
        assert outer["count"] == inner["count"] and inner["count"] in blocks
        assert inner["bytes"] == inner["count"] * 256 * 1024 and inner["confidence"] == 1.0
        frames = [link["name"] for link in rest if link["what"] == "frame"]
        assert any(re.fullmatch(r"Service\.kv_block_alloc \(.*/service\.py:\d+\)", frame) for frame in frames)
        assert not any("/nvtx/nvtx.py" in frame for frame in frames)
        assert [link["name"] for link in rest if link["what"] == "call"] == ["cudaMalloc", "cuMemAlloc_v2"]
        assert rest[-1]["what"] == "device"
    ranges = {site["id"]: site["ranges"] for site in report["sites"]}
    assert all(ranges[site] == ["request", "kv_block"] for site in leak["sites"])
    shown = subprocess.run(
        [*LEAKSCOPE, "attribute", str(service.path)], cwd=ROOT, capture_output=True, text=True
    ).stdout
    words = " ".join(shown.split())
    assert "range request → range kv_block → " in words and "→ cudaMalloc() → cuMemAlloc_v2() → device" in words


# Decoding


def mark_batch(*rows: tuple[Any, ...]) -> np.ndarray:
    """MARK_RECORDs of (type, ts_ns, number, outer, name)."""
    batch = np.zeros(len(rows), records.MARK_RECORD)
    for record_, (kind, ts_ns, number, outer, name) in zip(batch, rows, strict=True):
        record_["type"], record_["ts_ns"], record_["number"], record_["outer"] = kind, ts_ns, number, outer
        record_["pid"], record_["tid"], record_["domain"] = 7, 8, "д".encode()
        record_["name"], record_["bytes"] = name.encode(), len(name.encode())
    return batch


PUSH, POP, START, END, INSTANT = (
    records.MARK_PUSH, records.MARK_POP, records.MARK_START, records.MARK_END, records.MARK_INSTANT,
)  # fmt: skip


def test_a_range_is_given_out_once_whenever_it_ends() -> None:
    marks = Marks(3)
    first = marks.rows(
        mark_batch((PUSH, 10, 1, 0, "a"), (PUSH, 20, 2, 1, "b"), (INSTANT, 25, 3, 2, "i"), (POP, 30, 2, 0, ""))
    )
    assert [(r["id"], r["parent_id"], r["start_ns"], r["end_ns"], r["name"]) for r in first.to_pylist()] == [
        (7 << 32 | 2, 7 << 32 | 1, 20, 30, "b"),
        (7 << 32 | 3, 7 << 32 | 2, 25, 25, "i"),
    ]
    assert {(r["source_id"], r["pid"], r["tid"], r["domain"]) for r in first.to_pylist()} == {(3, 7, 8, "д")}
    # a start is ended by an end, later; an end of something unknown counts once, and only of a push
    second = marks.rows(
        mark_batch((START, 40, 4, 0, "s"), (POP, 50, 99, 0, ""), (END, 55, 98, 0, ""), (POP, 60, 1, 0, ""))
    )
    assert [(r["name"], r["end_ns"]) for r in second.to_pylist()] == [("a", 60)]
    assert marks.unknown == 1
    assert [(r["name"], r["end_ns"]) for r in marks.open_rows().to_pylist()] == [("s", 0)]
    assert marks.open_rows().num_rows == marks.rows(mark_batch()).num_rows == 0


def test_names_that_share_what_was_recorded_of_them_stay_apart() -> None:
    batch = mark_batch((INSTANT, 1, 1, 0, "x" * 96), (INSTANT, 2, 2, 0, "x" * 96), (INSTANT, 3, 3, 0, "y"))
    batch["bytes"] = (96, 97, records.MARK_NAME_UNREADABLE)
    assert Marks(0).rows(batch)["name"].to_pylist() == ["x" * 96, "x" * 96 + "…", "[unreadable name]"]
    hostile = mark_batch((INSTANT, 1, 1, 0, "y"))
    hostile["name"] = b"\xff\x1b[2J"
    assert Marks(0).rows(hostile)["name"].to_pylist() == ["\N{REPLACEMENT CHARACTER}\x1b[2J"]


def test_ids_have_the_pid_above_the_number() -> None:
    pids, numbers = np.array([1, 4_194_304, 5], np.uint32), np.array([2, 0xFFFFFFFF, 0], np.uint32)
    assert mark_ids(pids, numbers).tolist() == [1 << 32 | 2, 4_194_304 << 32 | 0xFFFFFFFF, 0]


@pytest.mark.parametrize("seed", range(4))
def test_decoding_in_batches_agrees_with_decoding_one_by_one(seed: int) -> None:
    # given random pushes and pops of one thread
    rng = np.random.default_rng(seed)
    stack: list[int] = []
    events: list[tuple[Any, ...]] = []
    expected: dict[int, list[int]] = {}
    for ts_ns in range(1, 800):
        if stack and rng.random() < 0.5:
            ended = stack.pop()
            events.append((POP, ts_ns, ended, 0, ""))
            expected[ended][2] = ts_ns
        else:
            events.append((PUSH, ts_ns, ts_ns, stack[-1] if stack else 0, f"name {ts_ns % 17}"))
            expected[ts_ns] = [stack[-1] if stack else 0, ts_ns, 0]
            stack.append(ts_ns)
    marks, tables = Marks(0), []
    while events:
        size = int(rng.integers(1, 90))
        tables.append(marks.rows(mark_batch(*events[:size])))
        del events[:size]
    found = [row for table in [*tables, marks.open_rows()] for row in table.to_pylist()]
    assert {r["id"] & 0xFFFFFFFF: [r["parent_id"] & 0xFFFFFFFF, r["start_ns"], r["end_ns"]] for r in found} == expected
    assert all(r["name"] == f"name {r['start_ns'] % 17}" for r in found) and len(found) == len(expected)


# Attribution

SITE = {"layer": "gpu", "kind": "device", "api": "cudaMalloc", "slab_cache": "", "kernel_stack": 0, "user_stack": 5,
        "python_stack": 6}  # fmt: skip


def paths_of(marks: list[tuple[int, int, str, str]], events: list[tuple[int, int, int, int]]) -> list[RangePath]:
    """site_ranges of one site: marks are (id, parent, domain, name), events (event code, mark, bytes, life)."""
    con = duckdb.connect()
    columns = ["id", "parent_id", "domain", "name"]
    con.register("marks_", pd.DataFrame(marks, columns=columns).astype({"id": "int64", "parent_id": "int64"}))
    con.execute("CREATE VIEW marks AS SELECT 0::SMALLINT AS source_id, * FROM marks_")
    fixed = {column: SITE.get(column, 0) for column in IDENTITY} | {"slab_cache": ""}
    frame = pd.DataFrame(
        [
            {**fixed, "event": e, "mark_id": m, "size_bytes": b, "life": life, "whole": 1, "source_id": 0}
            for e, m, b, life in events
        ]
    )
    con.register("events", frame)
    lives = pd.DataFrame({"life": [0, 1], "pid": [100, FOLDED_PID]})
    return site_ranges(con, pd.DataFrame([{"site": 9, **SITE}]), lives).get(9, [])


def test_instances_of_a_range_fold_into_paths_with_what_is_kept() -> None:
    marks = [(1, 0, "", "serve"), (2, 1, "", "request"), (3, 2, "kv", "block"), (4, 1, "", "request"),
             (5, 4, "kv", "block"), (6, 5, "kv", "block"), (7, 999, "", "orphan")]  # fmt: skip
    events = [(ALLOC, 3, 100, 0), (ALLOC, 5, 10, 0), (ALLOC, 6, 1, 0), (CALL, 3, 100, 0), (ALLOC, 2, 50, 0),
              (EXIT, 2, 50, 0), (ALLOC, 7, 7, 1), (EXIT, 7, 7, 1), (ALLOC, 0, 99, 0), (ALLOC, 12345, 1, 0)]  # fmt: skip
    assert paths_of(marks, events) == [
        RangePath(("serve", "request"), 1, 1, 50),  # the end of a judged process gives nothing back
        RangePath(("serve", "request", "kv:block"), 3, 2, 11),  # a range in one of its own name is the same
        RangePath(("orphan",), 1, 0, 0),  # of a short-lived process, which took it along
    ]


def test_numbers_fold_where_names_would_be_endless() -> None:
    few = paths_of([(i, 0, "", f"step {i}") for i in range(1, 4)], [(ALLOC, i, i, 0) for i in range(1, 4)])
    assert few == [RangePath((f"step {i}",), 1, 1, i) for i in (3, 2, 1)]
    many = paths_of([(i, 0, "", f"step {i}") for i in range(1, 1100)], [(ALLOC, i, 1, 0) for i in range(1, 1100)])
    assert many == [RangePath(("step #",), 1099, 1099, 1099)]


def test_marks_of_a_damaged_capture_do_no_harm() -> None:
    cycle = [(1, 2, "", "a"), (2, 1, "", "b"), (3, 3, "", "itself")]
    assert paths_of(cycle, [(ALLOC, i, 1, 0) for i in (1, 2, 3)]) == []
    twice = [(1, 0, "", "a"), (1, 0, "", "a"), *[(2, 1, "", "b")] * 5]
    assert paths_of(twice, [(ALLOC, 2, 1, 0)]) == [RangePath(("a", "b"), 1, 1, 1)]
    deep = [(i, i - 1, "", f"level {i}") for i in range(1, 200)]
    assert paths_of(deep, [(ALLOC, 199, 1, 0)]) == [] and len(paths_of(deep, [(ALLOC, 64, 1, 0)])[0].names) == 64


def a_site(live_objects: int, sampled: bool = False) -> Any:
    from leakscope.model.results import Site

    values = dict.fromkeys(Site.__dataclass_fields__, 0) | {"live_objects": live_objects, "stack_sampled": sampled}
    return Site(**values)  # type: ignore[arg-type]


def test_links_are_the_ranges_that_most_of_what_is_kept_was_in() -> None:
    paths = [RangePath(("serve", "prefill"), 40, 39, 3900), RangePath(("serve", "decode"), 900, 36, 3600),
             RangePath(("idle",), 5, 5, 500)]  # fmt: skip
    # 75 of 80 were in serve, but in neither of its ranges half of them
    assert MIN_SHARE == 0.5
    assert range_links(a_site(80), 1000, paths) == [ChainLink("range", "serve", RULE, 75 / 80, 940, 7500)]
    # where stacks are sampled, shares are of the allocations that have their own
    assert [link.confidence for link in range_links(a_site(10_000, sampled=True), 1000, paths)] == [0.94]
    assert range_links(a_site(80), 1000, []) == [] == range_links(a_site(1000), 1000, paths)


def test_a_chain_in_print_keeps_its_ranges_before_the_innermost_frames() -> None:
    frames = [ChainLink("frame", f"f{i}", "stack", 1, 1, 1) for i in range(9)]
    around = [ChainLink("range", "request", RULE, 1, 1, 1)]
    links = [*around, *frames, ChainLink("call", "cudaMalloc", "event", 1, 1, 1)]
    shown = [_name(link) for link in _shortened(links)]
    assert shown == ["range request", "f6", "f7", "f8", "cudaMalloc()"]

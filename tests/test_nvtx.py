"""NVTX ranges: the injection library by itself, and as recorded from C and Python, exact by range and byte."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from recording import BIN, LEAKSCOPE, PAGE, ROOT, Recorder, Recording, record, sample, waiting

import bpf_programs
from leakscope.correlate.marks import RULE
from leakscope.record.probes.nvtx import VARIABLE, command_environment, is_injected, is_injection_library

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

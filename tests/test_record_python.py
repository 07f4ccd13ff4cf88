"""Python frames: exact by function and line, for each CPython that is here, and never garbage."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from recording import BIN, LEAKSCOPE, ROOT, SAMPLES, Recorder, Recording, record, sample

from leakscope.record.python.code_objects import line_of
from leakscope.record.python.layout import NO_OFFSET, Interpreter, Offsets, UnknownLayoutError, is_interpreter_name

TARGET = ROOT / "tests" / "python_target.py"
LIBRARIES = [word for name in ("libcudart.so.12", "libcuda.so.1") for word in ("--library", BIN / name)]
recorded = pytest.mark.usefixtures("bpf")

PYTHON = """
WITH one_frame_a_row AS (SELECT id, unnest(frames) AS frame, generate_subscripts(frames, 1) AS depth FROM stacks)
SELECT s.id, list({'function': f.function, 'file': f.file, 'line': f.line} ORDER BY s.depth)
FROM one_frame_a_row s JOIN frames f ON f.id = s.frame WHERE f.kind = 'python' GROUP BY s.id
"""


# Lines of instructions


def code_objects(module: str) -> Iterator[types.CodeType]:
    """All code objects of a module's source."""
    source = Path(str(importlib.import_module(module).__file__))
    waiting = [compile(source.read_bytes(), str(source), "exec")]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


@pytest.mark.parametrize("module", ["argparse", "asyncio.tasks", "inspect", "dataclasses"])
def test_lines_are_those_of_the_interpreter_itself(module: str) -> None:
    for code in code_objects(module):
        lines = [line or 0 for line, *_ in code.co_positions()]
        ours = [line_of(code.co_linetable, code.co_firstlineno, 2 * i) for i in range(len(lines))]
        assert ours == lines, code.co_qualname
        # before its first instruction a frame is on its first line; behind its last there is none
        assert line_of(code.co_linetable, code.co_firstlineno, -2) == code.co_firstlineno
        assert line_of(code.co_linetable, code.co_firstlineno, 2 * len(lines)) == 0


@pytest.mark.parametrize("table", [b"", b"\xff", b"\x7f\x7f", b"\xe8", b"\xf0\xff\xff", bytes(range(256))])
def test_a_damaged_line_table_ends(table: bytes) -> None:
    assert isinstance(line_of(table, 10, 1 << 40), int)


# Interpreters


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("/usr/bin/python3.11", True),
        ("/opt/venv/bin/python", True),
        ("/usr/lib/libpython3.13.so.1.0", True),
        ("/usr/lib/libpython3.13t.so.1.0", True),
        ("/usr/lib/_ctypes.cpython-311-x86_64-linux-gnu.so", False),
        ("/usr/lib/libpythonic.so", False),
        ("/usr/bin/python3.11-config", False),
    ],
)
def test_interpreters_are_told_by_their_names(path: str, is_one: bool) -> None:
    assert is_interpreter_name(path) == is_one


@cache
def interpreters() -> dict[str, Path]:
    """Interpreters of this host by version, and by version with "static" or "shared": the first found of each."""
    question = "import sys; print(*sys.version_info[:2], getattr(sys, '_base_executable', sys.executable))"
    folders = [Path("/usr/bin"), Path("/usr/local/bin"), *Path.home().glob(".pyenv/versions/*/bin")]
    places = [Path(sys.executable), *(path for folder in folders for path in sorted(folder.glob("python3.1[1-9]")))]
    found: dict[str, Path] = {}
    for place in places:
        done = subprocess.run([place, "-c", question], capture_output=True, text=True, env={**os.environ, "HOME": "/"})
        if done.returncode == 0:
            major, minor, path = done.stdout.strip().split(" ", 2)
            how = "static" if library_of(Path(path)) == Path(path).resolve() else "shared"
            for name in (f"{major}.{minor}", f"{major}.{minor} {how}"):
                found.setdefault(name, Path(path))
    return found


def interpreter(name: str) -> Path:
    """The interpreter of a version; skips where it is not there, but 3.11 has to be."""
    found = interpreters().get(name)
    if found is None:
        if name == "3.11":
            pytest.fail("there is no CPython 3.11 on this host")
        pytest.skip(f"NOT TESTED: no CPython {name} on this host")
    return found


def library_of(python: Path) -> Path:
    """The file that holds an interpreter: the executable, or its libpython."""
    linked = subprocess.run(["ldd", python], capture_output=True, text=True).stdout
    found = re.search(r"libpython3\S+ => (\S+)", linked)
    return Path(found[1]) if found else python.resolve()


def test_an_executable_that_takes_its_interpreter_from_libpython_has_none() -> None:
    python = interpreter("3.11 shared")
    assert Interpreter.read(python, str(python)) is None


OFFSETS = {  # of 3.13 as its compiled headers have them; the others stand in the code
    "3.13": Offsets(632, 7264, 7344, 8, 160, 72, NO_OFFSET, 0, 56, 8, 70, 112, 128, 68, 136, 200, 40)
}


@pytest.mark.parametrize("version", OFFSETS)
def test_offsets_that_an_interpreter_publishes(version: str) -> None:
    library = library_of(interpreter(version))
    found = Interpreter.read(library, str(library))
    assert found is not None
    assert (found.version, found.offsets) == ((3, 13), OFFSETS[version])


FAKE = """
unsigned long Py_Version = %(version)s;
unsigned long PyCode_Type[64] = {1};
struct { char cookie[8]; unsigned long words[64]; } _PyRuntime = {"xdebugpy", {%(words)s}};
"""


def fake_library(folder: Path, name: str, version: str, words: str = "") -> Path:
    """A library with the symbols of an interpreter and nothing behind them."""
    source, path = folder / "fake.c", folder / name
    source.write_text(FAKE % {"version": version, "words": words})
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", path, source], check=True)
    return path


@pytest.mark.parametrize(
    ("version", "words", "reason"),
    [
        ("0x030a00f0", "", "the layout of CPython 3.10 is not known"),
        ("0x036300f0", "0x036300f0", "the layout of CPython 3.99 is not known"),
        ("0x030d00f0", "0x030d00f0, 1", "free-threaded builds (CPython 3.13t) are not supported"),
        ("0x030d00f0", "0x030e00f0, 0", "its debug offsets are not those of CPython 3.13"),
        ("0x030d00f0", "0x030d00f0, 0, 8, 0, 64", "the debug offsets of CPython 3.13 do not fit its structures"),
    ],
)
def test_an_unknown_layout_says_why(tmp_path: Path, version: str, words: str, reason: str) -> None:
    path = fake_library(tmp_path, "libpython3.13.so.1.0", version, words)
    with pytest.raises(UnknownLayoutError, match=re.escape(reason)):
        Interpreter.read(path, str(path))


def test_a_library_without_its_runtime_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int nothing;\n")
    path = tmp_path / "libpython3.12.so.1.0"
    subprocess.run(["gcc", "-shared", "-o", path, tmp_path / "empty.c"], check=True)
    with pytest.raises(UnknownLayoutError, match="it has no symbol _PyRuntime"):
        Interpreter.read(path, str(path))


# Recordings


def line_with(mark: str) -> int:
    """The line of the target that is marked so."""
    return next(i for i, text in enumerate(TARGET.read_text().splitlines(), 1) if text.endswith(f"# {mark}"))


def stacks(recording: Recording) -> dict[int, list[tuple[str, str, int]]]:
    """(function, file, line) of all Python stacks, outermost first."""
    return {
        number: [(frame["function"], frame["file"], frame["line"]) for frame in frames]
        for number, frames in recording.rows(PYTHON)
    }


def by_site(recording: Recording, where: str) -> dict[tuple[str, int], tuple[int, int]]:
    """(allocated, live) objects by (function, line) of the innermost frame in the target's own file."""
    named = stacks(recording)
    found: dict[tuple[str, int], tuple[int, int]] = {}
    sql = f"""SELECT python_stack, count(*) FILTER (op = 'alloc'), sum(sign)::BIGINT FROM events
              WHERE {where} GROUP BY 1"""
    for number, allocated, live in recording.rows(sql):
        own = [(function, line) for function, file, line in named.get(number, []) if Path(file).name == TARGET.name]
        site = own[-1] if own else ("", 0)
        before = found.get(site, (0, 0))
        found[site] = (before[0] + allocated, before[1] + live)
    return found


CASES = ["3.11 static", "3.11 shared", "3.12", "3.13", "3.11"]


@pytest.fixture(scope="module", params=CASES)
def target(request: pytest.FixtureRequest, bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The target recorded by PID under one interpreter, with all stacks."""
    if request.param == CASES[-1] and {"3.11 static", "3.11 shared"} & interpreters().keys():
        pytest.skip("CPython 3.11 was recorded already")
    python = interpreter(request.param)
    path = tmp_path_factory.mktemp("python") / "target.lscope"
    return record_target([str(python)], path)


def record_target(python: Sequence[str], path: Path, *options: object) -> Recording:
    """Attach to the target, let it run, and end the recording while it lives."""
    command = [*python, str(TARGET), str(BIN / "libcudart.so.12")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        assert process.stdout.readline() == "ready\n"
        pids = [process.pid, *descendants(process.pid)]
        words = [word for pid in pids for word in ("-p", pid)]
        with Recorder(path, *words, "--stacks", "all", *LIBRARIES, *options) as recorder:
            recorder.wait_ready()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "kept\n"
            result = recorder.stop()
    finally:
        for pid in (*descendants(process.pid), process.pid):
            os.kill(pid, 9)
        process.communicate()
    assert result.code == 130, result.stderr
    return result


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, children) for found in (child, *descendants(child))]


ON_SOCKETS = "list_contains(kernel_functions, 'sock_alloc_inode') AND slab_cache LIKE 'sock_inode%'"


@recorded
def test_kernel_objects_are_exact_by_line_in_every_kind_of_frame(target: Recording) -> None:
    # given two sockets for each pair, from loops, a generator, names beyond ASCII, threads, a forked child
    found = by_site(target, ON_SOCKETS)
    pairs = {site: allocated / 2 for site, (allocated, _) in found.items()}
    assert pairs == {
        ("keep_pairs", line_with("keep_pairs")): 211 + 17 + 19 + 23,
        ("close_pairs", line_with("close_pairs")): 223,
        ("generated_pairs", line_with("generated_pairs")): 101,
        ("Größe.сокет", line_with("сокет")): 103,
        ("deep.<locals>.<genexpr>", line_with("deepest")): 31,
    }
    # and what is kept is kept at those lines alone: inodes of closed sockets are freed by RCU, a little later
    live = {site: kept / 2 for site, (_, kept) in found.items() if site[0] != "close_pairs"}
    assert live == {site: count for site, count in pairs.items() if site[0] != "close_pairs"}
    assert found["close_pairs", line_with("close_pairs")][1] <= 2 * 223 // 10 + target.losses("recursion_miss")


@recorded
def test_stacks_are_whole_and_outermost_first(target: Recording) -> None:
    named = stacks(target)
    own = {
        tuple((function, line) for function, file, line in named[number] if Path(file).name == TARGET.name)
        for (number,) in target.rows(f"SELECT DISTINCT python_stack FROM events WHERE op = 'alloc' AND {ON_SOCKETS}")
    }
    pairs = ("keep_pairs", line_with("keep_pairs"))
    module = ("<module>", len(TARGET.read_text().splitlines()))
    in_main = {stack for stack in own if stack[:1] == (module,)}
    assert (module, ("main", line_with("main")), pairs) in in_main
    assert any(stack[-2:] == (("forked", line_with("forked")), pairs) for stack in in_main)
    # a thread begins in the library's own frames
    assert (pairs,) in own
    # of a hundred frames the innermost 64 are there (socketpair's own, and one of the interpreter's, take some)
    deepest = max(own, key=len)
    assert deepest[-1] == ("deep.<locals>.<genexpr>", line_with("deepest"))
    assert set(deepest[:-2]) == {("deep", line_with("deep"))} and len(deepest) >= 60
    # the library's frames have names and files too
    assert any(frames[-1][:1] == ("socketpair",) and frames[-1][1].endswith("/socket.py") for frames in named.values())


@recorded
def test_device_memory_and_maps_are_exact_by_line(target: Recording) -> None:
    device = by_site(target, "api = 'cudaMalloc'")
    assert device == {("Device.malloc", line_with("Device.malloc")): (53 + 59, 53)}
    maps = by_site(target, "layer = 'host' AND kind = 'mmap_anon' AND requested_bytes = 65536")
    assert maps[("keep_maps", line_with("keep_maps"))] == (61, 61)
    # the two callers of the one function that allocates come apart
    named = stacks(target)
    callers: dict[str, int] = {}
    for number, live in target.rows(
        "SELECT python_stack, sum(sign)::BIGINT FROM events WHERE api = 'cudaMalloc' GROUP BY 1"
    ):
        callers[named[number][-2][0]] = callers.get(named[number][-2][0], 0) + live
    assert callers == {"Device.keep": 53, "Device.free": 0}


@recorded
def test_a_process_in_a_pid_namespace_of_its_own(bpf: None, tmp_path: Path) -> None:
    # given a target whose thread ids are not those that the host sees
    if not shutil.which("unshare"):
        pytest.skip("NOT TESTED: no unshare(1)")
    python = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", str(interpreter("3.11"))]
    recording = record_target(python, tmp_path / "namespace.lscope")
    found = by_site(recording, ON_SOCKETS)
    assert found["keep_pairs", line_with("keep_pairs")] == (2 * 270, 2 * 270)
    assert found["Größe.сокет", line_with("сокет")] == (2 * 103, 2 * 103)


GARBAGE = """
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
extern unsigned long Py_Version;
extern struct { char cookie[8]; unsigned long words[64]; } _PyRuntime;
/* The chain of 3.11: runtime+40 -> interpreter, +16 -> thread, +160 its id, +56 -> cframe, +8 -> frame, +32 code. */
static unsigned long interpreter[32], thread[32], cframe[8], frame[16];
int main(void) {
	char *runtime = (char *)&_PyRuntime;
	unsigned long first = (unsigned long)interpreter;
	memcpy(runtime + 40, &first, 8);
	interpreter[2] = (unsigned long)thread;
	thread[20] = syscall(SYS_gettid);
	thread[7] = (unsigned long)cframe;
	cframe[1] = (unsigned long)frame;
	frame[4] = (unsigned long)interpreter; /* no code object */
	for (int i = 0; i < 200; i++) {
		frame[7] = i;
		mmap(0, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		usleep(1000);
	}
	return Py_Version == 0;
}
"""


@recorded
def test_frames_that_hold_no_code_are_dropped_counted_and_reported_once(bpf: None, tmp_path: Path) -> None:
    # given a program that looks like CPython 3.11 from outside, whose frames hold something else
    library = fake_library(tmp_path, "libpython3.11.so.1.0", "0x030b00f0")
    (tmp_path / "garbage.c").write_text(GARBAGE)
    program = tmp_path / "garbage"
    subprocess.run(
        ["gcc", "-w", "-fPIC", "-o", program, tmp_path / "garbage.c", library, f"-Wl,-rpath,{tmp_path}"], check=True
    )
    # when it is recorded
    recording = record(tmp_path / "garbage.lscope", [str(program)])
    # then there are no frames, and one line says why
    assert recording.code == 0, recording.stderr
    assert recording.rows("SELECT count(*) FROM mem_events WHERE python_stack <> 0") == [(0,)]
    assert recording.rows("SELECT count(*) FROM frames WHERE kind = 'python'") == [(0,)]
    assert 16 <= recording.losses("python_frames_unavailable") <= 200
    told = [line for line in recording.facts["notes"] if "Python" in line]
    assert told == [
        f"Python frames not available for {library}: what a frame holds is no code object, so its layout is not that "
        "of CPython 3.11"
    ]
    assert recording.stderr.count("Python frames not available") == 1


# Attribution


def attribution(recording: Recording) -> Any:
    """The report of `attribute`."""
    done = subprocess.run(
        [*LEAKSCOPE, "attribute", str(recording.path), "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def lines_of(script: str, function: str) -> tuple[int, int]:
    """First and last line of a function of a sample."""
    tree = ast.parse((SAMPLES / script).read_text())
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
    return node.lineno, node.end_lineno or node.lineno


def function_of(frame: str, script: str) -> str:
    """The function of `function (file:line)`; its line is checked, '' for a frame of another file."""
    found = re.fullmatch(r"(\S+) \((.+):(\d+)\)", frame)
    if not found or Path(found[2]) != SAMPLES / script:
        return ""
    first, last = lines_of(script, found[1].rpartition(".")[2])
    assert first < int(found[3]) <= last, frame
    return found[1]


def blamed(report: Any, script: str, layer: str) -> str:
    """The function of a script that the first leak of a layer is blamed on."""
    findings = [report["verdict"], *report["findings"]]
    first = next(finding for finding in findings if (finding["verdict"], finding["layer"]) == ("leak", layer))
    return function_of(first["culprit"]["frame"], script)


def kept(report: Any, function: str, kind: str, cache: str | None) -> int:
    """Objects of a kind and slab cache that sites keep whose stack has the function."""
    return sum(
        site["live_objects"]
        for site in report["sites"]
        if (site["kind"], site["slab_cache"]) == (kind, cache)
        and any(frame.startswith(f"{function} (") for frame in site["stack"])
    )


@recorded
def test_a_socket_leak_in_python_is_attributed_to_its_line(bpf: None, tmp_path: Path) -> None:
    # given a leaking and a balanced caller of the same kernel path, with sampled stacks as by default
    recording = record(tmp_path / "sockets.lscope", sample("leak_socketpair.py", "--count", 1009, "--pause-us", 1000))
    assert recording.code == 0, recording.stderr
    report = attribution(recording)
    # then the leaking one is blamed, by function, file and line, and in no finding the balanced one or libc
    assert blamed(report, "leak_socketpair.py", "kernel") == "open_session_and_forget"
    findings = [finding for finding in (report["verdict"], *report["findings"]) if finding["verdict"] == "leak"]
    named = {function_of(finding["culprit"]["frame"], "leak_socketpair.py") for finding in findings}
    assert named == {"open_session_and_forget"}
    # and the messages that are queued are all its own
    assert kept(report, "open_session_and_forget", "kmalloc", "kmalloc-cg-4k") == 1009
    assert kept(report, "open_session_and_close", "kmalloc", "kmalloc-cg-4k") == 0


@recorded
def test_leaks_of_a_python_service_are_attributed_in_all_three_layers(bpf: None, tmp_path: Path) -> None:
    recording = record(
        tmp_path / "service.lscope", sample("service.py", "--count", 800, "--pause-us", 2000), *LIBRARIES
    )
    assert recording.code == 0, recording.stderr
    script, report = "service.py", attribution(recording)
    leaked = {site["function"]: site["objects"] for site in recording.reports[script]["sites"]}
    assert blamed(report, script, "gpu") == "Service.kv_block_alloc"
    assert blamed(report, script, "host") == "Service.response_buffer_map"
    assert blamed(report, script, "kernel") == "Service.session_open_without_close"
    assert kept(report, "Service.kv_block_alloc", "device", None) == leaked["kv_block_alloc"]
    assert kept(report, "Service.activations_compute", "device", None) == 0
    assert kept(report, "Service.response_buffer_map", "mmap_anon", None) == leaked["response_buffer_map"]
    assert kept(report, "Service.staging_buffer_use", "mmap_anon", None) == 0

"""Native names, lines and inlined calls of real recordings: C++, a stripped copy that is named later, and a JIT."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from recording import BIN, LEAKSCOPE, ROOT, SAMPLES, Recorder, Recording, record, sample

from leakscope.capture import Capture
from leakscope.capture.rewrite import replace_tables
from leakscope.record.symbols.address_space import Module
from leakscope.record.symbols.lines import Lines
from leakscope.symbols.elf import ElfFile

COUNT = 41
SLAB_BYTES = 196_608
SOURCE = str(SAMPLES / "host" / "leak_cpp.cpp")
POOL, SLAB = "app::Pool<app::(anonymous namespace)::Slab>", "app::(anonymous namespace)::Slab"
TAKE = f"{POOL}::take(unsigned long)"
FORGET = f"app::serve_and_forget({POOL}&, unsigned long)"
FRAMES = """
WITH one_frame_a_row AS (
    SELECT id, unnest(frames) AS frame, generate_subscripts(frames, 1) AS depth FROM stacks WHERE id = ?
) SELECT f.function, f.file, f.line, f.kind FROM one_frame_a_row s JOIN frames f ON f.id = s.frame
WHERE f.module LIKE '%leak_cpp' ORDER BY s.depth
"""


def line(mark: str) -> int:
    """The line of the source that carries a mark."""
    (found,) = [
        n for n, text in enumerate(Path(SOURCE).read_text().splitlines(), 1) if text.endswith(f"// line: {mark}")
    ]
    return found


def plain(file: str) -> str:
    return os.path.normpath(file)


def leaked_stacks(recording: Recording) -> dict[int, tuple[int, int]]:
    """Live (objects, bytes) of the maps of the size that the program leaks, by user stack."""
    return recording.live("user_stack", f"api = 'mmap' AND requested_bytes = {SLAB_BYTES}")


def application_frames(recording: Recording, stack: int) -> list[tuple[str, str, int, str]]:
    """(function, file, line, kind) of the program's own frames of a stack behind main, outermost first."""
    rows = [(function, plain(file), line, kind) for function, file, line, kind in recording.rows(FRAMES, stack)]
    assert rows[0][0] in ("main", "_start") or not rows[0][0]
    return [row for row in rows if row[0] not in ("main", "_start", "")]


def leaking_chain() -> list[tuple[str, str, int, str]]:
    return [
        (FORGET, SOURCE, line("serve"), "native"),
        (TAKE, SOURCE, line("map_object"), "native"),
        (f"app::(anonymous namespace)::map_object<{SLAB}>", SOURCE, line("map_pages"), "inlined"),
        ("app::(anonymous namespace)::map_pages", SOURCE, line("mmap"), "inlined"),
    ]


def symbolize(*arguments: object, code: int = 0) -> Any:
    done = subprocess.run(
        [*LEAKSCOPE, "symbolize", "--json", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


@pytest.fixture(scope="module")
def cpp(bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The C++ sample with all that names it, recorded with heap probes."""
    path = tmp_path_factory.mktemp("cpp") / "cpp.lscope"
    recording = record(path, sample("leak_cpp", "--count", COUNT, "--pause-us", 0), "--malloc")
    assert recording.code == 0, recording.stderr
    assert recording.losses("ring_drop") == 0
    return recording


@pytest.fixture(scope="module")
def nameless(bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the stripped copy."""
    path = tmp_path_factory.mktemp("stripped") / "stripped.lscope"
    recording = record(path, [str(BIN / "stripped" / "leak_cpp"), "--count", str(COUNT), "--pause-us", "0"])
    assert recording.code == 0, recording.stderr
    return path


def test_the_leak_of_a_cpp_program_is_named_with_lines_and_inlined_calls(cpp: Recording) -> None:
    # given a function that leaks maps through a template and two inlined functions, and one that gives them back
    ((stack, live),) = leaked_stacks(cpp).items()
    # then exactly what it leaked is live below one stack, and the stack reads like the source
    assert live == (COUNT, COUNT * SLAB_BYTES)
    assert application_frames(cpp, stack) == leaking_chain()
    # of two overloads each is named by itself
    functions = {row[0] for row in cpp.rows("SELECT DISTINCT function FROM frames WHERE module LIKE '%leak_cpp'")}
    assert {TAKE, f"{POOL}::take(std::string const&)"} <= functions
    assert not any(function.startswith("_Z") for (function,) in cpp.rows("SELECT function FROM frames"))


def test_an_inlined_frame_belongs_to_the_frame_outside_of_it(cpp: Recording) -> None:
    (rows,) = [
        cpp.rows(
            "SELECT count(*), count(DISTINCT id), max(\"offset\"), bool_and(build_id <> '') FROM frames WHERE kind = 'inlined'"  # noqa: E501
        )
    ]
    count, distinct, offset, identified = rows[0]
    assert count == distinct > 1 and (offset, identified) == (0, True)
    # ids of frames are unique and all that stacks name are there
    assert cpp.rows("SELECT count(*) - count(DISTINCT id) FROM frames") == [(0,)]
    assert cpp.rows(
        "SELECT count(*) FROM (SELECT unnest(frames) AS f FROM stacks) WHERE f NOT IN (SELECT id FROM frames)"
    ) == [(0,)]
    assert cpp.capture.problems == [] and cpp.capture.manifest.complete


def test_operator_new_is_named_and_exact(cpp: Recording) -> None:
    # a walk of frame pointers has libstdc++'s caller only by the return address of malloc's own caller
    live = cpp.live(
        "requested_bytes",
        "api = 'malloc' AND list_contains(functions, 'operator new(unsigned long)') AND size_bytes = 1000",
    )
    assert live == {1000: (COUNT, COUNT * 1000)}


def test_attribute_names_the_function_that_forgets(cpp: Recording) -> None:
    done = subprocess.run([*LEAKSCOPE, "attribute", str(cpp.path), "--json"], cwd=ROOT, capture_output=True, text=True)
    report = json.loads(done.stdout)
    sites = [s for s in report["sites"] if s["layer"] == "host" and s["live_bytes"] == COUNT * SLAB_BYTES]
    assert len(sites) == 1
    (chain,) = [c for c in report["chains"] if c["site"] == sites[0]["id"]]
    names = [link["name"] for link in chain["links"]]
    assert f"{FORGET} ({SOURCE}:{line('serve')})" in [
        f"{name.split(' (/')[0]} ({plain('/' + name.split(' (/')[1])}" for name in names if " (/" in name
    ]
    # the C library's own function gives way to the call that it makes
    assert names[-2:] == ["mmap", "mmap_anon"] and not names[-3].startswith("mmap")


def test_a_stripped_program_is_named_later_by_its_debug_file(nameless: Path, tmp_path: Path) -> None:
    # given a recording without names, on a machine that has them nowhere
    before = Recording(nameless, 0)
    ((stack, live),) = leaked_stacks(before).items()
    assert live == (COUNT, COUNT * SLAB_BYTES)
    own = "module LIKE '%leak_cpp'"
    assert before.rows(f"SELECT DISTINCT function, file, line, kind FROM frames WHERE {own}") == [("", "", 0, "native")]
    unnamed = before.rows(f"SELECT count(*) FROM frames WHERE {own}")[0][0]
    # when it is symbolized without the debug file, then nothing is made up, and what is missing is named
    lost = symbolize(nameless, "-o", tmp_path / "nothing.lscope")
    (missing,) = [row for row in lost["missing"] if row["module"].endswith("leak_cpp")]
    assert (missing["unnamed"], missing["frames"]) == (unnamed, unnamed)
    assert missing["build_id"] == before.rows(f"SELECT DISTINCT build_id FROM frames WHERE {own}")[0][0] != ""
    # when with it, then it reads as if it had been there, and the events that name stacks are as they were
    output = tmp_path / "named.lscope"
    report = symbolize(nameless, "--debug-dir", BIN / "debug", "-o", output)
    after = Recording(output, 0)
    assert report["unnamed_before"] - report["unnamed_after"] >= unnamed
    assert not [row for row in report["missing"] if row["module"].endswith("leak_cpp") and row["unnamed"]]
    assert leaked_stacks(after) == {stack: live}
    assert application_frames(after, stack) == leaking_chain()
    assert after.capture.problems == [] and after.capture.manifest.complete
    for table in ("mem_events", "calls", "samples", "processes", "modules", "losses"):
        assert after.capture.table(table).equals(before.capture.table(table)), table
    assert after.capture.table("stacks")["id"].to_pylist() == before.capture.table("stacks")["id"].to_pylist()
    # and once more, in place, changes nothing
    manifest = (output / "manifest.json").read_bytes()
    again = symbolize(output, "--debug-dir", BIN / "debug")
    assert (again["inlined"], again["unnamed_before"]) == (0, report["unnamed_after"])
    assert (output / "manifest.json").read_bytes() == manifest


def test_the_same_works_where_debug_files_and_libraries_have_other_paths(nameless: Path, tmp_path: Path) -> None:
    # given only a copy of the whole program, somewhere below a directory
    (tmp_path / "artefacts" / "v1").mkdir(parents=True)
    shutil.copy(BIN / "leak_cpp", tmp_path / "artefacts" / "v1" / "server")
    output = tmp_path / "named.lscope"
    symbolize(nameless, "--debug-dir", tmp_path / "artefacts", "-o", output)
    after = Recording(output, 0)
    ((stack, _),) = leaked_stacks(after).items()
    assert application_frames(after, stack) == leaking_chain()


def test_kernel_frames_have_their_names_and_modules_in_the_capture(cpp: Recording) -> None:
    rows = cpp.rows("SELECT function, module, \"offset\" FROM frames WHERE kind = 'kernel'")
    assert len(rows) > 10
    assert all(module and offset for _, module, offset in rows)
    named = [function for function, _, _ in rows if function]
    assert len(named) == len(rows) and any(name.startswith("__x64_sys_") or name == "do_syscall_64" for name in named)


JIT = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

__attribute__((noipa)) void allocate(void) { mmap(NULL, 77 * 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }

static unsigned char *compile(void (*callee)(void), const char *name, unsigned char *at)
{
    /* push %rbp; mov %rsp,%rbp; movabs $callee,%rax; call *%rax; pop %rbp; ret */
    unsigned char code[] = {0x55, 0x48, 0x89, 0xe5, 0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xd0, 0x5d, 0xc3};
    char path[64];
    memcpy(code + 6, &callee, 8);
    memcpy(at, code, sizeof code);
    sprintf(path, "/tmp/perf-%d.map", (int)getpid());
    FILE *map = fopen(path, "a");
    fprintf(map, "%lx %lx %s\n", (unsigned long)at, sizeof code, name);
    fclose(map);
    return at + sizeof code;
}

int main(void)
{
    unsigned char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), go;
    unsigned char *outer = compile(allocate, "Lib::inner [opt] in a.js:3", page);
    compile((void (*)(void))page, "Lib::outer in a.js:9", outer);
    mprotect(page, 4096, PROT_READ | PROT_EXEC);
    if (read(0, &go, 1) != 1)
        return 1;
    for (int i = 0; i < 23; i++)
        ((void (*)(void))outer)();
    puts("{}");
    fflush(stdout);
    return read(0, &go, 1) != 1;
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="NOT TESTED: the program writes x86-64 code")
def test_functions_of_a_jit_are_named_by_its_perf_map(bpf: None, tmp_path: Path) -> None:
    # given a program that makes two functions at run time, one calling the other, and writes a perf map
    program = tmp_path / "jit"
    subprocess.run(
        ["gcc", "-O1", "-fno-omit-frame-pointer", "-x", "c", "-o", program, "-"], input=JIT, text=True, check=True
    )
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        perf_map = Path(f"/tmp/perf-{process.pid}.map")
        assert process.stdin and process.stdout
        try:
            with Recorder(tmp_path / "jit.lscope", "-p", process.pid) as recorder:
                recorder.wait_ready()
                process.stdin.write("g")
                process.stdin.flush()
                assert process.stdout.readline() == "{}\n"
                while not (recorder.path / "mem_events").exists():
                    assert recorder.process.poll() is None
                    time.sleep(0.02)
                recording = recorder.stop()
        finally:
            process.kill()
            perf_map.unlink(missing_ok=True)
    # then what it mapped is below their names
    where = f"api = 'mmap' AND requested_bytes = {77 * 4096}"
    assert recording.live("pid", where) == {process.pid: (23, 23 * 77 * 4096)}
    ((functions,),) = recording.rows(f"SELECT DISTINCT functions FROM events WHERE {where}")
    start = functions.index("main")
    assert functions[start : start + 4] == ["main", "Lib::outer in a.js:9", "Lib::inner [opt] in a.js:3", "allocate"]
    modules = recording.rows("SELECT DISTINCT module FROM frames WHERE starts_with(function, 'Lib::')")
    assert modules == [(str(perf_map),)]


def test_a_recording_ends_as_ever_when_lines_cannot_be_had(cpp: Recording, tmp_path: Path) -> None:
    # given a finished recording's tables, once with a module whose debug information is damaged, once with a bug of ours  # noqa: E501
    copy = tmp_path / "c.lscope"
    shutil.copytree(cpp.path, copy)
    writer: Any = SimpleNamespace(path=copy, manifest=cpp.capture.manifest)
    own = cpp.rows("SELECT DISTINCT module, build_id FROM frames WHERE module LIKE '%leak_cpp' AND kind = 'native'")[0]
    data = bytearray((BIN / "leak_cpp").read_bytes())
    section = ElfFile(bytes(data))._elf.get_section_by_name(".debug_info")
    data[section["sh_offset"] : section["sh_offset"] + section["sh_size"]] = b"\xff" * section["sh_size"]
    (tmp_path / "broken").write_bytes(data)
    without = cpp.capture.table("frames")
    kinds = [kind if kind != "inlined" else "kernel" for kind in without["kind"].to_pylist()]
    without = without.set_column(3, "line", pa.array([0] * len(kinds), pa.int32())).set_column(
        7, "kind", pa.array(kinds)
    )
    replace_tables(copy, writer.manifest, {"frames": without})
    writer.manifest = Capture.open(copy).manifest
    broken = Module(own[0], [str(tmp_path / "broken")], own[1])
    lines = Lines(writer, SimpleNamespace(modules=lambda: [broken]))  # type: ignore[arg-type]
    lines.look_up()
    assert [(loss.what, own[0] in loss.detail) for loss in lines.losses()] in ([], [("symbol_unresolved", True)])
    assert lines.put_in_place() == [] and Capture.open(copy).problems == []
    for bug in (lambda: 1 / 0, lambda: [None]):
        lines = Lines(writer, SimpleNamespace(modules=bug))  # type: ignore[arg-type]
        lines.look_up()
        (loss,) = lines.losses()
        assert loss.what == "symbol_unresolved" and "no lines were looked up" in loss.detail
        assert lines.put_in_place() == [] and lines.named == 0

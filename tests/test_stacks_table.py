"""The table of docs/stacks.md: each cell is what a recording of that program, thread and probe gives here."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import PurePosixPath

import pytest
from recording import BIN, ROOT, Recording, record
from test_record_python import interpreters

from leakscope.correlate.mixed_stacks import merge
from leakscope.correlate.stacks import Frame, Stacks

SOURCE, SCRIPT = ROOT / "tests" / "stacks_target.c", ROOT / "tests" / "stacks_target.py"
TABLE = ROOT / "docs" / "stacks.md"
LIBRARIES = [word for name in ("libcudart.so.12", "libcuda.so.1") for word in ("--library", BIN / name)]

COMPILED = {
    "C with frame pointers": ("with-pointers", "gcc -O1 -fno-omit-frame-pointer -fno-optimize-sibling-calls"),
    "C without frame pointers": ("without-pointers", "gcc -O1 -fomit-frame-pointer -fno-optimize-sibling-calls"),
    "C++": ("plusplus", "g++ -x c++ -O2 -fomit-frame-pointer -fno-optimize-sibling-calls"),
}
PYTHONS = {f"Python {version}": version for version in ("3.11", "3.12", "3.13")}
PROBES = {  # by column: the function, what it takes, and which events are meant
    "kernel object": ("keep_object", "eventfd", "e.layer = 'kernel' AND list_contains(kernel_functions, 'do_eventfd')"),
    "map": ("keep_map", "mmap", "e.api = 'mmap' AND e.requested_bytes = 65536"),
    "CUDA": ("keep_device", "cudaMalloc", "e.api = 'cudaMalloc'"),
}
THREADS = ("main", "worker")
POLICIES = ("gpu", "all")


def expected(program: str, thread: str, probe: str, policy: str) -> tuple[str, ...]:
    """The cell: own functions outermost first, libraries between them in brackets, the probed function."""
    keep, api, _ = PROBES[probe]
    dumped = policy == "all" or probe == "CUDA"
    if program in COMPILED:
        if not dumped and program != "C with frame pointers":
            return keep, api
        return ("main" if thread == "main" else "worker", "outer", "middle", keep, api)
    callback = ("[_ctypes]", "[libffi]", "[_ctypes]") if dumped else ()
    library = {"kernel object": (), "map": ("[mmap]",), "CUDA": ("[_ctypes]", "[libffi]")}[probe]
    return (
        *(("<module>", "main") if thread == "main" else ("worker",)),
        *("outer", "middle", *callback, keep, *library, api),
    )


@cache
def own_name(function: str) -> str:
    """A function as C++ would call it, mangled or not, without namespace and parameters."""
    if function.startswith("_Z"):
        done = subprocess.run(["c++filt", function], capture_output=True, text=True, check=True)
        function = done.stdout.strip()
    return re.sub(r"\(.*\)$", "", function).removeprefix("cache::")


def shown(frames: list[Frame]) -> tuple[str, ...]:
    """Frames in the words of :func:`expected`, from the first own one on."""
    words: list[str] = []
    programs = {program for program, _ in COMPILED.values()}
    for index, frame in enumerate(frames):
        module = PurePosixPath(frame.module).name
        if index == len(frames) - 1 or frame.file == str(SCRIPT) or (module in programs and frame.function != "_start"):
            words.append(own_name(frame.function))
        elif words and module and words[-1] != (library := f"[{module.split('.')[0]}]"):
            words.append(library)
    return tuple(words)


# Recordings


@pytest.fixture(scope="module", params=[(loader, policy) for loader in ("bcc", "core") for policy in POLICIES])
def recorded(
    request: pytest.FixtureRequest, bpf: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recording, str]:
    """All programs, one after another, under one loader; and the policy of unwinding."""
    loader, policy = request.param
    if loader == "core":
        request.getfixturevalue("core")
    place = tmp_path_factory.mktemp("stacks")
    links = [f"-L{BIN}", "-l:libcudart.so.12", "-l:libcuda.so.1", f"-Wl,-rpath,{BIN}", "-pthread"]
    commands = []
    for program, compiler in COMPILED.values():
        subprocess.run([*compiler.split(), "-o", place / program, SOURCE, *links], check=True)
        commands.append(f"'{place / program}'")
    pythons = [interpreters()[version] for version in PYTHONS.values() if version in interpreters()]
    commands += [f"'{python}' '{SCRIPT}' '{BIN}/libcudart.so.12'" for python in pythons]
    options = ("--loader", loader, "--unwind", policy, "--stacks", "all", *LIBRARIES)
    recording = record(place / "stacks.lscope", ["/bin/sh", "-c", "; ".join(commands)], *options)
    assert recording.code == 0, recording.stderr
    return recording, policy


def process_of(recording: Recording, program: str) -> int:
    """The PID of a program: the one that mapped its file (of an interpreter: executable or library)."""
    name = COMPILED[program][0] if program in COMPILED else f"ython{PYTHONS[program]}"
    rows = recording.rows("SELECT DISTINCT pid FROM modules WHERE contains(parse_filename(path), ?)", name)
    members = [pid for (pid,) in rows if recording.rows("SELECT 1 FROM events WHERE pid = ? AND layer = 'gpu'", pid)]
    assert len(members) == 1, (program, rows)
    return int(members[0])


@pytest.mark.bpf
@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.parametrize("program", [*COMPILED, *PYTHONS])
def test_frames_are_those_of_the_table(recorded: tuple[Recording, str], program: str, thread: str, probe: str) -> None:
    if program in PYTHONS and PYTHONS[program] not in interpreters():
        if program == "Python 3.11":
            pytest.fail("there is no CPython 3.11 on this host")
        pytest.skip(f"NOT TESTED: no CPython {PYTHONS[program]} on this host")
    recording, policy = recorded
    # given what one thread of one program kept at last
    rows = recording.rows(
        f"SELECT user_stack, python_stack FROM events e WHERE op = 'alloc' AND pid = ? AND {PROBES[probe][2]} "
        f"AND (tid = pid) = ? ORDER BY ts_ns DESC LIMIT 1",
        process_of(recording, program), thread == "main",
    )  # fmt: skip
    with recording.capture.connect() as con:
        stacks = Stacks(con, [stack for row in rows for stack in row])
    found = {shown(merge(stacks[user], stacks[python])) for user, python in rows}
    losses = recording.rows("SELECT what, count, detail FROM losses")
    assert found == {expected(program, thread, probe, policy)}, (found, losses)


# The page


def table() -> list[str]:
    """Lines of the table; programs of the same cells share a line."""
    lines = ["| program | thread | from | frames by default | with `--unwind all` |", "|---|---|---|---|---|"]
    for programs in (["C with frame pointers"], ["C without frame pointers", "C++"], list(PYTHONS)):
        for thread in THREADS:
            for probe in PROBES:
                cells = {policy: {expected(p, thread, probe, policy) for p in programs} for policy in POLICIES}
                default, everything = (f"`{' → '.join(*cells[policy])}`" for policy in POLICIES)
                more = "the same" if everything == default else everything
                lines.append(f"| {', '.join(programs)} | {thread} | {probe} | {default} | {more} |")
    return lines


def test_the_page_shows_what_is_tested() -> None:
    assert "\n".join(table()) in TABLE.read_text(), "put this into docs/stacks.md:\n" + "\n".join(table())

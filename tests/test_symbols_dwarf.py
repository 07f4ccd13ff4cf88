"""Lines, inlined functions and separate debug files, compared with binutils' addr2line; and files that are damaged."""

from __future__ import annotations

import os
import random
import re
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

from leakscope.symbols import libdw
from leakscope.symbols.debug_files import DebugDirectories, open_elf, separate_debug_files
from leakscope.symbols.dwarf import DwarfFile, SourceFrame
from leakscope.symbols.dwarf_worker import DwarfWorker
from leakscope.symbols.elf import ElfFile, Segment, address_of

try:
    libdw.library()
except OSError as error:
    pytest.skip(f"NOT TESTED: {error}", allow_module_level=True)

CPP = """
#include <new>
#include <string>
namespace app {
namespace {
static inline __attribute__((always_inline)) void *deepest(size_t n) { return ::operator new(n); }
inline __attribute__((always_inline)) void *middle(size_t n) { return deepest(n + 1); }
inline __attribute__((always_inline, artificial)) void *wished_away(size_t n) { return middle(n); }
}
template <class T> struct Pool {
    __attribute__((noinline)) T *take(T v) { T *p = (T *)middle(sizeof(T)); *p = v; return p; }
    __attribute__((noinline)) T *take(T v, int k) { T *p = (T *)wished_away(sizeof(T) * k); *p = v; return p; }
};
}
int main(int argc, char **)
{
    app::Pool<int> p;
    app::Pool<long> q;
    auto lambda = [&](int x) __attribute__((noinline)) { return p.take(x, 3); };
    return *p.take(argc) + *lambda(4) + int(*q.take(5));
}
"""

RUST = """
mod pool {
    pub struct Pool<T> { pub kept: Vec<T> }
    impl<T: Clone> Pool<T> {
        #[inline(never)]
        pub fn keep(&mut self, item: T, count: usize) { for _ in 0..count { self.kept.push(item.clone()); } }
    }
}
fn main() { let mut p = pool::Pool { kept: Vec::<u64>::new() }; p.keep(7, 300_000); println!("{}", p.kept.len()); }
"""


def built(tmp_path_factory: pytest.TempPathFactory, compiler: str, source: str, suffix: str, *options: str) -> Path:
    if not shutil.which(compiler):
        pytest.skip(f"NOT TESTED: no {compiler}")
    place = tmp_path_factory.mktemp(compiler.replace("+", "p"))
    (place / f"program{suffix}").write_text(source)
    command = [compiler, "-g", *options, "-o", place / "program", place / f"program{suffix}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "program"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory, "g++", CPP, ".cpp", "-O2", "-Wl,--build-id")


@pytest.fixture(
    scope="module", params=[("g++", "-O2"), ("g++", "-gdwarf-4", "-O2"), ("g++", "-gz", "-O1"), ("clang++", "-O2"), ("rustc", "-O")]
)  # fmt: skip
def any_program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, *options = request.param
    rust = compiler == "rustc"
    return built(tmp_path_factory, compiler, RUST if rust else CPP, ".rs" if rust else ".cpp", *options)


def addresses_in(path: Path, step: int = 3, limit: int = 3000) -> list[int]:
    starts, sizes, _, _ = ElfFile(path.read_bytes())._functions
    every = [
        at
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        for at in range(start, start + size, step)
    ]
    return sorted(random.Random(1).sample(every, min(limit, len(every))))


def addr2line(path: Path, addresses: list[int]) -> list[list[str]]:
    """`file:line` of each frame at each address, outermost first; [] where binutils does not know."""
    done = subprocess.run(
        ["addr2line", "-a", "-i", "-f", "-e", path], input="\n".join(map(hex, addresses)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = []
    for answer in done.stdout.split("\n0x"):
        places = [line.split(" (disc")[0].replace(":?", ":0") for line in answer.splitlines()[2::2]]
        found.append([] if places[-1].startswith(("??", "crtstuff.c")) else places[::-1])
    return found


def test_every_address_has_the_lines_and_inlined_calls_that_binutils_finds(any_program: Path) -> None:
    addresses = addresses_in(any_program)
    assert len(addresses) > 40
    with DwarfFile(os.open(any_program, os.O_RDONLY)) as dwarf:
        ours = [[f"{frame.file}:{frame.line}" for frame in dwarf.frames_at(at)] for at in addresses]
    theirs = addr2line(any_program, addresses)
    # what we leave out: functions that are to be seen as parts of their callers (artificial ones)
    differing = [(a, o, t) for a, o, t in zip(addresses, ours, theirs, strict=True) if o != t]
    shorter = [(a, o, t) for a, o, t in differing if 0 < len(o) < len(t) and o[0] == t[0]]
    assert differing == shorter, next(d for d in differing if d not in shorter)
    assert len(differing) < len(addresses) / 5
    assert max(map(len, ours)) >= 3


def test_inlined_functions_are_named_and_stand_at_the_lines_of_their_calls(program: Path) -> None:
    # given the return addresses of the calls of operator new in `take(int)`
    disassembly = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", program], capture_output=True, text=True, check=True
    ).stdout

    def call_in(function: str) -> int:
        block = re.split(rf"<{function}(?:\.\w+)*>:", disassembly)[1].split("\n\n")[0]
        return next(int(at.split(":")[0], 16) for at in block.splitlines() if "call" in at and "_Znwm" in at)

    call = call_in("_ZN3app4PoolIiE4takeEi")
    line_of = {text: n for n, text in enumerate(CPP.splitlines(), 1)}

    def line(part: str) -> int:
        return next(number for text, number in line_of.items() if part in text)

    with DwarfFile(os.open(program, os.O_RDONLY)) as dwarf:
        frames = dwarf.frames_at(call)
        source = frames[0].file
        assert Path(source).name == "program.cpp"
        assert frames == [
            SourceFrame("app::Pool<int>::take(int)", source, line("T *take(T v) {")),
            SourceFrame("app::(anonymous namespace)::middle", source, line("void *middle")),
            SourceFrame("app::(anonymous namespace)::deepest", source, line("void *deepest")),
        ]
        # and an artificial one is a part of its caller: the call in it is at the line of its own call
        call = call_in("_ZN3app4PoolIiE4takeEii")
        assert [frame.function.rpartition("::")[2] for frame in dwarf.frames_at(call)] == [
            "take(int, int)",
            "middle",
            "deepest",
        ]
        assert dwarf.frames_at(call)[0].line == line("T *take(T v, int k)")
        assert dwarf.frames_at(5) == dwarf.frames_at(1 << 63) == []


# --- separate debug files ----------------------------------------------------------------------------------


@pytest.fixture
def halves(program: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The program without names, and its debug file elsewhere."""
    stripped, debug = tmp_path / "stripped", tmp_path / "program.debug"
    subprocess.run(["objcopy", "--only-keep-debug", program, debug], check=True)
    subprocess.run(["objcopy", "--strip-all", program, stripped], check=True)
    return stripped, debug


def test_a_debug_file_has_the_addresses_but_not_the_offsets_of_its_module(
    program: Path, halves: tuple[Path, Path]
) -> None:
    whole, stripped, debug = (open_elf(str(path)) for path in (program, *halves))
    offsets = whole.function_offsets()
    offset = offsets["main"] + 4
    address = address_of(stripped.code, offset)
    assert address is not None
    assert (whole.function_at(offset), stripped.function_at(offset), debug.code) == ("main", "", ())
    assert debug.function_at_address(address) == "main"
    assert (debug.has_debug_info, stripped.has_debug_info) == (True, False)
    assert address_of([Segment(0x1000, 0x200, 16, True)], 0x20F) == 0x100F
    assert address_of([Segment(0x1000, 0x200, 16, True)], 0x210) is None


def test_debug_files_are_found_by_build_id_in_both_layouts(
    program: Path, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    build_id = open_elf(str(program)).build_id
    for place in (f"a/.build-id/{build_id[:2]}/{build_id[2:]}.debug", "b/deep/down/any.name"):
        target = tmp_path / place
        target.parent.mkdir(parents=True)
        shutil.copy(halves[1], target)
        found = DebugDirectories([tmp_path / place.split("/")[0]]).find(build_id)
        assert {file.path for file in found} == {str(target)}
    other = DebugDirectories([tmp_path / "a", tmp_path / "b"])
    assert other.find("00" * 20) == other.find("") == []
    # a file in the place of another one's is not taken
    shutil.copy("/bin/true", tmp_path / f"a/.build-id/{build_id[:2]}/{build_id[2:]}.debug")
    assert DebugDirectories([tmp_path / "a"]).find(build_id) == []


def test_a_debug_link_is_followed_if_the_file_is_the_right_one(halves: tuple[Path, Path], tmp_path: Path) -> None:
    stripped, debug = halves
    linked = tmp_path / "linked"
    subprocess.run(["objcopy", f"--add-gnu-debuglink={debug}", stripped, linked], check=True)
    elf = open_elf(str(linked))
    assert elf.debug_link is not None and elf.debug_link[0] == "program.debug"
    assert [file.path for file in separate_debug_files(elf, str(linked))] == [str(debug)]
    # in a container: the same path below its root
    root = tmp_path / "root"
    (root / str(tmp_path)[1:] / ".debug").mkdir(parents=True)
    debug.rename(root / str(tmp_path)[1:] / ".debug" / debug.name)
    assert separate_debug_files(elf, str(linked)) == []
    (found,) = separate_debug_files(elf, str(linked), (str(root), ""))
    assert found.path == f"{root}{tmp_path}/.debug/program.debug"
    # without build ids the checksum decides
    for name in ("linked", f"root{tmp_path}/.debug/program.debug"):
        subprocess.run(["objcopy", "--remove-section=.note.gnu.build-id", tmp_path / name], check=True)
    nameless = open_elf(str(linked))
    assert nameless.build_id == "" and separate_debug_files(nameless, str(linked), (str(root),)) == []


def test_a_pipe_in_the_place_of_a_debug_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("no ELF file")
    assert DebugDirectories([tmp_path]).find("ab" * 20) == []
    with pytest.raises(ValueError, match="not a regular file"):
        open_elf(str(tmp_path / "fifo"))


# --- damage ------------------------------------------------------------------------------------------------


def test_damaged_debug_information_costs_its_lines_and_nothing_else(program: Path, tmp_path: Path) -> None:
    data, rng = program.read_bytes(), random.Random(11)
    addresses = addresses_in(program, limit=40)
    elf = ElfFile(data)._elf
    sections = [elf.get_section_by_name(name) for name in (".debug_info", ".debug_abbrev", ".debug_line", ".debug_str")]
    outcomes = {True: 0, False: 0}
    path = tmp_path / "damaged"
    with DwarfWorker(time.monotonic() + 300) as worker:
        for round_ in range(120):
            copy = bytearray(data)
            for _ in range(rng.choice([1, 8, 64])):
                section = rng.choice(sections)
                copy[section["sh_offset"] + rng.randrange(section["sh_size"])] = rng.randrange(256)
            path.write_bytes(copy if round_ % 6 else copy[: rng.randrange(len(copy))])
            try:
                outcomes[
                    len(worker.frames(f"{path.parent}/./{path.name}" if round_ % 2 else str(path), addresses)) == 40
                ] += 1
            except ValueError:
                outcomes[False] += 1
        # then the worker still serves
        assert worker.frames(str(program), addresses)[0] == worker.frames(str(program), addresses[:1])[0]
    assert outcomes[True] > 20 and outcomes[False] > 5


def test_a_worker_that_dies_is_told_and_another_one_takes_its_place(program: Path) -> None:
    addresses = addresses_in(program, limit=5)
    with DwarfWorker() as worker:
        whole = worker.frames(str(program), addresses)
        assert any(whole)
        assert worker._child is not None
        worker._child.kill()
        with pytest.raises(ValueError, match="ended with status -9"):
            worker.frames(str(program), addresses)
        assert worker.frames(str(program), addresses) == whole
        with pytest.raises(ValueError, match="No such file"):
            worker.frames("/nowhere/to/be/found", addresses)
        with pytest.raises(ValueError, match=r"."):
            worker.frames("/bin/true", addresses) and worker.frames("/etc/hostname", addresses)
        assert worker.frames(str(program), addresses) == whole


def test_a_worker_that_is_out_of_time_is_given_up(program: Path) -> None:
    with DwarfWorker(time.monotonic() - 1) as worker:
        with pytest.raises(ValueError, match="out of time"):
            worker.frames(str(program), [0x1234])
        assert worker.overdue and worker._child is None


def test_a_nest_without_end_and_a_false_debug_link_are_not_followed(program: Path) -> None:
    elf = ElfFile(program.read_bytes())
    data = bytearray(program.read_bytes())
    # a section that claims to be the link, with a path in it
    section = elf._elf.get_section_by_name(".comment")
    link = b"../../etc/passwd\0" + struct.pack("<I", 7)
    data[section["sh_offset"] : section["sh_offset"] + len(link)] = link
    names = elf._elf.get_section(elf._elf["e_shstrndx"])
    place = data.index(b".comment\0", names["sh_offset"])
    assert len(b".comment") < len(b".gnu_debuglink")
    # the name does not fit in place of `.comment`: point to a place that says `.gnu_debuglink`, written over another
    longer = next(s.name for s in elf._elf.iter_sections() if len(s.name) >= len(".gnu_debuglink") and "note" in s.name)
    at = data.index(longer.encode() + b"\0", names["sh_offset"])
    data[at : at + len(longer)] = b".gnu_debuglink".ljust(len(longer), b"\0")
    index = next(i for i, s in enumerate(elf._elf.iter_sections()) if s.name == ".comment")
    struct.pack_into("<I", data, elf._elf["e_shoff"] + index * elf._elf["e_shentsize"], at - names["sh_offset"])
    assert place
    first = ElfFile(bytes(data))
    assert first.debug_link is None or "/" not in first.debug_link[0]

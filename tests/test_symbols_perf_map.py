"""Perf maps: growing, replaced, other people's, and hostile ones."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leakscope.record.symbols.address_space import AddressSpaces
from leakscope.record.symbols.interner import Interner
from leakscope.record.symbols.perf_map import MAX_NAME, PerfMap
from leakscope.record.symbols.stack_numbers import with_caller

PID, NAMESPACE_PID = 4711, 17


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with one process, of a PID namespace and root of its own."""
    (tmp_path / str(PID) / "root" / "tmp").mkdir(parents=True)
    uid = os.getuid()
    (tmp_path / str(PID) / "status").write_text(
        f"Name:\tjit\nNSpid:\t{PID}\t{NAMESPACE_PID}\nUid:\t{uid}\t{uid}\t0\t0\n"
    )
    (tmp_path / str(PID) / "maps").write_text("1000-9000 r-xp 00000000 00:00 0 \n")
    return tmp_path


@pytest.fixture
def path(proc: Path) -> Path:
    return proc / str(PID) / "root" / "tmp" / f"perf-{NAMESPACE_PID}.map"


def test_functions_are_found_as_the_map_grows(proc: Path, path: Path) -> None:
    jit = PerfMap(PID, proc)
    assert jit.function_at(0x1000) == ""  # there is no map yet
    path.write_text("1000 10 first function\n2000 20 Second::call(int)\n3000 10 half a li")
    assert [jit.function_at(at) for at in (0xFFF, 0x1000, 0x100F, 0x1010, 0x201F)] == [
        "", "first function", "first function", "", "Second::call(int)",
    ]  # fmt: skip
    assert jit.function_at(0x3000) == ""  # the compiler is still writing it
    with path.open("a") as file:
        file.write("ne\n1000 8 written over the first\n")
    assert jit.function_at(0x3000) == "half a line"
    # the newest is what is there now, and behind its end the old one still shows
    assert (jit.function_at(0x1004), jit.function_at(0x100C)) == ("written over the first", "first function")
    assert jit.path == f"/tmp/perf-{NAMESPACE_PID}.map"


def test_a_map_that_was_replaced_or_cut_is_read_anew(proc: Path, path: Path) -> None:
    jit = PerfMap(PID, proc)
    path.write_text("1000 10 one\n2000 10 two\n")
    assert jit.function_at(0x1000) == "one"
    path.write_text("5000 10 three\n")
    assert jit.function_at(0x5000) == "three"
    path.unlink()
    path.write_text("6000 10 four\n7000 10 five\n8000 10 six\n")
    assert (jit.function_at(0x7000), jit.function_at(0x1000)) == ("five", "one")


def test_a_process_that_is_gone_has_what_was_opened(proc: Path, path: Path) -> None:
    path.write_text("1000 10 late\n")
    jit = PerfMap(PID, proc)
    (proc / str(PID) / "status").unlink()
    assert jit.function_at(0x1000) == "late"
    assert PerfMap(PID, proc).function_at(0x1000) == ""
    assert PerfMap(999, proc).function_at(0x1000) == ""


@pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: changing owners needs root")
def test_only_a_map_of_the_processs_user_or_root_is_believed(proc: Path, path: Path) -> None:
    (proc / str(PID) / "status").write_text(f"NSpid:\t{PID}\t{NAMESPACE_PID}\nUid:\t1000\t1000\t1000\t1000\n")
    path.write_text("1000 10 name\n")
    believed = {}
    for uid in (0, 1000, 1001):
        os.chown(path, uid, uid)
        believed[uid] = PerfMap(PID, proc).function_at(0x1000)
    assert believed == {0: "name", 1000: "name", 1001: ""}


def test_links_and_pipes_are_not_followed(proc: Path, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.map"
    other.write_text("1000 10 of somebody else\n")
    path.symlink_to(other)
    assert PerfMap(PID, proc).function_at(0x1000) == ""
    path.unlink()
    os.mkfifo(path)
    assert PerfMap(PID, proc).function_at(0x1000) == ""
    # a container whose /tmp leads out of it
    path.unlink()
    path.parent.rmdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / path.name).write_text("1000 10 outside\n")
    path.parent.symlink_to(tmp_path / "outside")
    assert PerfMap(PID, proc).function_at(0x1000) == ""


def test_hostile_lines_are_passed_over(proc: Path, path: Path) -> None:
    rng = random.Random(2)
    noise = bytes(rng.randrange(256) for _ in range(200_000))
    lines = [
        b"", b"zz 10 no number", b"1000", b"1000 10", b"1000 10 ", b"-5 10 negative", b"1000 -10 negative",
        b"1000 0 empty", b"f" * 3000 + b" 1 huge", noise, b"4000 10 " + b"n" * 5000, b"5000 10 \xff\xfe\x1b[2J", b"6000 8 good",  # noqa: E501
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines) + b"\n" + b"no end of line" * 100_000)
    jit = PerfMap(PID, proc)
    assert jit.function_at(0x6000) == "good"
    assert jit.function_at(0x4000) == "n" * MAX_NAME
    assert jit.function_at(0x5000).endswith("\x1b[2J")  # escaped where it is shown
    assert jit.function_at(0x1000) == ""


def test_a_large_map_is_exact(proc: Path, path: Path) -> None:
    path.write_text("".join(f"{0x10000 + 32 * n:x} 20 f{n}\n" for n in range(50_000)))
    jit = PerfMap(PID, proc)
    assert all(jit.function_at(0x10000 + 32 * n + 31) == f"f{n}" for n in range(0, 50_000, 7))
    assert jit.function_at(0x10000 + 32 * 50_000) == ""


def test_frames_of_a_jit_are_named_in_stacks_and_other_code_stays_an_address(proc: Path, path: Path) -> None:
    path.write_text("2000 100 Lib::run\n")
    spaces = AddressSpaces(proc)
    spaces.seed(PID)
    walk, space = [0x2010, 0x2100, 0x4000, 0xFF0000], spaces.at(PID, 5)
    made = Interner(SimpleNamespace(lookup=lambda at: ("", "", 0)), spaces)  # type: ignore[arg-type]
    stack = made.native_stack(PID, space, walk)
    # the second is a return address: the call before it is the last byte of the function
    assert made.functions(stack) == ["", "Lib::run", "Lib::run"]
    frames: list[dict[str, Any]] = made.take_new_rows()[0].to_pylist()
    assert [(f["module"], f["offset"], f["kind"]) for f in frames] == [
        (f"/tmp/perf-{NAMESPACE_PID}.map", 0x2010, "native"),
        (f"/tmp/perf-{NAMESPACE_PID}.map", 0x2100, "native"),
        ("", 0x4000, "native"),  # in a mapping, where no function is known; what is in none ends the walk
    ]
    # a mapping without a file counts as code, so a return address into it is a caller; it is no row of `modules`
    with_call = made.native_stack(PID, space, with_caller(space, walk, 0x2050))
    assert made.functions(with_call) == ["", "Lib::run", "Lib::run", "Lib::run"]
    assert spaces.rows() == []


def test_a_mapping_of_memory_replaces_that_of_a_file(proc: Path) -> None:
    spaces = AddressSpaces(proc)
    spaces.map(PID, 1, 0x100000, 0x200000, 0, "/bin/true")
    spaces.map(PID, 2, 0x120000, 0x130000, 0, "//anon")
    spaces.map(PID, 3, 0x300000, 0x310000, 0, "/memfd:doublemapper (deleted)")
    space = spaces.at(PID, 5)
    for address in (0x120000, 0x300000):
        found = space.find(address)
        assert found is not None and found.module.path == ""

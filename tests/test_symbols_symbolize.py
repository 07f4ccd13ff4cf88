"""`leakscope symbolize` on captures made by tests: identities, crashes, damage, and what is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from capture_rows import manifest, numbered, rows
from recording import LEAKSCOPE, ROOT

from leakscope.capture import Capture, CaptureWriter, pack
from leakscope.capture import rewrite as rewriting
from leakscope.capture.rewrite import replace_tables
from leakscope.errors import BadInputError, OutputIncompleteError
from leakscope.symbols.debug_files import open_elf, recorded_segments

SOURCE = """
__attribute__((noinline)) int inner(int x) { return x * 3 + 1; }
static inline __attribute__((always_inline)) int between(int x) { return inner(x) + 2; }
__attribute__((noinline)) int outer(int x) { return between(x) * 5; }
int main(int argc, char **argv) { (void)argv; return outer(argc); }
"""
MODULE = "/srv/app/bin/server"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("program")
    (place / "server.c").write_text(SOURCE)
    command = ["gcc", "-O2", "-g", "-Wl,--build-id", "-o", place / "server", place / "server.c"]
    subprocess.run(command, check=True)
    return place / "server"


def offsets(program: Path) -> tuple[int, int, int]:
    """File offsets: behind the call of inner in outer, the entry of inner, the entry of main."""
    elf = open_elf(str(program))
    by_name = elf.function_offsets()
    listing = subprocess.run(["objdump", "-d", program], capture_output=True, text=True, check=True).stdout
    block = listing.split("<outer>:")[1].split("\n\n")[0].splitlines()
    call = next(i for i, text in enumerate(block) if "call" in text and "<inner>" in text)
    address = int(block[call + 1].split(":")[0], 16)
    segment = elf.code[0]
    return address - segment.address + segment.offset, by_name["inner"], by_name["main"]


@pytest.fixture
def capture(program: Path, tmp_path: Path) -> Path:
    """Frames 11 (outer, at its call), 12 (inner), 13 (nowhere), 14 (another module), 15 (kernel); stacks 1, 2, 7."""
    elf = open_elf(str(program))
    called, entered, _ = offsets(program)
    described = manifest()
    described.sources[0].facts["segments"] = {elf.build_id: [[s.offset, s.size_bytes, s.address] for s in elf.code]}
    writer = CaptureWriter.create(tmp_path / "c.lscope", described)
    frames = rows(
        "frames", 5, id=[11, 12, 13, 14, 15], function=["", "", "", "", "do_syscall_64"],
        module=[MODULE, MODULE, "", "/usr/lib/libother.so", "kernel"],
        build_id=[elf.build_id, elf.build_id, "", "77" * 20, ""],
        offset=[called, entered, 0xDEAD, 0x100, 0xFFFF0000], kind=["native"] * 4 + ["kernel"],
    )  # fmt: skip
    writer.write("frames", frames)
    writer.write("stacks", rows("stacks", 3, id=[1, 2, 7], frames=[[14, 11, 12], [], [11, 11, 13]]))
    writer.write("mem_events", numbered(1, 5))
    writer.finish()
    return tmp_path / "c.lscope"


def symbolize(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LEAKSCOPE, "symbolize", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def contents(path: Path) -> dict[int, list[tuple[str, int, str]]]:
    """The stacks as (function, line, kind) by id."""
    opened = Capture.open(path)
    assert opened.problems == []
    frames = {row["id"]: row for row in opened.table("frames").to_pylist()}
    return {
        row["id"]: [(frames[i]["function"], frames[i]["line"], frames[i]["kind"]) for i in row["frames"]]
        for row in opened.table("stacks").to_pylist()
    }


NAMED = {
    1: [("", 0, "native"), ("outer", 4, "native"), ("between", 3, "inlined"), ("inner", 2, "native")],
    2: [],
    7: [("outer", 4, "native"), ("between", 3, "inlined"), ("outer", 4, "native"), ("between", 3, "inlined"), ("", 0, "native")],  # noqa: E501
}  # fmt: skip


def test_in_place_with_only_the_debug_file(capture: Path, program: Path, tmp_path: Path) -> None:
    # given a debug file that no longer knows file offsets, and a capture that does
    (tmp_path / "debug").mkdir()
    subprocess.run(["objcopy", "--only-keep-debug", program, tmp_path / "debug" / "x"], check=True)
    before = Capture.open(capture).table("mem_events")
    done = symbolize(capture, "--debug-dir", tmp_path / "debug", "--json")
    assert done.returncode == 0, done.stderr
    assert contents(capture) == NAMED
    assert Capture.open(capture).table("mem_events").equals(before)
    assert json.loads(done.stdout) == {
        "schema": "leakscope-symbolize/1", "output": str(capture), "frames": 4, "unnamed_before": 4, "unnamed_after": 2,
        "without_line_before": 4, "without_line_after": 2, "inlined": 1, "problems": [], "changed": True,
        "missing": [
            {"module": "/usr/lib/libother.so", "build_id": "77" * 20, "frames": 1, "unnamed": 1,
             "reason": "no file with this build id was found"},
        ],
    }  # fmt: skip
    assert sorted(path.name for path in capture.parent.iterdir()) == ["c.lscope", "debug"]


def test_text_says_before_after_and_what_is_missing(capture: Path, program: Path) -> None:
    done = symbolize(capture, "--debug-dir", program.parent)
    assert done.stdout.splitlines() == [
        f"{capture}: 4 native frames",
        "  without a function  4 before, 2 now",
        "  without a line      4 before, 2 now",
        "  inlined functions   1 added",
        "still missing (build id, frames without a line, without a function, module: why):",
        f"  {'77' * 20}       1       1  /usr/lib/libother.so: no file with this build id was found",
    ]
    assert contents(capture) == NAMED


def test_without_recorded_segments_the_module_itself_is_needed(capture: Path, program: Path, tmp_path: Path) -> None:
    opened = Capture.open(capture)
    opened.manifest.sources[0].facts.clear()
    tables = {name: opened.table(name) for name in ("frames", "stacks")}
    replace_tables(capture, opened.manifest, tables)
    (tmp_path / "debug").mkdir()
    subprocess.run(["objcopy", "--only-keep-debug", program, tmp_path / "debug" / "x"], check=True)
    report = json.loads(symbolize(capture, "--debug-dir", tmp_path / "debug", "--json").stdout)
    reasons = {row["build_id"]: row["reason"] for row in report["missing"]}
    assert "add the module itself" in reasons[open_elf(str(program)).build_id] and report["unnamed_after"] == 4
    subprocess.run(["objcopy", "--strip-all", program, tmp_path / "debug" / "y"], check=True)
    assert symbolize(capture, "--debug-dir", tmp_path / "debug").returncode == 0
    assert contents(capture) == NAMED


def test_a_packed_capture_needs_an_output(capture: Path, program: Path, tmp_path: Path) -> None:
    packed = pack(Capture.open(capture), tmp_path / "c.tar")
    done = symbolize(packed, "--debug-dir", program.parent)
    assert done.returncode == 2 and "-o" in done.stderr
    done = symbolize(packed, "--debug-dir", program.parent, "-o", tmp_path / "out.lscope")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out.lscope") == NAMED
    assert contents(capture)[1][1] == ("", 0, "native")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.lscope"], "nowhere.lscope: no such capture"),
        (["{capture}", "--debug-dir", "/nowhere"], "--debug-dir is not a directory"),
        (["{capture}", "-o", "{capture}"], "exists already"),
    ],
)
def test_wrong_usage_is_one_line(capture: Path, arguments: list[str], says: str) -> None:
    done = symbolize(*(argument.format(capture=capture) for argument in arguments))
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_damaged_part_or_a_foreign_file_is_not_thrown_away(capture: Path, program: Path) -> None:
    (capture / "notes.txt").write_text("mine")
    done = symbolize(capture, "--debug-dir", program.parent)
    assert done.returncode == 2 and "notes.txt" in done.stderr
    (capture / "notes.txt").unlink()
    part = capture / "frames" / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    done = symbolize(capture, "--debug-dir", program.parent)
    assert done.returncode == 2 and "not changed" in done.stderr
    assert part.exists()


def test_damaged_parts_of_other_tables_and_incompleteness_stay_as_they_are(capture: Path, program: Path) -> None:
    opened = Capture.open(capture)
    opened.manifest.complete, opened.manifest.incomplete_reason = False, "the power went"
    replace_tables(capture, opened.manifest, {"stacks": opened.table("stacks")})
    part = capture / "mem_events" / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    problems = Capture.open(capture).problems
    assert len(problems) == 2 and "the power went" in problems[0]
    assert symbolize(capture, "--debug-dir", program.parent).returncode == 0
    assert Capture.open(capture).problems == problems
    assert Capture.open(capture).table("frames")["line"].to_pylist()[:2] == [4, 2]


def test_a_crash_at_any_moment_leaves_one_whole_capture(capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a rewrite that is cut off at its n-th system call of some kind, for every n
    opened = Capture.open(capture)
    frames = opened.table("frames")
    changed = frames.set_column(1, "function", pa.array(["new"] * frames.num_rows))
    old = {"": [], "new": []}  # what was seen

    class Cut(BaseException):
        pass

    real = {name: getattr(os, name) for name in ("fdatasync", "fsync", "rename", "mkdir", "link")}
    for after in range(60):
        left = [after]

        def cutting(name: str, left: list[int] = left) -> Any:
            def call(*arguments: Any, **more: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Cut
                return real[name](*arguments, **more)

            return call

        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, cutting(name))
            patch.setattr(rewriting.shutil, "rmtree", lambda *a, **b: None)
            try:
                replace_tables(capture, opened.manifest, {"frames": changed})
            except Cut:
                pass
            else:
                break
        now = Capture.open(capture)
        assert now.problems == []
        functions = set(now.table("frames")["function"].to_pylist())
        old["new" if functions == {"new"} else ""].append(after)
        assert functions in ({"", "do_syscall_64"}, {"new"})
        assert now.rows("mem_events") == 5 and now.rows("stacks") == 3
        for aside in capture.parent.glob(".*.tmp"):
            shutil.rmtree(aside)
    assert len(old[""]) >= 6
    assert set(Capture.open(capture).table("frames")["function"].to_pylist()) == {"new"}


def test_a_full_disk_changes_nothing(capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Capture.open(capture)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("leakscope.capture.writer.write_whole", full)
    with pytest.raises((OutputIncompleteError, BadInputError)):
        replace_tables(capture, opened.manifest, {"frames": opened.table("frames")})
    assert Capture.open(capture).problems == []
    assert [path.name for path in capture.parent.iterdir()] == ["c.lscope"]


def test_facts_of_others_are_not_believed_blindly() -> None:
    good = [[0x1000, 0x200, 0x401000]]
    facts = [
        {"segments": {"aa": good, "bb": [["x"]], "cc": [[1, 2]], "dd": 5, "ee": [[-1, 5, 7]], "ff": [[0, 1 << 70, 1]]}},
        {"segments": [1, 2]},
        {},
    ]
    assert recorded_segments(facts).keys() == {"aa"}
    (segment,) = recorded_segments(facts)["aa"]
    assert (segment.offset, segment.size_bytes, segment.address) == (0x1000, 0x200, 0x401000)

"""``leakscope import``, and ``attribute`` on reports: numbering, all or nothing, what is said, exit codes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from leakscope.capture import Capture, CaptureWriter, pack
from leakscope.capture import writer as writer_module
from leakscope.capture.ids import Numbering, renumbered
from leakscope.cli.main import main
from leakscope.errors import BadInputError
from leakscope.ingest import import_files
from leakscope.model.manifest import Manifest, Source
from leakscope.model.tables import TABLES
from tests.nsys_files import NsysFile, leaky_export
from tests.synthetic import SyntheticCapture
from tests.test_attribute import FILP, LEAKER, SOCKETPAIR
from tests.test_text_reports import SLAB_HEAD, cache, report_at, stack
from tests.test_torch_snapshot import snapshot

DATA = os.environ.get("LEAKSCOPE_TEST_DATA")
needs_data = pytest.mark.skipif(
    DATA is None, reason="NOT TESTED: real reports; set LEAKSCOPE_TEST_DATA to their folder"
)


@pytest.fixture
def nsys(tmp_path: Path) -> Path:
    return leaky_export(tmp_path / "run.sqlite")


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(), 4))
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A recording with a kernel leak."""
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(100, 256, user=LEAKER, kernel=SOCKETPAIR, **FILP)
    return capture.write(tmp_path / "recorded.lscope")


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def content(capture: Path) -> dict[str, str]:
    return {
        str(path.relative_to(capture)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(capture.rglob("*"))
        if path.is_file()
    }


def functions(capture: Capture, column: str, source: int) -> set[tuple[str, ...]]:
    """The stacks that mem_events of a source refer to, by the functions of their frames."""
    frames = {row["id"]: row["function"] for row in capture.table("frames").to_pylist()}
    stacks = {row["id"]: tuple(frames[i] for i in row["frames"]) for row in capture.table("stacks").to_pylist()}
    events = capture.table("mem_events").to_pylist()
    return {stacks[e[column]] for e in events if e["source_id"] == source and e[column]}


def test_several_files_make_a_capture(
    nsys: Path, torch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new.lscope"

    code, out, err = run(capsys, "import", nsys, torch, "-o", target, "--pid", 55)

    assert (code, err) == (0, "")
    assert f"{nsys}: Nsight Systems 2026.9.9.1, source 0" in out
    assert "  120 memory events, 120 calls, 40 ranges, 2 stacks, 1 process; times: the target's system clock" in out
    assert f"{torch}: PyTorch, source 1" in out and "  cannot say: the file names neither process" in out
    assert out.splitlines()[-1] == f"{target}  (next: leakscope attribute {target})"
    capture = Capture.open(target)
    assert capture.problems == []
    assert [(s.id, s.kind, s.name, s.clock) for s in capture.manifest.sources] == [
        (0, "nsys", "run.sqlite", "monotonic"), (1, "torch_snapshot", "snapshot.pickle", "utc"),
    ]  # fmt: skip
    first = capture.manifest.sources[0]
    assert first.anchors[0].realtime_ns == first.facts["session_start_utc_ns"]
    times = capture.table("mem_events").filter(pa.compute.equal(capture.table("mem_events")["source_id"], 0))["ts_ns"]
    assert first.start_ns <= min(times.to_pylist()) and max(times.to_pylist()) <= first.end_ns
    assert set(capture.table("mem_events")["source_id"].to_pylist()) == {0, 1}
    assert {e["pid"] for e in capture.table("mem_events").to_pylist() if e["source_id"] == 1} == {55}
    assert functions(capture, "user_stack", 0) == {("main", "handle", "cudaMalloc"), ("main", "scratch", "cudaMalloc")}
    assert functions(capture, "python_stack", 1) == {("train", "relu")}


def test_into_a_recording_ids_never_collide(recorded: Path, nsys: Path, torch: Path) -> None:
    before = Capture.open(recorded)
    was = {name: before.table(name).to_pylist() for name in TABLES}
    stacks_before = functions(before, "user_stack", 0)

    import_files([nsys], recorded)
    import_files([torch], recorded)

    after = Capture.open(recorded)
    assert after.problems == [] and [s.id for s in after.manifest.sources] == [0, 1, 2]
    for name in TABLES:
        assert after.table(name).to_pylist()[: len(was[name])] == was[name], name
        if name in ("stacks", "frames", "calls", "launches", "marks"):
            ids = after.table(name)["id"].to_pylist()
            assert len(ids) == len(set(ids)), name
    assert functions(after, "user_stack", 0) == stacks_before
    assert functions(after, "user_stack", 1) == {("main", "handle", "cudaMalloc"), ("main", "scratch", "cudaMalloc")}
    calls = {row["id"]: row for row in after.table("calls").to_pylist()}
    marks = {row["id"]: row for row in after.table("marks").to_pylist()}
    for event in after.table("mem_events").to_pylist():
        if event["source_id"] == 1:
            assert calls[event["call_id"]]["source_id"] == 1
            assert marks[event["mark_id"]]["name"] == "request"


def test_numbers_of_a_capture_that_are_not_dense(tmp_path: Path) -> None:
    # given: a capture whose call ids come near the end of their range
    writer = CaptureWriter.create(tmp_path / "c.lscope", Manifest(sources=[Source(0, "recording", "x", "monotonic")]))
    row = {field.name: 0 for field in TABLES["calls"]} | {"api": "mmap"}
    writer.write("calls", pa.Table.from_pylist([row | {"id": 5}, row | {"id": (1 << 63) - 2}], TABLES["calls"]))
    writer.finish()
    ours = pa.Table.from_pylist([row | {"id": i + 1, "parent_id": i} for i in range(9)], TABLES["calls"])

    numbering = Numbering(Capture.open(tmp_path / "c.lscope"))
    bases = [numbering.take({"calls": ours}) for _ in range(2)]

    moved = [renumbered({"calls": ours}, base, 3)["calls"].to_pylist() for base in bases]
    assert [m["id"] for m in moved[0]] == list(range(6, 15)) and [m["id"] for m in moved[1]] == list(range(15, 24))
    assert [m["parent_id"] for m in moved[0]] == [0, *range(6, 14)]
    assert {m["source_id"] for m in moved[0]} == {3}


@pytest.mark.parametrize("bad", ["unknown", "damaged", "missing", "again"])
def test_all_or_nothing(
    recorded: Path, nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    # given: a good file and one that cannot be imported
    path = tmp_path / "bad.sqlite"
    if bad == "unknown":
        path.write_text("hello")
    elif bad == "damaged":
        path.write_bytes(nsys.read_bytes()[:20000])
    elif bad == "again":
        path = nsys
    before = content(recorded)

    code, out, err = run(capsys, "import", nsys, path, "-o", recorded)
    fresh, _, _ = run(capsys, "import", nsys, path, "-o", tmp_path / "fresh.lscope")

    assert (code, fresh, out) == (2, 2, "")
    assert err.startswith("leakscope: ") and err.count("\n") == 1 and str(path) in err
    assert content(recorded) == before
    assert not (tmp_path / "fresh.lscope").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_full_disk_adds_nothing(
    recorded: Path, nsys: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write = content(recorded), writer_module.write_whole
    written: list[str] = []

    def fills_up(path: Path, data: bytes) -> None:
        written.append(path.name)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(writer_module, "write_whole", fills_up)
    code, _, err = run(capsys, "import", nsys, "-o", recorded)

    assert code == 5 and err.count("\n") == 1 and "nothing was added" in err and str(recorded) in err
    assert content(recorded) == before
    assert [p.name for p in recorded.parent.iterdir() if p.name.startswith(".")] == []


def test_the_same_file_twice_is_refused(nsys: Path, tmp_path: Path) -> None:
    import_files([nsys], tmp_path / "c.lscope")
    copy = tmp_path / "renamed.db"
    copy.write_bytes(nsys.read_bytes())
    with pytest.raises(BadInputError, match="is in the capture already, as source 0"):
        import_files([copy], tmp_path / "c.lscope")


def test_what_cannot_be_added_to(nsys: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = CaptureWriter.create(tmp_path / "running.lscope", Manifest())
    packed = pack(Capture.open(recorded), tmp_path / "packed.tar")
    foreign = tmp_path / "folder"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    next((recorded / "mem_events").iterdir()).write_bytes(b"damaged")

    for target, message in (
        (running.path, "is being recorded"), (packed, "is one file"), (foreign, "not a leakscope capture"),
        (recorded, "is damaged"),
    ):  # fmt: skip
        with pytest.raises(BadInputError, match=message):
            import_files([nsys], target)
    assert (foreign / "notes.txt").read_text() == "mine"
    with pytest.raises(BadInputError, match="captures need no import"):
        import_files([running.path], tmp_path / "x.lscope")


def test_an_incomplete_recording_stays_incomplete(nsys: Path, tmp_path: Path) -> None:
    writer = CaptureWriter.create(tmp_path / "cut.lscope", Manifest(sources=[Source(0, "recording", "x", "monotonic")]))
    writer.finish(complete=False, reason="the disk was full")

    import_files([nsys], writer.path)

    assert Capture.open(writer.path).problems == ["the capture is incomplete: the disk was full"]


def test_default_name_and_json(
    nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    code, out, err = run(capsys, "import", nsys, "--json")
    again = run(capsys, "import", nsys)

    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["capture"] == "run.sqlite.lscope" and Path("run.sqlite.lscope/manifest.json").exists()
    (file,) = told["files"]
    assert (file["kind"], file["tool"], file["version"], file["source_id"]) == (
        "nsys",
        "Nsight Systems",
        "2026.9.9.1",
        0,
    )
    assert file["rows"]["mem_events"] == 120 and file["limits"] and file["facts"]["schema"] == "3.99.0"
    assert again[0] == 2 and "exists already; add to it with -o" in again[2]


def test_help_names_the_verb_and_its_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert "import" in run(capsys, "--help")[1]
    told = run(capsys, "import", "--help")[1]
    for word in ("--pid", "--tz", "--number-format", "--json", "Nsight", "PyTorch", "memleak", "slabinfo"):
        assert word in told


def test_a_bar_on_a_terminal_and_quiet_in_a_pipe(tmp_path: Path) -> None:
    # given: a file that is large enough for a bar
    path = tmp_path / "big.pickle"
    row = {"action": "alloc", "addr": 1, "size": 1, "stream": 0, "time_us": 1, "frames": []}
    trace = [dict(row, addr=i << 9, user_metadata=f"{i:0300}") for i in range(30_000)]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}, 4))
    assert path.stat().st_size > 8 << 20
    command = [sys.executable, "-m", "leakscope", "import", str(path), "-o"]

    piped = subprocess.run([*command, str(tmp_path / "a.lscope")], capture_output=True, text=True, check=True)
    parent, child = pty.openpty()
    shown = subprocess.Popen([*command, str(tmp_path / "b.lscope")], stdout=subprocess.PIPE, stderr=child)
    os.close(child)
    seen = b""
    while True:
        try:
            chunk = os.read(parent, 4096)
        except OSError:
            break
        if not chunk:
            break
        seen += chunk
    out, _ = shown.communicate()
    os.close(parent)

    assert piped.stderr == "" and "30,000 memory events" in piped.stdout
    assert b"big.pickle" in seen and b"30,000 memory events" in out


def test_names_are_escaped_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a\x1b[31mb.txt"
    path.write_text(SLAB_HEAD + cache("filp", 1, 1, 1))

    code, out, _ = run(capsys, "import", path, "-o", tmp_path / "c.lscope")

    assert code == 0 and "\x1b" not in out
    assert "\x1b" not in Capture.open(tmp_path / "c.lscope").manifest.sources[0].name


# attribute


def test_attribute_an_export_with_a_leak(nsys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "attribute", nsys, "--json")

    report: dict[str, Any] = json.loads(out)
    verdict = report["verdict"]
    assert (code, err) == (0, "")
    assert (verdict["verdict"], verdict["layer"], verdict["kept_bytes"]) == ("leak", "gpu", 40 << 20)
    assert verdict["culprit"]["stack"] == ["main", "handle", "cudaMalloc"]
    (entry,) = report["inputs"]
    assert (entry["kind"], entry["mem_events"], entry["tool"]) == ("nsys", 120, "Nsight Systems")


def test_attribute_memleak_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memleak.txt"
    path.write_text(
        "Attaching to pid 77, Ctrl+C to quit.\n"
        + "".join(
            report_at(
                f"12:{i // 12:02}:{i % 12 * 5:02}", stack(160 * i, 10 * i, "leak+0x1 [app]", "main+0x2 [app]"),
                stack(64, 4, "steady+0x1 [app]", "main+0x2 [app]"),
            )
            for i in range(1, 60)
        )
    )  # fmt: skip
    report = json.loads(run(capsys, "attribute", path, "--json")[1])

    verdict = report["verdict"]
    assert (verdict["verdict"], verdict["layer"], verdict["culprit"]["frame"]) == ("leak", "host", "leak")
    assert verdict["kept_bytes"] == 160 * 59 and verdict["growth"]["bytes_per_s"] == pytest.approx(32, rel=0.05)


def test_attribute_reports_beside_a_capture(
    recorded: Path, nsys: Path, torch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = NsysFile()
    for step in range(3):
        without.call(step * 10, step * 10 + 5, "cudaMalloc_v3020")
    calls_only = without.write(tmp_path / "calls.sqlite")

    report = json.loads(run(capsys, "attribute", recorded, calls_only, "--json")[1])
    both = json.loads(run(capsys, "attribute", recorded, nsys, torch, "--json")[1])
    text = run(capsys, "attribute", recorded, calls_only)[1]

    assert [i["kind"] for i in report["inputs"]] == ["capture", "nsys"]
    assert (report["verdict"]["verdict"], report["verdict"]["layer"]) == ("leak", "kernel")
    assert any(
        "--cuda-memory-usage=true; its 3 allocating calls are visible" in m for m in report["verdict"]["missing"]
    )
    assert [i["kind"] for i in both["inputs"]] == ["capture", "nsys", "torch_snapshot"]
    leaks = {v["layer"]: v["kept_bytes"] for v in [both["verdict"], *both["findings"]] if v["verdict"] == "leak"}
    assert leaks == {"kernel": 100 * 256, "gpu": 40 << 20}
    assert "found: no GPU memory in it" in text and "leakscope query" in text


def test_attribute_a_snapshot_alone_is_judged_by_what_its_memory_is(
    torch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "attribute", torch, "--json", "--exit-code")

    report = json.loads(out)
    assert (code, report["verdict"]["verdict"], report["verdict"]["class"]) == (0, "not_leak", "fragmentation")
    assert any("fragmentation" in missing for missing in report["verdict"]["missing"])
    assert not any(site["added_to_layer"] for site in report["sites"] if site["kind"] == "pool_block")


def test_attribute_what_is_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("dear reader")
    for evidence in (path, tmp_path / "nothing"):
        code, out, err = run(capsys, "attribute", evidence)
        assert (code, out) == (2, "") and str(evidence) in err and err.count("\n") == 1


@needs_data
def test_attribute_and_import_real_files_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert DATA is not None
    files = [
        *sorted((Path(DATA) / "nsys").glob("*.sqlite")), *sorted((Path(DATA) / "torch_snapshot").glob("*.pickle")),
        *sorted((Path(DATA) / "ncu_rep").glob("ncu-*")), *sorted((Path(DATA) / "ncu_csv").iterdir()),
        *(Path(DATA) / "ebpf_text" / name for name in ("bcc_memleak_example.txt", "slabinfo_rhel7.txt")),
    ]  # fmt: skip
    target = tmp_path / "all.lscope"

    code, out, err = run(capsys, "import", *files, "-o", target, "--json")
    some = [files[0], next(f for f in files if f.suffix == ".pickle"), next(f for f in files if f.suffix == ".ncu-rep")]
    report = json.loads(run(capsys, "attribute", *some, "--json")[1])

    assert (code, err) == (0, "")
    capture = Capture.open(target)
    assert len(capture.manifest.sources) == len(files)
    assert [i["kind"] for i in report["inputs"]] == ["nsys", "torch_snapshot", "ncu_rep"]
    assert capture.rows("kernel_profiles") > 100 and capture.rows("mem_events") > 14_000
    for name in ("stacks", "frames", "calls", "launches", "marks", "kernel_profiles"):
        ids = capture.table(name)["id"].to_pylist()
        assert len(ids) == len(set(ids)), name
    everything = out + json.dumps(report)
    assert "/home/" not in json.dumps([file["facts"] for file in json.loads(out)["files"]])
    assert "hf_" not in everything

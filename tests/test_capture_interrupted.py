"""Captures whose writer was killed or whose disk filled: what was written reads, and the rest is said."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from capture_rows import incompressible, manifest, numbered
from small_disk import small_disk

from leakscope.capture import Capture, CaptureWriter
from leakscope.errors import OutputIncompleteError

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from capture_rows import manifest, rows
from leakscope.capture import CaptureWriter
writer = CaptureWriter.create(Path({path!r}), manifest())
print("ready", flush=True)
part = 0
while True:
    writer.write("mem_events", rows("mem_events", 101, ts_ns=range(101 * part, 101 * (part + 1))))
    part += 1
    print(part, flush=True)
    if part % 5 == 0:
        writer.save_manifest()
"""


@pytest.mark.parametrize("seed", range(5))
def test_kill_9_loses_no_finished_part(tmp_path: Path, seed: int) -> None:
    # given a writer that says after each part that it is written
    path = tmp_path / "a.lscope"
    code = WRITER.format(tests=str(Path(__file__).parent), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    # when it is killed at a random moment
    time.sleep(random.Random(seed).uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    said = process.stdout.read().split("\n")[:-1]
    process.wait()
    # then the capture says so and has all that was said, and nothing half
    capture = Capture.open(path)
    finished = int(said[-1]) if said else 0
    assert capture.problems == ["the capture is incomplete: its writer was stopped before it could finish"]
    assert len(capture.parts("mem_events")) in (finished, finished + 1)
    times = capture.table("mem_events", ["ts_ns"])["ts_ns"].to_pylist()
    assert times == list(range(101 * len(capture.parts("mem_events"))))


def test_a_capture_that_was_never_finished_reads_with_its_unlisted_parts(tmp_path: Path) -> None:
    writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())
    writer.write("mem_events", numbered(0, 3))
    writer.save_manifest()
    writer.write("mem_events", numbered(3, 4))
    (tmp_path / "a.lscope" / "mem_events" / "part-000003.parquet.tmp").write_bytes(b"PAR1 half a part")

    capture = Capture.open(tmp_path / "a.lscope")

    assert [part.rows for part in capture.manifest.parts] == [3]
    assert capture.table("mem_events", ["ts_ns"])["ts_ns"].to_pylist() == list(range(7))
    assert capture.problems == ["the capture is incomplete: its writer was stopped before it could finish"]


def test_finish_can_say_why_the_capture_is_incomplete(tmp_path: Path) -> None:
    CaptureWriter.create(tmp_path / "a.lscope", manifest()).finish(complete=False, reason="the ring was lost")

    assert Capture.open(tmp_path / "a.lscope").problems == ["the capture is incomplete: the ring was lost"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_disk(tmp_path / "disk", "1m") as place:
        yield place


def test_a_full_disk_is_said_once_and_everything_before_it_reads(disk: Path) -> None:
    # given a capture on a small disk
    path = disk / "a.lscope"
    writer = CaptureWriter.create(path, manifest())
    written = 0
    # when the disk fills
    with pytest.raises(OutputIncompleteError) as full:
        while written < 1_000_000:
            writer.write("mem_events", incompressible(written))
            written += 5_000
    # then the message says what, where and what is left, and no half part lies around
    assert "No space left on device" in str(full.value) and str(path) in str(full.value)
    assert "\n" not in str(full.value)
    assert list(path.rglob("*.tmp")) == []
    # and finishing works, and the capture has every part before it and the reason
    writer.finish()
    capture = Capture.open(path)
    assert written > 0
    assert capture.table("mem_events", ["ts_ns"])["ts_ns"].to_pylist() == list(range(written))
    [problem] = capture.problems
    assert problem.startswith("the capture is incomplete: mem_events/part-")
    assert problem.endswith(".parquet could not be written: No space left on device")


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError):
        while file.write(bytes(4096)):
            pass


def test_finish_on_a_full_disk_raises_once_and_the_capture_stays_incomplete(disk: Path) -> None:
    path = disk / "a.lscope"
    writer = CaptureWriter.create(path, manifest())
    writer.write("mem_events", numbered(0, 3))
    fill(disk)

    with pytest.raises(OutputIncompleteError, match="No space left on device"):
        writer.finish()
    writer.finish()  # a second try after a failure that was raised says nothing new: it has room to write it down

    capture = Capture.open(path)
    assert capture.table("mem_events", ["ts_ns"])["ts_ns"].to_pylist() == [0, 1, 2]
    assert capture.problems == [
        "the capture is incomplete: manifest.json could not be written: No space left on device"
    ]


def test_creating_on_a_full_disk_leaves_nothing(disk: Path) -> None:
    fill(disk)

    with pytest.raises(OutputIncompleteError, match="No space left on device"):
        CaptureWriter.create(disk / "a.lscope", manifest())

    assert [entry.name for entry in disk.iterdir()] == ["ballast"]

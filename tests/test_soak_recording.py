"""One soak that records: its target is started again, its recorder is killed and goes on with the same capture."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recording
from recording import LEAKSCOPE, ROOT, Waiting, until

from leakscope.capture import Capture
from leakscope.capture.continuation import CUT_SHORT
from leakscope.errors import LeakscopeError

COUNT = 50
SITE = "map_whole_and_forget"
KEPT = """
SELECT sum(t.allocated_bytes - t.freed_bytes)::BIGINT FROM census_sites s
JOIN (SELECT source_id, site, max(allocated_bytes) AS allocated_bytes, max(freed_bytes) AS freed_bytes
      FROM census_totals GROUP BY ALL) t ON t.source_id = s.source_id AND t.site = s.id
JOIN stacks k ON k.id = s.user_stack JOIN frames f ON f.id = k.frames[-1] OR f.id = k.frames[-2]
WHERE s.pid = ? AND f.function = ? AND s.api = 'mmap'
"""


class Soak:
    """A `leakscope soak` of a process, with its streams in files."""

    def __init__(self, path: Path, pid: int, name: str) -> None:
        self.path = path
        self._streams = [path.parent / f"{name}.{stream}" for stream in ("stdout", "stderr")]
        options = ["--loader", recording.LOADER, "--interval", "500ms", "--limit", "1GiB", "--json", "-o", str(path)]
        with self._streams[0].open("w") as stdout, self._streams[1].open("w") as stderr:
            self.process = subprocess.Popen(
                [*LEAKSCOPE, "soak", *options, "-p", str(pid)], cwd=ROOT, stdout=stdout, stderr=stderr,
                stdin=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": "1"},
            )  # fmt: skip

    @property
    def stderr(self) -> str:
        return self._streams[1].read_text()

    def wait_sources(self, count: int) -> None:
        """Until so many recordings of the capture have begun."""

        def begun() -> bool:
            assert self.process.poll() is None, self.stderr
            try:
                sources = json.loads((self.path / "manifest.json").read_text())["sources"]
            except (OSError, ValueError):
                return False
            return len(sources) == count and bool(sources[-1]["start_ns"])

        until(begun)

    def wait_said(self, text: str) -> None:
        until(lambda: text in self.stderr)

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; (exit code, stdout)."""
        self.process.send_signal(number)
        code = self.process.wait(120)
        return code, self._streams[0].read_text()


def kept(path: Path, pid: int) -> int:
    """Bytes that the capture so far says a process keeps at the site; a capture that is being written reads."""
    time.sleep(0.3)  # opening it checks every part
    try:
        with Capture.open(path).connect() as con:
            row = con.execute(KEPT, [pid, SITE]).fetchone()
    except LeakscopeError:  # a part that vanished or appeared meanwhile
        return 0
    return int(row[0] or 0) if row else 0


class Run:
    """What the module's one soak left."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "soak.lscope"
        first = Waiting("leak_mmap", "--count", COUNT)
        second = None
        soak = Soak(self.path, first.pid, "first")
        try:
            soak.wait_sources(1)
            self.truth = {site["function"]: site["bytes"] for site in first.go()["sites"]}[SITE]
            until(lambda: kept(self.path, first.pid) == self.truth)
            first.end()
            second = Waiting("leak_mmap", "--count", COUNT)
            soak.wait_said(f"started again: leak_mmap (PID {second.pid})")
            second.go()
            until(lambda: kept(self.path, second.pid) == self.truth)
            self.refused = subprocess.run(
                [*LEAKSCOPE, "soak", "-o", str(self.path), "-p", str(second.pid)], capture_output=True, text=True,
                cwd=ROOT,
            )  # fmt: skip
            soak.end(signal.SIGKILL)
            self.before = Capture.open(self.path)
            self.manifest_before = json.loads((self.path / "manifest.json").read_text())
            soak = Soak(self.path, second.pid, "second")
            soak.wait_sources(2)
            soak.wait_said("leakscope: price")  # from here on a signal finds something recorded
            self.pids = (first.pid, second.pid)
            self.code, out = soak.end(signal.SIGINT)
            self.report: dict[str, Any] = json.loads(out)
            self.stderr = soak.stderr
        finally:
            for process in (first, second):
                if process is not None:
                    process.end()
            if soak.process.poll() is None:
                soak.process.kill()


@pytest.fixture(scope="module")
def run(bpf: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield Run(tmp_path_factory.mktemp("soak"))


def test_a_target_that_is_started_again_is_followed_to_the_byte(run: Run) -> None:
    # given a process that kept so much and was killed, and another like it that did the same
    soak = run.report["soak"]
    # then both stand in the capture, each with its own bytes, and the restart is told
    assert [kept(run.path, pid) for pid in run.pids] == [run.truth, run.truth]
    assert soak["generations"] == 2
    (restart,) = [one for one in soak["happenings"] if one["what"] == "target"]
    assert restart["text"] == f"the target was started again: leak_mmap (PID {run.pids[1]})"


def test_a_recorder_that_was_killed_goes_on_with_its_capture(run: Run) -> None:
    capture = Capture.open(run.path)
    soak = run.report["soak"]
    # then what the first one had written is there still, beside the second one's
    assert run.code == 130 and soak["ended_by"] == "signal"
    assert soak["sources"] == 2 and [source.id for source in capture.manifest.sources] == [0, 1]
    assert capture.problems == []
    first, second = capture.manifest.sources
    assert CUT_SHORT in first.limits and CUT_SHORT not in second.limits
    with capture.connect() as con:
        assert [row[0] for row in con.execute("SELECT DISTINCT source_id FROM samples ORDER BY 1").fetchall()] == [0, 1]
        # ids of both do not collide
        for table in ("frames", "stacks"):
            counts = con.execute(f"SELECT count(*), count(DISTINCT id) FROM {table}").fetchone()
            assert counts is not None and counts[0] == counts[1]
    # and the gap is told
    (gap,) = [one for one in soak["happenings"] if one["what"] == "gap"]
    assert "the recorder before it was killed" in gap["text"]


def test_two_recorders_never_share_a_capture(run: Run) -> None:
    assert run.refused.returncode == 2
    assert "another leakscope records into it now" in run.refused.stderr
    assert len(run.manifest_before["sources"]) == 1

"""A soak through restarts, without probes: going on with a capture, commands that are started again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from capture_rows import rows, small_capture

from leakscope.capture import Capture, CaptureWriter
from leakscope.capture.continuation import ContinuingWriter, sole_recorder
from leakscope.errors import BadInputError, OutputIncompleteError
from leakscope.model.manifest import ClockAnchor, Manifest, Source
from leakscope.model.recording import Summary
from leakscope.model.tables import TABLES
from leakscope.record.options import RecordOptions
from leakscope.soak import live
from leakscope.soak.watch import Plan, Watch

# --- going on with a capture


def test_a_second_source_is_written_behind_the_first(tmp_path: Path) -> None:
    # given a capture, and a recording that numbers its rows from 1 as every recording does
    path = small_capture(tmp_path / "run.lscope")
    before = Capture.open(path)
    rows = {name: before.table(name) for name in TABLES if before.rows(name)}
    writer = ContinuingWriter.open(path, Source(id=0, kind="recording", name="again", clock="monotonic"))
    assert not Capture.open(path).manifest.complete
    for name, table in rows.items():
        writer.write(name, table)
    writer.finish()
    # then both are there, ids and references moved along
    after = Capture.open(path)
    assert after.problems == [] and [source.id for source in after.manifest.sources] == [0, 1]
    for name, table in rows.items():
        assert after.rows(name) == 2 * table.num_rows
    with after.connect() as con:
        unresolved = con.execute(
            "SELECT count(*) FROM mem_events WHERE user_stack <> 0 AND user_stack NOT IN (SELECT id FROM stacks)"
        ).fetchone()
        per_source = con.execute(
            "SELECT source_id, count(DISTINCT user_stack) FROM mem_events GROUP BY 1 ORDER BY 1"
        ).fetchall()
        ids = con.execute("SELECT count(*), count(DISTINCT id) FROM stacks").fetchone()
    assert unresolved == (0,) and ids is not None and ids[0] == ids[1]
    assert [source for source, _ in per_source] == [0, 1] and per_source[0][1] == per_source[1][1]


def test_a_capture_has_one_recorder_at_a_time(tmp_path: Path) -> None:
    path = small_capture(tmp_path / "run.lscope")
    refused = pytest.raises(BadInputError, match="another leakscope records into it now")
    with sole_recorder(path), refused, sole_recorder(path):
        pass
    with sole_recorder(path):  # and the next one once it has ended
        pass


def test_a_damaged_capture_is_not_continued(tmp_path: Path) -> None:
    path = small_capture(tmp_path / "run.lscope")
    part = next(path.glob("*/part-000001.parquet"))
    part.write_bytes(part.read_bytes()[:-10])
    with pytest.raises(BadInputError, match="is damaged"):
        ContinuingWriter.open(path, Source(id=0, kind="recording", name="again", clock="monotonic"))


def test_a_disk_that_is_full_leaves_the_old_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_capture(tmp_path / "run.lscope")
    manifest = (path / "manifest.json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("leakscope.capture.writer.write_whole", full)
    with pytest.raises(OutputIncompleteError):
        ContinuingWriter.open(path, Source(id=0, kind="recording", name="again", clock="monotonic"))
    assert (path / "manifest.json").read_bytes() == manifest and Capture.open(path).manifest.complete


# --- commands that end


class FakeRecorder:
    """Stands in for the recorder: a life of the command is a source with two samples; its exit statuses are given."""

    statuses: ClassVar[list[int]] = []

    def __init__(
        self, options: RecordOptions, on_ready: Callable[[str], None], on_samples: object, observer: object
    ) -> None:
        self._options, self._on_ready = options, on_ready

    def run(self) -> Summary:
        path, now = self._options.output, time.monotonic_ns()
        anchor = ClockAnchor(time.time_ns(), now, now)
        source = Source(
            0, "recording", "x", "monotonic", start_ns=now, end_ns=now + 1000, anchors=[anchor],
            options={"steady": True},
        )  # fmt: skip
        exists = path.exists()
        writer = (
            ContinuingWriter.open(path, source) if exists else CaptureWriter.create(path, Manifest(sources=[source]))
        )
        self._on_ready("free")
        writer.write("samples", rows("samples", 2, ts_ns=[now, now + 1000], scope=["process"] * 2, counter=["rss"] * 2))
        writer.finish()
        return Summary(path, "target", 0.0, {}, {}, [], self.statuses.pop(0))


@pytest.mark.parametrize(
    ("restart", "statuses", "lives", "last"),
    [
        ("no", [3], 1, "the command ended with exit status 3"),
        ("on-failure", [3, -9, 0], 3, "the command ended with exit status 0"),
        ("always", [0, 0, 0], 3, "the command ended with exit status 0, 3 times within 10 s each: not started again"),
    ],
)
def test_a_command_that_ended_is_started_again_as_asked(
    restart: str, statuses: list[int], lives: int, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a command whose lives end at once with these statuses, and no patience in between
    monkeypatch.setattr(live, "Recorder", FakeRecorder)
    monkeypatch.setattr(FakeRecorder, "statuses", list(statuses))
    monkeypatch.setattr(live.LiveSoak, "_pause", lambda self, seconds: None)
    monkeypatch.setattr(live, "MOST_QUICK", 3 if restart == "always" else 99)
    options = RecordOptions(tmp_path / "run.lscope", command=["x"], resume=True, steady=True)
    said: list[str] = []
    soak = live.LiveSoak(options, Watch(Plan("x", "x", 3600.0)), restart, lambda state: None, said.append)
    summary = soak.run()
    # then each life is a recording of the one capture
    assert (summary.sources, summary.ended_by, len(said)) == (lives, "target", lives)
    assert [one.text for one in summary.happenings if one.what == "note"][-1] == last


def test_a_soak_whose_time_is_over_only_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a capture of a soak that began long ago
    monkeypatch.setattr(live, "Recorder", FakeRecorder)
    monkeypatch.setattr(FakeRecorder, "statuses", [0])
    options = RecordOptions(tmp_path / "run.lscope", command=["x"], resume=True, steady=True)
    plan = Plan("x", "x", 3600.0)
    live.LiveSoak(options, Watch(plan), "no", lambda state: None, lambda price: None).run()
    plan.duration_s = 1e-3
    summary = live.LiveSoak(options, Watch(plan), "no", lambda state: None, lambda price: None).run()
    assert (summary.ended_by, summary.sources) == ("duration", 1)


def test_a_signal_while_a_later_recording_begins_still_gives_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a soak whose first recording ended, and Ctrl-C while the probes of the next are being attached
    monkeypatch.setattr(live, "Recorder", FakeRecorder)
    monkeypatch.setattr(FakeRecorder, "statuses", [1])
    monkeypatch.setattr(live.LiveSoak, "_pause", lambda self, seconds: None)
    record, options = FakeRecorder.run, RecordOptions(tmp_path / "run.lscope", command=["x"], resume=True, steady=True)

    def run(self: FakeRecorder) -> Summary:
        if not self.statuses:
            raise KeyboardInterrupt
        return record(self)

    monkeypatch.setattr(FakeRecorder, "run", run)
    soak = live.LiveSoak(options, Watch(Plan("x", "x", 3600.0)), "always", lambda state: None, lambda price: None)
    summary = soak.run()
    assert (summary.ended_by, summary.sources) == ("signal", 1)
    # and before anything was recorded there is none
    options.output = tmp_path / "other.lscope"
    with pytest.raises(KeyboardInterrupt):
        live.LiveSoak(options, Watch(Plan("x", "x", 9.0)), "no", lambda state: None, lambda price: None).run()


def test_a_capture_that_no_soak_made_is_not_continued(tmp_path: Path) -> None:
    path = small_capture(tmp_path / "run.lscope")
    options = RecordOptions(path, command=["x"], resume=True, steady=True)
    soak = live.LiveSoak(options, Watch(Plan("x", "x", 9.0)), "no", lambda state: None, lambda price: None)
    with pytest.raises(BadInputError, match="is not the capture of a soak"):
        soak.run()

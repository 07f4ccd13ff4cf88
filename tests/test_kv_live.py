"""KV events of a live engine: subscribed, replayed, interrupted, or not to be had."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kv_publisher import Publisher, batch, frames_of, later, recording, stored
from kv_recorded import held_in

from leakscope.capture import Capture
from leakscope.capture.addition import adding_to
from leakscope.capture.ids import Numbering
from leakscope.cli.main import main
from leakscope.errors import BadInputError
from leakscope.ingest.files import enter
from leakscope.model.manifest import Source
from leakscope.streams import Collecting, address_of, collect
from leakscope.streams.clock import Deadline
from leakscope.streams.kv_subscriber import KvSubscriber
from nsight_parsers.kv_events import EventBook


@pytest.mark.parametrize("topics", [True, False], ids=["replay with topics", "replay without"])
def test_live_with_gaps_and_a_restart_finds_the_same(
    leaky: Path, pinned: set[str], tmp_path: Path, topics: bool
) -> None:
    # given an engine that restarts after 100 batches, of which some were dropped in both its lives
    payloads = frames_of(leaky)
    with Publisher(payloads[:100], topics_in_replay=topics).then(later(payloads, 1000)) as engine:
        engine.dropped = {0, 1, 2, 40, 41, 77}
        source = _collected(engine, tmp_path, 360)
    # then all is recovered by replay, the restart is noticed, and the blocks of its second life are found
    facts = source.facts
    assert (facts["batches"], facts["missing_batches"], facts["restarts"]) == (360, 0, 1)
    assert held_in(tmp_path / "c.lscope") == pinned and engine.requests == 6


class Until(Deadline):
    """Over when so many batches have come, or after a time in which they should have."""

    def __init__(self, book: EventBook, batches: int) -> None:
        super().__init__(30.0)
        self.book, self.batches = book, batches

    def left_s(self) -> float:
        return super().left_s() if self.book.batches < self.batches else 0.0


def _collected(engine: Publisher, tmp_path: Path, batches: int) -> Source:
    address = address_of(engine.address)
    assert address is not None
    subscriber = KvSubscriber(address)
    subscriber.check()
    report = subscriber.collect(Until(subscriber.book, batches))
    with adding_to(tmp_path / "c.lscope") as (writer, existing):
        return enter(writer, Numbering(existing), report, address.shown, address.shown).source


def test_live_gap_that_cannot_be_filled(leaky: Path, pinned: set[str], tmp_path: Path) -> None:
    # given a publisher without replay that drops batch 60
    payloads = frames_of(leaky)
    with Publisher(payloads, replay=False) as engine:
        engine.dropped = {60}
        source = _collected(engine, tmp_path, 259)
    # then the loss is stated, and of what is found nothing is invented
    assert (source.facts["batches"], source.facts["missing_batches"]) == (259, 1)
    found = held_in(tmp_path / "c.lscope")
    assert found and found < pinned
    losses = Capture.open(tmp_path / "c.lscope").table("losses").to_pylist()
    assert [(row["what"], row["count"], row["detail"]) for row in losses] == [("sequence_gap", 1, "batches 60 to 60")]


def test_quiet_engine_is_read_from_its_replay_buffer(leaky: Path, pinned: set[str], tmp_path: Path) -> None:
    payloads = frames_of(leaky)
    with Publisher(payloads) as engine:
        engine.dropped = set(range(len(payloads)))  # all was sent before anybody listened
        address = address_of(engine.address)
        assert address is not None
        (source,) = collect([address], tmp_path / "c.lscope", Collecting(seconds=0.5))
    assert source.source.facts["batches"] == 260 and held_in(tmp_path / "c.lscope") == pinned


def test_nobody_there_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    for verb in (["attribute"], ["import", "-o", str(tmp_path / "c.lscope")]):
        assert main([*verb, f"tcp://127.0.0.1:{port}"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"tcp://127.0.0.1:{port}: cannot be reached: Connection refused" in error
    assert not (tmp_path / "c.lscope").exists()


def test_something_else_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakscope.streams.kv_subscriber.CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address_of(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        assert address is not None
        with pytest.raises(BadInputError, match="no ZeroMQ publisher"):
            collect([address], tmp_path / "c.lscope", Collecting(seconds=0.2))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tcp://host", "the port is missing"),
        ("tcp://:5557", "the host is missing"),
        ("tcp://host:99999", "no address"),
        ("tcp://host:5557?poll=1", "no option 'poll'"),
        ("tcp://host:5557?pool=x", "no number of blocks"),
        ("tcp://host:5557?replay=x", "neither a port nor"),
    ],
)
def test_wrong_addresses_are_one_line(address: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", address]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_addresses_survive_being_paths() -> None:
    for text in ("tcp://host:1", "redis://host:6379/2", "unix:///run/redis.sock", "http://host/metrics"):
        found = address_of(Path(text))
        assert found is not None and found.shown == text
    assert address_of("trace.jsonl") is None and address_of(Path("redis/trace.jsonl")) is None


@pytest.mark.parametrize(
    ("missing", "evidence"),
    [
        ("zmq", "tcp://127.0.0.1:1"),
        ("msgpack", "tcp://127.0.0.1:1"),
        ("msgpack", "frames"),
        ("redis", "redis://127.0.0.1:1"),
    ],
)
def test_a_missing_library_is_one_line_with_its_remedy(
    missing: str,
    evidence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("frames").write_text(recording([(0, batch(5, [stored([1])]))]))
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["attribute", evidence]) == 2
    error = capsys.readouterr().err
    assert f"need {missing}" in error.replace("needs", "need") and "pip install 'leakscope[cache]'" in error
    assert error.count("\n") == 1


def test_interrupting_a_collection_keeps_it(leaky: Path, tmp_path: Path) -> None:
    # given a collection that would go on for an hour, interrupted once it has read something
    capture = tmp_path / "c.lscope"
    with Publisher(frames_of(leaky)) as engine:
        command = [
            sys.executable,
            "-m",
            "leakscope",
            "import",
            engine.address,
            "--duration",
            "3600",
            "-o",
            str(capture),
        ]
        # also where whoever runs the tests ignores interruptions, as shells let their background jobs do
        process = subprocess.Popen(["env", "--default-signal=INT", *command], stdout=subprocess.PIPE, text=True)
        assert engine.sent.wait(30)
        process.send_signal(signal.SIGINT)
        text = process.communicate(timeout=30)[0]
    assert process.returncode == 0 and "ended early by the user" in text
    assert Capture.open(capture).manifest.complete

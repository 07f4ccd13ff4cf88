"""KV events of vLLM and SGLang: every form decodes, gaps and restarts are noticed, held blocks are found, none is
invented; live as recorded."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_publisher import Publisher, batch, frames_of, later, recording, removed, stored

from leakscope.capture import Capture
from leakscope.capture.addition import adding_to
from leakscope.capture.ids import Numbering
from leakscope.cli.main import main
from leakscope.detect.kv_cache import pool_of
from leakscope.detect.kv_verdicts import judge_kv
from leakscope.errors import BadInputError
from leakscope.ingest import Options, import_files
from leakscope.ingest.files import enter
from leakscope.model.manifest import Source
from leakscope.streams import Collecting, address_of, collect
from leakscope.streams.clock import Deadline
from leakscope.streams.kv_subscriber import KvSubscriber
from nsight_parsers import ReportError
from nsight_parsers.kv_decode import Cleared, PayloadError, Removed, Stored, decode_batch
from nsight_parsers.kv_events import EventBook
from nsight_parsers.recognise import parse, recognise

POOL = 599


def data(name: str) -> Path:
    root = os.environ.get("LEAKSCOPE_TEST_DATA")
    if not root:
        pytest.skip("NOT TESTED: LEAKSCOPE_TEST_DATA is not set")
    return Path(root) / "cache" / name


@pytest.fixture(scope="module")
def leaky() -> Path:
    """What vLLM 0.33.0 published while three requests were never freed; 36 of 599 blocks stay pinned."""
    return data("vllm-0.33.0-kv-events-leaky.jsonl.gz")


@pytest.fixture(scope="module")
def pinned() -> set[str]:
    with gzip.open(data("vllm-0.33.0-kv-events-leaky.truth.json.gz")) as file:
        return {f"{value:016x}" for value in json.load(file)["pinned_hashes_at_idle"]}


def held_in(capture: Path) -> set[str]:
    opened = Capture.open(capture)
    with opened.connect() as con:
        (verdict,) = judge_kv(con, opened.manifest.sources)
    return set(verdict.culprit.objects) if verdict.culprit else set()


# Decoding

A, B, PARENT = 2**64 - 1, 5, 77
AS_MAP = [stored([A, B], PARENT, group_idx=1, future="field"), removed(A), {"type": "AllBlocksCleared"}]
AS_ARRAY = [
    ["BlockStored", [A, B], PARENT, [1, 2, 3], 16, None, "GPU", None, None, 1, "full_attention", None],
    ["BlockRemoved", [A], "GPU"],
    ["AllBlocksCleared"],
]
OLD_ARRAY = [["BlockStored", [A, B], PARENT, [1, 2, 3], 16, None], ["BlockRemoved", [A]], ["AllBlocksCleared"]]


@pytest.mark.parametrize("events", [AS_MAP, AS_ARRAY, OLD_ARRAY], ids=["map", "array", "old array"])
@pytest.mark.parametrize("as_map", [False, True], ids=["array batch", "map batch"])
def test_all_forms_of_batches_and_events_say_the_same(events: list[Any], as_map: bool) -> None:
    packed = msgpack.packb({"ts": 12.5, "events": events, "data_parallel_rank": 3} if as_map else [12.5, events, 3])
    found = decode_batch(packed)
    group = 0 if events is OLD_ARRAY else 1
    assert (found.ts_ns, found.rank, found.unknown) == (12_500_000_000, 3, 0)
    assert found.events == [
        Stored([A, B], PARENT, "GPU", group, 16),
        Removed([A], "GPU", 0),
        Cleared(),
    ]


def test_signed_numbers_and_bytes_are_hashes_too() -> None:
    # SGLang's hashes are signed: -1 is the block that vLLM would call 2**64 - 1
    found = decode_batch(msgpack.packb([1.0, [stored([-1], None), removed(b"\x01\xab" * 16)]]))
    assert [event.hashes for event in found.events] == [[2**64 - 1], ["01ab" * 16]]  # type: ignore[union-attr]


def test_what_is_no_event_is_counted_and_what_is_no_batch_refused() -> None:
    odd = [["Other", 1], {"type": "BlockStored"}, {"type": "BlockStored", "block_hashes": [1.5]}, 7, removed(1)]
    found = decode_batch(msgpack.packb([1.0, odd]))
    assert (len(found.events), found.unknown) == (1, 4)
    for payload in (b"", b"\xc1", msgpack.packb(3), msgpack.packb([1.0]), msgpack.packb(["x", []]), b"\x91" * 5000):
        with pytest.raises(PayloadError):
            decode_batch(payload)


def test_hostile_numbers_of_media_and_publishers_are_bounded() -> None:
    book = EventBook()
    for number in range(400):
        book.add("", number, batch(1 + number, [stored([number], medium=f"m{number}", group_idx=number)]))
        book.add(f"topic {number}", 0, batch(1, [stored([1])]))
    tables = book.tables()
    assert len(set(tables["cache_events"]["medium"].to_pylist())) <= 2 * 256 + 1
    assert book.undecodable == 400 - 255 and book.batches == 400 + 255


@given(st.binary(max_size=200))
def test_hostile_payloads_hypothesis(payload: bytes) -> None:
    book = EventBook()
    book.add("", 0, payload)
    assert book.batches + book.undecodable >= 1


# Sequences


def test_gap_repetition_and_restart(tmp_path: Path) -> None:
    # given batches 0, 1, 4 (2 and 3 lost), 4 again, and then a restart whose batch 0 is lost
    payloads = {n: batch(100 + n, [stored([n + 1])]) for n in range(5)}
    again = batch(200, [stored([50])])
    path = tmp_path / "frames"
    path.write_text(recording([(0, payloads[0]), (1, payloads[1]), (4, payloads[4]), (4, payloads[4]), (1, again)]))

    report = parse(path)

    events = report.tables["cache_events"].to_pandas()
    assert list(events["op"]) == ["insert", "insert", "gap", "insert", "clear", "gap", "insert"]
    assert list(events["object"]) == [f"{n:016x}" if n else "" for n in (1, 2, 0, 5, 0, 0, 50)]
    losses = report.tables["losses"].to_pandas()
    assert list(zip(losses["what"], losses["count"], losses["detail"], strict=True)) == [
        ("sequence_gap", 2, "batches 2 to 3"),
        ("sequence_gap", 1, "batches 0 to 0, before the first that was seen"),
    ]
    assert {k: report.facts[k] for k in ("batches", "missing_batches", "restarts")} == {
        "batches": 4,
        "missing_batches": 3,
        "restarts": 1,
    }
    assert events["ts_ns"].is_monotonic_increasing and events["ts_ns"].is_unique


def test_a_late_batch_is_no_restart() -> None:
    # given a replay that ran ahead into the publisher's next life, and a batch of the last one behind it
    book = EventBook()
    for number, ts in ((0, 1000), (1, 1001), (2, 1002), (1, 900)):
        book.add("", number, batch(ts, [stored([number + ts])]))
    assert (book.batches, book.repeated, book.restarts) == (3, 1, 0)


def test_ranks_are_pools_of_their_own() -> None:
    # given two data-parallel ranks, each numbered from 0, that cache a block of the same name
    book = EventBook()
    for rank in (0, 1):
        book.add("", 0, batch(10, [stored([1])], rank))
    book.add("", 1, batch(11, [{"type": "AllBlocksCleared"}], 1))
    events = book.tables()["cache_events"].to_pandas()
    assert list(zip(events["op"], events["object"], events["medium"], strict=True)) == [
        ("insert", "0000000000000001", "GPU"),
        ("insert", "GPU:1/0000000000000001", "GPU:1"),
        ("clear", "", "GPU:1"),
    ]
    assert not book.missing


# Recordings


def test_recording_is_recognised_and_keeps_no_token(leaky: Path, tmp_path: Path) -> None:
    assert recognise(leaky) == "kv_events"
    report = parse(leaky)
    assert (report.facts["batches"], report.facts["events"], report.facts["block_tokens"]) == (260, 2950, 16)
    assert report.tables["cache_events"].num_rows == 3289 + 2690  # blocks stored and removed
    path = tmp_path / "own"
    path.write_text(recording([(0, batch(5, [stored([1, 2], extra_keys=[["secret"]], session_id="secret")]))]))
    import_files([path], tmp_path / "c.lscope")
    kept = b"".join(p.read_bytes() for p in (tmp_path / "c.lscope").rglob("*") if p.is_file())
    shown = parse(path).tables["cache_events"].to_pylist()
    assert "777" not in json.dumps(shown) and b"secret" not in kept and b"777000" not in kept


def test_all_36_pinned_blocks_and_no_other(leaky: Path, pinned: set[str], tmp_path: Path) -> None:
    import_files([leaky], tmp_path / "c.lscope", Options(pool_blocks=POOL))
    assert held_in(tmp_path / "c.lscope") == pinned and len(pinned) == 36


def test_attribute_names_them(leaky: Path, pinned: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", str(leaky), "--pool-blocks", str(POOL), "--json", "--exit-code"]) == 1
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert (verdict["verdict"], verdict["class"], verdict["layer"]) == ("leak", "pinned_never_unpinned", "gpu")
    assert set(verdict["culprit"]["objects"]) == pinned and verdict["kept_objects"] == 36
    assert verdict["reasons"][0].startswith("36 blocks are held by 3 requests or more")


def test_a_pool_of_unknown_size_is_said_and_finds_the_same(leaky: Path, pinned: set[str], tmp_path: Path) -> None:
    import_files([leaky], tmp_path / "c.lscope")
    opened = Capture.open(tmp_path / "c.lscope")
    with opened.connect() as con:
        (verdict,) = judge_kv(con, opened.manifest.sources)
    assert set(verdict.culprit.objects) == pinned  # type: ignore[union-attr]
    assert "estimated" in verdict.missing[0]


def test_not_enough_turnover(leaky: Path, tmp_path: Path) -> None:
    # given a part of the recording with 151 evictions
    payloads = frames_of(leaky)
    events = [event for payload in payloads for event in decode_batch(payload).events]
    path = tmp_path / "part"
    count = next(n for n in range(len(payloads)) if _evictions(payloads[:n]) > 150)
    path.write_text(recording(enumerate(payloads[:count])))
    import_files([path], tmp_path / "c.lscope", Options(pool_blocks=POOL))
    opened = Capture.open(tmp_path / "c.lscope")
    with opened.connect() as con:
        (verdict,) = judge_kv(con, opened.manifest.sources)
    turnover = _evictions(payloads[:count]) / POOL
    assert (verdict.verdict, verdict.kind) == ("inconclusive", "window_too_short")
    assert verdict.reasons[0] == f"not enough turnover: {turnover:.2f} of 1.0" and turnover < 0.5
    assert len(events) == 2950


def _evictions(payloads: list[bytes]) -> int:
    return sum(len(e.hashes) for p in payloads for e in decode_batch(p).events if isinstance(e, Removed))


def test_hostile_recordings(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    path.write_text('{"seq": 0, "payload_b64": "!"}\n')
    with pytest.raises(ReportError, match="no batch of KV events"):
        parse(path)
    good = recording([(0, batch(5, [stored([1])]))])
    path.write_text(good + '{"seq": -1, "payload_b64": ""}\n[]\n{"seq": 1}\n' + "{" * 5000 + "\n")
    assert parse(path).findings == ["4 lines are no frames and are left out"]
    packed = gzip.compress(good.encode() * 50)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ReportError, match="damaged"):
        parse(path)


# The rule itself, against a plain loop


def plain(rows: list[tuple[str, str, str]], size: int) -> set[str]:
    """The rule, event by event: names of held blocks."""
    live: dict[str, int] = {}
    mark: dict[int, int] = {}
    above: dict[int, int] = {}
    names: dict[int, str] = {}
    evictions = 0
    for op, name, parent in rows:
        if op == "evict":
            evictions += 1
            live.pop(name, None)
            continue
        under = live.get(parent, -1)
        if name not in live:
            live[name] = len(names)
            above[live[name]] = under
            names[live[name]] = name
        mark[live[name]] = evictions
        for life in (under, above[live[name]]):
            while life >= 0:
                mark[life] = evictions
                life = above[life]
    held = set()
    for life in live.values():
        if evictions - mark[life] >= size:
            while life >= 0:
                held.add(life)
                life = above[life]
    return {names[life] for life in held & set(live.values())}


@pytest.mark.parametrize("size", [1, 3, 6])
def test_held_blocks_are_those_of_the_plain_rule_random(size: int) -> None:
    rng = random.Random(size)
    for _ in range(60):
        names = [f"b{n}" for n in range(rng.randint(1, 12))]
        tree = {b: rng.choice(names[:n]) if n and rng.random() < 0.8 else "" for n, b in enumerate(names)}
        ops = [(rng.choice(["insert", "insert", "evict"]), rng.choice(names)) for _ in range(rng.randint(0, 60))]
        rows = [(op, name, tree[name] if op == "insert" else "") for op, name in ops]
        table = pd.DataFrame(rows, columns=["op", "object", "parent"]).assign(ts_ns=range(1, len(rows) + 1))
        assert set(pool_of(table, pool_blocks=size).held) == plain(rows, size), rows


def test_a_clearing_or_a_gap_makes_what_was_before_unknown() -> None:
    rows = [("insert", "old", ""), ("insert", "kept", "")] + [("evict", f"x{n}", "") for n in range(9)]
    for op in ("clear", "gap"):
        after = [(op, "", ""), ("insert", "new", ""), *[("evict", f"y{n}", "") for n in range(4)]]
        table = pd.DataFrame([*rows, *after], columns=["op", "object", "parent"])
        table["ts_ns"] = range(1, len(table) + 1)
        pool = pool_of(table, pool_blocks=4)
        assert (pool.held, pool.evictions) == (("new",), 4)
        assert set(pool_of(table.iloc[:11], pool_blocks=4).held) == {"old", "kept"}


def test_a_sliding_window_holds_no_prefix() -> None:
    # given a chain of three blocks of which the last alone can be told to be held, as its own children mark the others
    def held(kind: str | None, group: int) -> set[str]:
        book = EventBook()
        more = {"group_idx": group, "kv_cache_spec_kind": kind}
        book.add("", 0, batch(1, [stored([1, 2], **more), stored([3], 2, **more), stored([4], 2, **more)]))
        book.add("", 1, batch(2, [removed(*range(100, 104))]))
        book.add("", 2, batch(3, [stored([5], 2, **more)]))  # 1 and 2 were in use just now
        table = book.tables()["cache_events"].to_pandas()
        found = pool_of(table, pool_blocks=4, windowed=book.facts()["windowed_groups"]).held
        return {name[-1] for name in found}

    assert held("full_attention", 0) == held(None, 1) == {"1", "2", "3", "4"}
    assert held("sliding_window", 0) == held("mamba", 1) == {"3", "4"}


# Live


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


def test_order_of_arrival_does_not_matter_to_the_blocks(leaky: Path, pinned: set[str]) -> None:
    # given every batch twice
    book = EventBook()
    for number, payload in itertools.chain.from_iterable([(n, p), (n, p)] for n, p in enumerate(frames_of(leaky))):
        book.add("", number, payload)
    table = book.tables()["cache_events"].to_pandas()
    assert (book.batches, book.repeated) == (260, 260)
    assert set(pool_of(table, pool_blocks=POOL).held) == pinned


def test_liveness_shows_held_blocks_as_held_and_of_others_knows_nothing(
    leaky: Path, pinned: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["liveness", str(leaky), "--pool-blocks", str(POOL), "--top", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (source,) = found["sources"]
    classes = {name: c["objects"] for name, c in source["classes"].items() if c["objects"]}
    assert classes == {"held-stale": 36, "unknown-ref": POOL - 36}
    assert {stale["name"] for stale in found["stale"]} == pinned


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

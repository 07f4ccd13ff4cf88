"""KV events of vLLM and SGLang: every form decodes, gaps and restarts are noticed, held blocks are found, none is
invented."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import msgpack
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_publisher import batch, frames_of, recording, removed, stored
from kv_recorded import POOL, held_in

from leakscope.capture import Capture
from leakscope.cli.main import main
from leakscope.detect.kv_cache import pool_of
from leakscope.detect.kv_verdicts import judge_kv
from leakscope.ingest import Options, import_files
from nsight_parsers import ReportError
from nsight_parsers.kv_decode import Cleared, PayloadError, Removed, Stored, decode_batch
from nsight_parsers.kv_events import EventBook
from nsight_parsers.recognise import parse, recognise

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

"""Consistency of caches: real Flight Recorder dumps, and logs with one planted fault of each kind."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from leakscope.cache.consistency import check_consistency
from leakscope.cache.inconsistency import Checked
from leakscope.cachekit.blocks import BlockReplica, BlockTable, Message
from leakscope.cachekit.events import EventLog
from leakscope.cli.cache import cache as app
from leakscope.errors import BadInputError


@pytest.fixture
def ranks() -> tuple[Path, Path]:
    folder = os.environ.get("LEAKSCOPE_TEST_DATA")
    if not folder:
        pytest.skip("NOT TESTED: real dumps; set LEAKSCOPE_TEST_DATA to their folder")
    cache = Path(folder) / "cache"
    return cache / "torch-2.13-fr-gloo-rank0.json", cache / "torch-2.13-fr-gloo-rank1.json"


def lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def kinds(checked: Checked) -> dict[str, int]:
    return {one.kind: one.count for one in checked.found}


def test_the_planted_shape_mismatch_is_named_with_both_shapes(ranks: tuple[Path, Path]) -> None:
    (checked,) = check_consistency(ranks)
    (found,) = checked.found
    assert (found.kind, found.where, found.count) == ("different shape", "process group 0, collective 7", 1)
    assert found.sides == {"rank 0": "all_reduce 4×8", "rank 1": "all_reduce 8×4"}
    assert "as many elements" in found.what
    assert checked.facts == {"ranks": 2, "collectives": 15, "left out": 0}


def dump(calls: list[tuple[str, list[int], str]], first: int = 1) -> dict[str, Any]:
    entries = [
        {
            "collective_seq_id": first + number,
            "profiling_name": f"nccl:{name}",
            "process_group": ["7", "tensor parallel"],
            "input_sizes": [shape],
            "output_sizes": [shape],
            "input_dtypes": [dtype],
            "output_dtypes": [dtype],
            "is_p2p": False,
            "state": "completed",
        }
        for number, (name, shape, dtype) in enumerate(calls)
    ]
    return {"version": "2.10", "entries": entries, "pg_config": {"7": {"ranks": "[0, 1, 2]"}}}


GOOD = [("all_reduce", [8, 2], "Float"), ("broadcast", [4], "Long"), ("all_reduce", [8, 2], "Float")] * 3


@pytest.mark.parametrize(
    ("change", "expected", "side"),
    [
        (lambda calls: calls.__setitem__(4, ("broadcast", [4], "Int")), {"different dtype": 1}, "broadcast Int → Int"),
        (lambda calls: calls.__setitem__(4, ("all_reduce", [4], "Long")), {"different collective": 1}, "all_reduce"),
        (lambda calls: calls.__setitem__(5, ("all_reduce", [9, 2], "Float")), {"different shape": 1}, "all_reduce 9×2"),
        (lambda calls: calls.pop(), {"rank behind": 1}, "8 (broadcast, completed)"),
        (lambda calls: calls.insert(4, calls.pop(5)), {"different collective": 2}, "all_reduce"),
        (lambda calls: None, {}, None),
    ],
)
def test_faults_of_one_rank_are_told_by_kind(
    tmp_path: Path, change: Callable[[list[Any]], Any], expected: dict[str, int], side: str | None
) -> None:
    # given three ranks, one of which does something else; written as pickles, as PyTorch does
    other = copy.deepcopy(GOOD)
    change(other)
    for rank, calls in enumerate((GOOD, GOOD, other)):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(calls), protocol=4))
    (checked,) = check_consistency(sorted(tmp_path.iterdir()))
    assert kinds(checked) == expected
    for found in checked.found:
        assert found.sides["rank 2"] == side


def test_only_what_all_ring_buffers_hold_is_compared(tmp_path: Path) -> None:
    # given a rank whose buffer lost the first four calls, and another's only different one among these
    other = [("all_reduce", [1], "Float"), *GOOD[1:]]
    (tmp_path / "rank0.json").write_text(json.dumps(dump(other)))
    (tmp_path / "rank1.json").write_text(json.dumps(dump(GOOD[4:], first=5)))
    (checked,) = check_consistency(sorted(tmp_path.iterdir()))
    assert checked.found == () and checked.facts["collectives"] == 5


def test_a_rank_that_made_no_call_in_between(tmp_path: Path) -> None:
    holed = dump(GOOD)
    del holed["entries"][3]
    (tmp_path / "rank0.json").write_text(json.dumps(dump(GOOD)))
    (tmp_path / "rank1.json").write_text(json.dumps(holed))
    (checked,) = check_consistency(sorted(tmp_path.iterdir()))
    (found,) = checked.found
    assert (found.kind, found.sides) == ("missing call", {"rank 0": "all_reduce", "rank 1": "no call"})


def test_versions_that_differ_within_one_collective(tmp_path: Path) -> None:
    rows = [{"op_id": op, "rank": rank, "cache_version": 100 + op // 5} for op in range(20) for rank in range(4)]
    for row in rows:
        if row["rank"] == 2 and 10 <= row["op_id"] < 13:
            row["cache_version"] -= 1
    rows = [row for row in rows if (row["op_id"], row["rank"]) not in {(7, 3), (19, 0)}]
    (checked,) = check_consistency([lines(tmp_path / "drift.jsonl", rows)])
    assert kinds(checked) == {"metadata drift": 3, "missing rank": 1}  # the last op is not over yet
    drift, missing = checked.found
    assert (drift.where, drift.sides) == ("op 10", {"rank 2": "version 101", "3 other ranks": "version 102"})
    assert (missing.where, missing.sides) == ("op 7", {"rank 3": "no call"})
    assert checked.facts == {"ranks": 4, "collectives": 20, "left out": 0}


def test_blocks_given_away_while_another_stream_reads(tmp_path: Path) -> None:
    def event(ts_ns: int, op: str, block: str, stream: int) -> dict[str, Any]:
        return {"ts_ns": ts_ns, "op": op, "block": block, "stream": stream}

    rows = [
        event(90, "read_end", "b1", 2),  # of before the log
        event(100, "read_begin", "b1", 2),
        event(110, "read_begin", "b1", 3),
        event(120, "free", "b1", 1),  # dirty: 2 and 3 read
        event(130, "read_end", "b1", 2),
        event(140, "reuse", "b1", 1),  # dirty: 3 reads
        event(150, "read_end", "b1", 3),
        event(150, "write", "b1", 1),  # at the moment of the end: clean
        event(160, "read_begin", "b1", 1),
        event(170, "free", "b1", 1),  # its own read: stream order
        event(175, "read_begin", "b2", 1),
        event(180, "free", "b3", 2),  # another block
    ]
    rows += [event(1000 + 10 * i, op, "b4", i % 2) for i in range(50) for op in ("read_begin", "read_end", "free")]
    (checked,) = check_consistency([lines(tmp_path / "streams.jsonl", rows)])
    assert [(one.kind, one.count) for one in checked.found] == [("dirty read", 1), ("dirty read", 1)]
    free, reuse = checked.found
    reads = {"stream 2": "reads since 100 ns", "stream 3": "reads since 110 ns"}
    assert free.where == "block b1" and free.sides == {"stream 1": "free at 120 ns", **reads}
    assert reuse.sides == {"stream 1": "reuse at 140 ns", "stream 3": "reads since 110 ns"}
    assert checked.facts["reads that end without a begin"] == 1 and checked.facts["blocks"] == 4


def protocol(*faults: str) -> list[dict[str, Any]]:
    """An owner and a replica over a network that loses, reorders and repeats, and a restart of the owner."""
    rows: list[dict[str, Any]] = []

    def add(node: str, op: str, incarnation: int, seq: int | None, block: int, version: int | str | None) -> None:
        row = {"ts_ns": 1000 * (len(rows) + 1), "node": node, "op": op, "incarnation": incarnation, "seq": seq}
        rows.append(row | {"block": block, "version": version})

    def message(incarnation: int, seq: int, arrives: bool = True) -> None:
        add("owner", "send", incarnation, seq, seq % 3, seq // 3 + 1)
        if arrives:
            add("replica", "receive", incarnation, seq, seq % 3, seq // 3 + 1)

    for seq in range(6):
        message(1, seq)
        add("replica", "apply", 1, seq, seq % 3, seq // 3 + 1)
    message(1, 6, arrives=False)  # lost
    message(1, 7)
    if "loss" in faults:
        add("replica", "apply", 1, 7, 1, 3)
    else:
        add("replica", "read", 1, None, 0, None)  # does not know
        add("replica", "snapshot", 1, 8, 0, None)
    message(1, 8)
    add("replica", "receive", 1, 8, 2, 3)  # repeated
    add("replica", "apply", 1, 8, 2, 3)
    if "twice" in faults:
        add("replica", "apply", 1, 8, 2, 3)
    add("replica", "read", 1, None, 2, 2 if "stale" in faults else 3)
    message(2, 0)
    add("replica", "apply", 2, 0, 0, 1)
    add("owner", "send", 2, 1, 1, 1)
    add("owner", "send", 2, 2, 2, 1)
    add("replica", "receive", 2, 2, 2, 1)
    add("replica", "receive", 2, 1, 1, 1)  # reordered
    add("replica", "apply", 2, 1, 1, 1)
    add("replica", "apply", 2, 2, 2, 1)
    if "restart" in faults:
        add("replica", "apply", 1, 9, 0, 4)
    if "hole" in faults:
        message(2, 4)
    return rows


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("loss", "loss not noticed"),
        ("twice", "applied twice or late"),
        ("stale", "stale answer"),
        ("restart", "older incarnation applied"),
        ("hole", "hole in the owner's sequence"),
    ],
)
def test_breaches_of_the_block_protocol(tmp_path: Path, fault: str, kind: str) -> None:
    (clean,) = check_consistency([lines(tmp_path / "clean.jsonl", protocol())])
    assert clean.found == ()
    wanted = {"sent": 12, "received": 11, "lost": 1, "repeated": 1, "reordered": 1, "incarnations": 2, "left out": 0}
    assert clean.facts == wanted
    (checked,) = check_consistency([lines(tmp_path / "faulty.jsonl", protocol(fault))])
    assert kinds(checked) == {kind: 1}


def test_the_kit_keeps_its_protocol_over_a_bad_network(tmp_path: Path) -> None:
    # given a table and a replica of our kit over a network that loses, repeats and reorders, and restarts of the owner
    random = Random(5)
    log = EventLog(tmp_path / "blocks.jsonl")
    replica = BlockReplica(log=log)
    losses = 0
    for incarnation in range(1, 4):
        sent: list[Message] = []
        table = BlockTable(sent.append, incarnation=incarnation, log=log)
        for _ in range(60):
            table.changed(*random.sample(range(9), 2))
            if random.random() < 0.2:
                table.removed(random.randrange(9))
            batch = [message for message in sent for _ in range(random.choice((0, 1, 1, 1, 2)))]
            losses += len(set(map(id, sent))) - len(set(map(id, batch)))
            sent.clear()
            for message in random.sample(batch, len(batch)):
                replica.apply(message)
            replica.version(random.randrange(9))
            if random.random() < 0.2:
                replica.apply(table.snapshot())
    log.close()
    (checked,) = check_consistency([log.path])
    assert checked.found == ()
    assert checked.facts["incarnations"] == 3 and checked.facts["repeated"] > 10 and checked.facts["reordered"] > 3
    assert checked.facts["lost"] == losses > 10
    # when its log says of one answer that it was another
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    answer = next(row for row in rows[200:] if row["op"] == "read" and row["version"])
    answer["version"] += 1
    (checked,) = check_consistency([lines(tmp_path / "changed.jsonl", rows)])
    assert kinds(checked) == {"stale answer": 1}


def test_the_command_and_its_exit_codes(ranks: tuple[Path, Path], tmp_path: Path) -> None:
    run = CliRunner().invoke
    found = run(app, ["consistency", *map(str, ranks), "--exit-code"])
    assert found.exit_code == 1 and "rank 1: all_reduce 8×4" in found.output
    assert run(app, ["consistency", *map(str, ranks)]).exit_code == 0
    clean = lines(tmp_path / "clean.jsonl", protocol())
    as_json = run(app, ["consistency", str(clean), "--exit-code", "--json"])
    assert as_json.exit_code == 0 and json.loads(as_json.output)["checks"][0]["found"] == []


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("evil", pickle.dumps({"entries": [Evil()]}, protocol=4), "evil: "),
        ("torn.json", b'{"version": "2.10", "entries": [{"op_id": 1', "no Flight Recorder dump in JSON"),
        ("deep.json", b'{"entries": ' + b"[" * 100_000, "no Flight Recorder dump in JSON"),
        ("odd.json", b'{"entries": {"a": 1}}', "no list of entries"),
        ("alone.json", b'{"entries": []}', "the dump of one rank"),
        ("log.jsonl", b'{"a": 1}\n', "no consistency log"),
        ("empty", b"", "empty"),
    ],
)
def test_bad_files_are_told_in_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInputError) as error:
        check_consistency([path])
    assert said in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)

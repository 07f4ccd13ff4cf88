"""``leakscope liveness`` as it is used: text, JSON, GraphML, DOT, paths, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from leakscope.cli.main import main
from leakscope.ingest import import_files
from leakscope.report import liveness_graph

S = 1_000_000_000
HOSTILE = "req\x1b[2J<&\"'>\u202e"


def log(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({**event, "ts_ns": round(event["ts_ns"] * S)}) + "\n" for event in events))
    return path


def service(path: Path, holder: str = HOSTILE) -> Path:
    """100 objects that are pinned for a second each; 10 that ``holder`` pins and never gives up, with a stack."""
    events: list[dict[str, Any]] = []
    for number in range(100):
        name = f"block-{number}"
        events.append({"ts_ns": 1 + number, "op": "insert", "obj": name, "size": 1000, "owner": "store"})
        events.append({"ts_ns": 1.1 + number, "op": "pin", "obj": name, "owner": "reader"})
        events.append({"ts_ns": 2.1 + number, "op": "unpin", "obj": name, "owner": "reader"})
        if number % 10 == 0:
            stack = "serve (app.py:3);lookup (app.py:9)"
            events.append({"ts_ns": 1.2 + number, "op": "pin", "obj": name, "owner": holder, "stack": stack})
        if number % 2:
            events.append({"ts_ns": 60 + number, "op": "evict", "obj": name, "owner": "lru"})
    return log(path, sorted(events, key=lambda event: event["ts_ns"]))


def run(*arguments: Any) -> int:
    return main(["liveness", *map(str, arguments)])


def test_the_report_names_holders_and_escapes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(service(tmp_path / "events.jsonl"), "--why", "block-30", "--top", 2) == 0
    text = capsys.readouterr().out
    # then control characters of names are shown, not sent
    assert "\x1b" not in text and "\u202e" not in text
    assert "block-30  held-stale, 1000 B, retains 1000 B" in text
    words = " ".join(text.split())
    assert "[holds for 2.1 min] object block-30" in words
    assert "lookup (app.py:9)" in text
    assert "cache objects: 50 objects, 48.8 KiB" in text
    assert "stale: longer than 2.0 s (twice what 99 % of 100 pins took)" in words
    assert "classic scheme (scan 500 ms, TTL not ended and references > 0): looks at 10 of 50" in words


def test_json_has_the_numbers_and_the_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = service(tmp_path / "events.jsonl")
    assert run(path, "--json", "--windows", 2) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "leakscope-liveness/1"
    (source,) = found["sources"]
    assert source["classes"]["held-stale"] == {"objects": 10, "bytes": 10_000, "share": 0.2}
    assert source["classes"]["idle-cached"]["objects"] == 40
    assert source["windows"][-1]["objects"]["held-stale"] == 10
    assert source["rules"]["looked_at"] == 10 and len(source["rules"]["faults"]) == 4
    keeper = found["keepers"][1]
    assert (keeper["name"], keeper["objects"], keeper["stale_objects"], keeper["retained_bytes"]) == (
        HOSTILE,
        10,
        10,
        10_000,
    )
    assert keeper["stack"] == ["serve (app.py:3)", "lookup (app.py:9)"]
    assert (found["nodes"], found["edges"]["holds"]) == ({"root": 1, "holder": 2, "cache": 1, "object": 50}, 10)
    assert [stale["name"] for stale in found["stale"][:2]] == ["block-0", "block-10"]
    graph = nx.node_link_graph(found["graph"], edges="edges")
    held = [n for n, data in graph.nodes(data=True) if data["cls"] == "held-stale"]
    assert {graph.nodes[tail]["name"] for n in held for tail in graph.predecessors(n)} == {HOSTILE}
    # and a threshold of one's own moves the classes, so does a time to live of one's own
    assert run(path, "--json", "--stale-after", "60s", "--ttl", "70s") == 0
    (source,) = json.loads(capsys.readouterr().out)["sources"]
    zombies, stale = source["classes"]["zombie"]["objects"], source["classes"]["held-stale"]["objects"]
    assert (zombies, stale, source["stale_because"]) == (45, 1, "as asked for")


def test_graph_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(liveness_graph, "MAX_DOT_NODES", 5)
    monkeypatch.setattr(liveness_graph, "MAX_JSON_NODES", 53)
    graphml, dot = tmp_path / "g.graphml", tmp_path / "g.dot"
    path = service(tmp_path / "events.jsonl")
    assert run(path, "--json", "--graphml", graphml, "--dot", dot) == 0
    assert json.loads(capsys.readouterr().out)["graph"] is None  # one node too many
    graph = nx.read_graphml(graphml)
    assert len(graph) == 54
    names = {data["name"] for _, data in graph.nodes(data=True)}
    assert HOSTILE.replace("\x1b", "\ufffd") in names
    stale = [data for _, _, data in graph.edges(data=True) if data["stale"]]
    assert len(stale) == 10 and all(data["kind"] == "holds" for data in stale)
    text = dot.read_text()
    assert text.count("[label=") - text.count("->") == 5
    assert "5 of 54 nodes" in text and "\x1b" not in text and 'req\\\\x1b[2J<&\\"' in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "g.dot", "g.graphml"]


def test_several_inputs_are_one_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # given a capture, and a file of the same kind that is imported for this once
    import_files([service(tmp_path / "a.jsonl", "alice")], tmp_path / "a.lscope")
    other = service(tmp_path / "b.jsonl", "bob")
    assert run(tmp_path / "a.lscope", other, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [source["source"] for source in found["sources"]] == ["a.jsonl", "b.jsonl"]
    assert {k["name"]: k["source"] for k in found["keepers"] if k["kind"] == "holder"} == {
        "alice": "a.jsonl", "bob": "b.jsonl",
    }  # fmt: skip
    assert [i["path"].rsplit("/", 1)[-1] for i in found["inputs"]] == ["a.lscope", "b.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.jsonl"], "missing.jsonl: no such file or capture"),
        (["events.jsonl", "--why", "nobody"], "--why nobody: nothing that is live has this name"),
        (["events.jsonl", "--stale-after", "soon"], "--stale-after soon: needs a time"),
        (["events.jsonl", "--ttl", "-1s"], "--ttl -1s: needs a time"),
        (["events.jsonl", "--graphml", "no/such/g.graphml"], "cannot write no/such/g.graphml"),
        (["notes.txt"], "nor is it a report that 'leakscope import' knows"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    service(tmp_path / "events.jsonl")
    (tmp_path / "notes.txt").write_text("hello\n")
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


def test_evidence_without_objects_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "samples.csv").write_text("t_s,rss_bytes\n" + "".join(f"{t},{t * 1000}\n" for t in range(1, 40)))
    assert run(tmp_path / "samples.csv") == 0
    assert "no objects" in capsys.readouterr().out


def test_without_sizes_no_bytes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [{"ts_ns": 1, "op": "insert", "obj": "x"}, {"ts_ns": 2, "op": "pin", "obj": "x", "owner": "a"}]
    path = log(tmp_path / "events.jsonl", [*events, {"ts_ns": 90, "op": "insert", "obj": "y"}])
    assert run(path) == 0
    text = capsys.readouterr().out
    assert " B\n" not in text and "cache objects: 2 objects, ?" in text
    assert "the source tells no sizes" in text
    assert run(path, "--json") == 0
    assert [s["age_s"] for s in json.loads(capsys.readouterr().out)["stale"]] == [88]

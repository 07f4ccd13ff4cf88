"""Joined evidence from the command line to the report: counted once, in chains, as a graph."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import networkx as nx
import planted as p
import pytest
from nsys_files import ALLOC, SYSTEM_CLOCK_NS, UTC_NS, NsysFile
from synthetic import START_NS, SyntheticCapture

from leakscope.cli.main import main
from leakscope.errors import BadInputError
from leakscope.model.results import Chain, ChainLink
from leakscope.report.chain_graph import chain_graph, to_dot, to_graphml, to_json, write_graph

PID = 4242
COUNT, BYTES = 60, 1 << 20


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recording of a leak on the device, and an export that saw all but one of its allocations, and one more."""
    folder = tmp_path_factory.mktemp("both")
    capture = SyntheticCapture(seconds=10.0)
    capture.process(PID)
    export = NsysFile()
    for i in range(COUNT):
        at_s = 0.1 + i * 0.16
        address = 0x10_0000_0000 + i * BYTES
        call = capture.call("cudaMalloc", at_s - 0.0001, at_s, pid=PID)
        capture.alloc(
            at_s, BYTES, layer="gpu", kind="device", api="cudaMalloc", user=["main", "kv_append"], pid=PID,
            call_id=call, addr=address,
        )  # fmt: skip
        start = capture.ns(at_s) - SYSTEM_CLOCK_NS - 60_000
        export.add(
            "NVTX_EVENTS", start=start - 1_000_000, end=start + 5_000_000, eventType=59,
            globalTid=1 << 48 | PID << 24 | PID, textId=export.string("decode"), domainId=0,
        )  # fmt: skip
        if i != 7:
            correlation = export.call(start - 30_000, start + 60_000, "cudaMalloc_v3020", pid=PID, tid=PID)
            export.memory(start, ALLOC, address, BYTES, correlation=correlation, pid=PID)
    export.memory(START_NS - SYSTEM_CLOCK_NS + 9_000_000_000, ALLOC, 0x99_0000_0000, 12_345, pid=PID)
    recording = capture.write(folder / "run.lscope")
    manifest = json.loads((recording / "manifest.json").read_text())
    now = {"realtime_ns": UTC_NS, "monotonic_ns": SYSTEM_CLOCK_NS, "boottime_ns": SYSTEM_CLOCK_NS}
    manifest["sources"][0]["anchors"] = [now, now]  # of the same boot as the export
    (recording / "manifest.json").write_text(json.dumps(manifest))
    return recording, export.write(folder / "run.sqlite")


def printed(*arguments: object) -> str:
    """What leakscope prints on stdout; it must end well."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        assert main([str(argument) for argument in arguments]) == 0
    return stdout.getvalue()


def attributed(*arguments: object) -> dict[str, Any]:
    return json.loads(printed("attribute", "--json", *arguments))  # type: ignore[no-any-return]


def test_bytes_that_both_saw_count_once(both: tuple[Path, Path]) -> None:
    report = attributed(*both)
    # the export alone keeps what the recording did not see
    of_export = [layer for layer in report["layers"] if layer["source"] == 1]
    assert [layer["live_bytes"] for layer in of_export] == [12_345]
    assert [layer["live_bytes"] for layer in report["layers"] if layer["source"] == 0] == [COUNT * BYTES]
    rows = {row["what"]: row["bytes"] for row in report["reconciliation"] if "run.sqlite" in row["source"]}
    seen = (COUNT - 1) * BYTES
    assert rows == {
        "device and pinned bytes allocated": seen + 12_345,
        "of these seen by the recording (counted once)": seen,
        "unexplained": 12_345,
    }


def test_joins_and_clock_are_reported(both: tuple[Path, Path]) -> None:
    report = attributed(*both)
    identity = next(j for j in report["joins"] if j["rule"] == "identity")
    assert (identity["matched"], identity["ambiguous"], identity["refused"]) == (COUNT - 1, 0, 1)
    assert identity["reasons"] == ["the recording has no such allocation: 1"]
    (clock,) = report["clocks"]
    assert clock["ns"] == 60_000 and "59 events seen by both" in clock["detail"]


def test_the_chain_names_range_and_report_with_their_rules(both: tuple[Path, Path]) -> None:
    report = attributed(*both)
    chain = next(c for c in report["chains"] if c["site"].startswith("0:g"))
    links = [(link["what"], link["name"], link["rule"], link["count"]) for link in chain["links"]]
    assert links[0] == ("range", "decode", "range", COUNT)
    assert links[1][:2] == ("frame", "main")
    assert links[-1] == ("report", "the same allocations in run.sqlite", "identity", COUNT - 1)
    assert chain["links"][-1]["confidence"] == round((COUNT - 1) / COUNT, 3)


def test_reports_imported_into_the_capture_join_as_well(both: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    capture = tmp_path / "run.lscope"
    shutil.copytree(both[0], capture)
    printed("import", both[1], "-o", capture)
    report = attributed(capture)
    assert [layer["live_bytes"] for layer in report["layers"]] == [COUNT * BYTES + 12_345]
    assert next(j for j in report["joins"] if j["rule"] == "identity")["matched"] == COUNT - 1


def test_the_terminal_tells_joins(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = " ".join(printed("attribute", *both).split())
    assert "run.sqlite: clock residual 60,000 ns" in text
    assert "identity: allocations of run.sqlite with allocations of synthetic: 59 matched, 1 refused" in text
    assert "the same allocations in run.sqlite [identity 0.98 ×59]" in text
    assert "decode [range 0.90 ×60]" in text


def test_one_recording_alone_joins_nothing(both: tuple[Path, Path]) -> None:
    report = attributed(both[0])
    assert report["joins"] == report["clocks"] == []


@pytest.mark.parametrize("suffix", ["json", "graphml", "dot"])
def test_chains_are_written_as_a_graph(both: tuple[Path, Path], tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"chains.{suffix}"
    report = attributed(*both, "--chains", target)
    text = target.read_text()
    if suffix == "json":
        graph = nx.node_link_graph(json.loads(text), edges="edges")
    elif suffix == "graphml":
        graph = nx.parse_graphml(text)
    else:
        assert text.startswith("digraph chains {") and text.rstrip().endswith("}")
        assert '"identity 0.98, 59 × 59.0 MiB"' in text
        return
    chain = next(c for c in report["chains"] if c["site"].startswith("0:g"))
    ends = [n for n, data in graph.nodes(data=True) if data["name"] == "the same allocations in run.sqlite"]
    evidence = next(iter(graph.in_edges(ends[0], data=True)))[2]
    assert evidence["rule"] == "identity" and evidence["count"] == COUNT - 1
    assert evidence["bytes"] == (COUNT - 1) * BYTES and evidence["confidence"] == chain["links"][-1]["confidence"]
    assert [file.name for file in tmp_path.iterdir()] == [target.name]


def test_chains_with_the_same_beginning_share_its_nodes() -> None:
    def chain(site: str, *names: str) -> Chain:
        return Chain(site, tuple(ChainLink("frame", name, "stack", 1.0, 2, 10) for name in names))

    graph = chain_graph([chain("a", "main", "f"), chain("b", "main", "g"), chain("c", "other", "f")])

    assert sorted(data["name"] for _, data in graph.nodes(data=True)) == ["f", "f", "g", "main", "other"]
    main = next(n for n, data in graph.nodes(data=True) if data["name"] == "main")
    assert (graph.out_degree(main), graph.nodes[main]["sites"], graph.nodes[main]["bytes"]) == (2, "a,b", 20)


def test_hostile_names_leave_every_form_whole() -> None:
    name = 'x"\\\n\x1b[2J\x00<&>\ud800'
    graph = chain_graph(
        [Chain("s", (ChainLink("frame", "main", "stack", 1.0, 1, 1), ChainLink("frame", name, "r", 1.0, 1, 1)))]
    )
    assert nx.parse_graphml(to_graphml(graph)).number_of_nodes() == 2
    assert nx.node_link_graph(json.loads(to_json(graph)), edges="edges").number_of_edges() == 1
    dot = to_dot(graph)
    assert "\x1b" not in dot and "\x00" not in dot and dot.count("\n") == 7


def test_another_suffix_is_refused(both: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", str(both[0]), "--chains", str(tmp_path / "x.png")]) == 2
    assert "must be .json, .graphml or .dot" in capsys.readouterr().err
    with pytest.raises(BadInputError, match="cannot write"):
        write_graph([], tmp_path / "no" / "such.json")


def test_profiles_stand_with_the_launches_of_their_kernel() -> None:
    from leakscope.correlate.joins.links import with_kernels

    launches = ChainLink("launches", "_ZN2ns4gemmIfEvPf", "argument", 1.0, 3, 10)
    profile = ChainLink("profile", "3 launches of gemm profiled in r", "order", 1.0, 3, 4096)
    chain = with_kernels(Chain("s", (launches,)), {"gemm": profile})
    assert chain.links == (launches, profile)


def test_a_recording_and_ncu_give_traffic_by_kernel(tmp_path: Path) -> None:
    from leakscope.capture import Capture
    from leakscope.correlate.joins.driver import join
    from leakscope.correlate.joins.evidence import evidence_of

    run = p.planted()
    recording = p.write_recording(tmp_path / "run.lscope", run)
    launches = run.of_life(p.LIVES[0], "launches")
    report = p.write_ncu(tmp_path / "k.lscope", run, p.LIVES[0], {"status": "usable", "reason": ""}, launches)
    captures = [Capture.open(recording), Capture.open(report)]
    evidence = [e for i, c in enumerate(captures) for e in evidence_of(c.connect(), c.manifest, i)]
    kernels = join(evidence).links[0].kernels
    count = sum(r["kernel"] == "softmax" for r in launches)
    assert kernels["softmax"] == ChainLink(
        "profile", f"{count} launches of softmax profiled in report.ncu-rep", "order", 1.0, count, 4096 * count
    )
    assert set(kernels) == {"gemm", "softmax", "reduce"}


def test_the_options_of_joins_reach_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from leakscope.correlate.joins.driver import JoinOptions
    from leakscope.detect import together

    asked: list[JoinOptions] = []
    join = together.join
    monkeypatch.setattr(together, "join", lambda evidence, options: (asked.append(options), join(evidence, options))[1])
    run = p.planted()
    recording = p.write_recording(tmp_path / "run.lscope", run)
    report = p.write_nsys(tmp_path / "n.lscope", run, "monotonic", p.LIVES[:1])
    options = ("--kernel-window-us", 7, "--gpu-window-us", 0.5, "--stack-frames", 2)
    notes = [
        [join["reasons"][0].split(";")[0] for join in attributed(recording, report, *more)["joins"] if join["reasons"]]
        for more in ((), options)
    ]
    assert notes == [["±50 µs", "±100 µs"], ["±7 µs", "±0.5 µs", "no call open, none near, no launch near"]]
    assert asked == [JoinOptions(50_000, 100_000, 3), JoinOptions(7_000, 500, 2)]

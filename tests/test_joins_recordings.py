"""Several recordings together: each attributed apart, a report joined to the one that it is of or to none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import planted as p
import pytest
from planted import outcome
from test_joins_report import attributed, printed

HOUR_NS = 3600 * p.SECOND


@pytest.fixture(scope="module")
def two(run: p.Planted, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Recordings of two hosts, of programs that are alike: PIDs and calls are the same, addresses are not."""
    folder = tmp_path_factory.mktemp("two")
    other = p.planted()
    for row in other.allocations:
        row["addr"] += 1 << 40
    return (
        p.write_recording(folder / "a.lscope", run, name="a.lscope", host="node-a", boot="a"),
        p.write_recording(
            folder / "b.lscope", other, name="b.lscope", host="node-b", boot="b", awake_ns=p.UTC_AHEAD_NS + HOUR_NS
        ),
    )


def test_two_hosts_are_attributed_apart_and_that_is_said(
    two: tuple[Path, Path], opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given two recordings without any report
    joined = opened(*two).joined()
    (said,) = joined.outcomes
    assert (said.left, said.right, said.matched) == ("a.lscope", "b.lscope", 0)
    assert said.reasons == ("recordings of two hosts (node-a, node-b): attributed apart",)
    assert not joined.twice and not joined.links
    # then nothing is added up or left out
    report, alone = attributed(*two), attributed(two[0])
    layers = {(layer["source"], layer["layer"]): layer["live_bytes"] for layer in report["layers"]}
    of_one = {layer["layer"]: layer["live_bytes"] for layer in alone["layers"]}
    assert layers == {(source, layer): size for source in (0, 1) for layer, size in of_one.items()}
    # and the terminal names the capture of each line
    monkeypatch.setenv("COLUMNS", "200")
    text = printed("attribute", *two)
    assert "recordings of two hosts (node-a, node-b): attributed apart" in text
    assert [line.split()[:2] for line in text.splitlines() if line.startswith(("gpu ", "kernel "))] == [
        ["kernel", "a.lscope"], ["gpu", "a.lscope"], ["kernel", "b.lscope"], ["gpu", "b.lscope"],
    ]  # fmt: skip


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("clock", ["monotonic", "relative"])
def test_a_report_joins_the_recording_that_it_is_of(
    two: tuple[Path, Path], run: p.Planted, opened: Any, tmp_path: Path, clock: str, swapped: bool
) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", run, clock, p.LIVES[:1])
    joined = opened(*(two[::-1] if swapped else two), report).joined()
    assert outcome(joined, "identity", "allocations of", "a.lscope").matched == 300
    assert list(joined.links) == [1 if swapped else 0]


def test_a_report_that_may_be_of_either_is_joined_to_none(
    two: tuple[Path, Path], run: p.Planted, opened: Any, tmp_path: Path
) -> None:
    # given an ncu report that fits launches of the same PID on both hosts
    launches = run.of_life(p.LIVES[0], "launches")
    report = p.write_ncu(tmp_path / "k.lscope", run, p.LIVES[0], {"status": "usable", "reason": ""}, launches)
    # when both recordings are given
    joined = opened(*two, report).joined()
    # then it is refused, and with one of them it is joined
    refused = outcome(joined, "identity", "report.ncu-rep")
    assert (refused.matched, refused.refused) == (0, len(launches)) and not joined.profiles
    assert refused.reasons == ("it may be of a.lscope and b.lscope: name one of them alone",)
    assert len(opened(two[1], report).joined().profiles["report.ncu-rep"]) == len(launches)


def test_two_recordings_of_one_process_say_that_the_memory_is_the_same(
    run: p.Planted, opened: Any, tmp_path: Path
) -> None:
    paths = [p.write_recording(tmp_path / n, run, name=n, host="node-a", boot="a") for n in ("a.lscope", "b.lscope")]
    report = p.write_nsys(tmp_path / "n.lscope", run, "monotonic", p.LIVES[:1])
    joined = opened(*paths, report).joined()
    assert joined.outcomes[0].reasons == (
        "2 processes are in both recordings, so the same memory may stand in both: attributed apart",
    )
    assert outcome(joined, "identity", "allocations of", "a.lscope").matched == 300  # either is right: the first


def test_json_says_which_capture_a_site_is_of(two: tuple[Path, Path]) -> None:
    report = json.loads(printed("attribute", "--json", *two))
    assert {(site["source"], site["id"].split(":")[0]) for site in report["sites"]} == {(0, "0"), (1, "1")}
    assert [Path(i["path"]).name for i in report["inputs"]] == ["a.lscope", "b.lscope"]

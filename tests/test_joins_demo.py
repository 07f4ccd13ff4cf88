"""The demo service recorded with real probes, joined with an nsys-shaped export of the same run, made of the stand-in's
own log: clocks to less than a millisecond, every device allocation matched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nsys_files import ALLOC, DEVICE, FREE, SYSTEM_CLOCK_NS, NsysFile
from recording import LEAKSCOPE, record, sample

from leakscope.capture import Capture
from leakscope.correlate.joins.driver import join
from leakscope.correlate.joins.evidence import evidence_of
from leakscope.correlate.joins.joint import owned
from leakscope.correlate.joins.pair import join_pair
from leakscope.ingest import import_files

pytestmark = [pytest.mark.bpf, pytest.mark.usefixtures("bpf")]

REQUESTS = 400
KIB = 1024


def export_of(log: Path, path: Path, utc_less_monotonic_ns: int) -> tuple[Path, int]:
    """An export of the events in a stand-in's log, and how many of them are allocations. Its calls have the thread of
    the event and its time alone."""
    export = NsysFile()
    allocations = 0
    for line in log.read_text().splitlines():
        what, at, pid, tid, kind, address, size = line.split()
        assert kind == "0"  # the service takes plain device memory alone
        start = int(at) - SYSTEM_CLOCK_NS
        name = "cuMemAlloc_v2" if what == "A" else "cuMemFree_v2"
        call = export.call(start, start + 1_000, name, pid=int(pid), tid=int(tid))
        operation = ALLOC if what == "A" else FREE
        export.memory(start, operation, int(address), int(size), kind=DEVICE, correlation=call, pid=int(pid))
        allocations += what == "A"
    export.utc_ns = SYSTEM_CLOCK_NS + utc_less_monotonic_ns
    return export.write(path), allocations


def test_the_demo_and_an_export_of_it_are_one(tmp_path: Path) -> None:
    # given a recording of the service and an export of the same run
    log = tmp_path / "standin.log"
    command = sample("demo_service", "--count", REQUESTS, "--pause-us", 2_000)
    recording = record(tmp_path / "run.lscope", command, env={"STANDIN_LOG": str(log)})
    assert recording.code == 0, recording.stderr
    anchor = recording.capture.manifest.sources[0].anchors[0]
    export, allocations = export_of(log, tmp_path / "run.sqlite", anchor.realtime_ns - anchor.monotonic_ns)
    blocks = (REQUESTS + 16) // 17
    prefixes = (REQUESTS // 5 + 24) // 25
    assert allocations == REQUESTS + blocks + prefixes
    # when they are joined
    import_files([export], tmp_path / "export.lscope")
    captures = [Capture.open(tmp_path / name) for name in ("run.lscope", "export.lscope")]
    evidence = [e for i, c in enumerate(captures) for e in evidence_of(c.connect(), c.manifest, i)]
    joint = join_pair(*evidence)
    # then every device allocation has its partner, at addresses that were handed out again too
    ours, theirs = evidence[0].table("allocations").iloc[joint.pairs[0]], owned(evidence[1]).iloc[joint.pairs[1]]
    assert len(ours) == allocations == len(evidence[0].table("allocations"))
    apart = ours["ts_ns"].to_numpy() - theirs["ts_ns"].to_numpy()
    assert (apart > 0).all()  # the recording stamps the return of the call
    # and the clocks agree to less than a millisecond
    assert joint.alignment.offset_ns == 0 and joint.alignment.residual_ns is not None
    assert joint.alignment.residual_ns[0] < 1_000_000
    (clock,) = join(evidence).clocks
    assert clock.what == "clock residual" and clock.value == joint.alignment.residual_ns[0]


def test_attribute_counts_the_demo_once(tmp_path: Path) -> None:
    import subprocess

    log = tmp_path / "standin.log"
    command = sample("demo_service", "--count", REQUESTS, "--pause-us", 2_000)
    recording = record(tmp_path / "run.lscope", command, env={"STANDIN_LOG": str(log)})
    anchor = recording.capture.manifest.sources[0].anchors[0]
    export, allocations = export_of(log, tmp_path / "run.sqlite", anchor.realtime_ns - anchor.monotonic_ns)
    alone, both = (
        json.loads(
            subprocess.run(
                [*LEAKSCOPE, "attribute", "--json", *map(str, paths)], capture_output=True, check=True
            ).stdout
        )
        for paths in ([recording.path], [recording.path, export])
    )
    gpu = [[layer["live_bytes"] for layer in r["layers"] if layer["layer"] == "gpu"] for r in (alone, both)]
    assert gpu[0] == gpu[1] == [(REQUESTS + 16) // 17 * 256 * KIB + (REQUESTS // 5 + 24) // 25 * 4096 * KIB]
    (identity,) = [j for j in both["joins"] if j["rule"] == "identity"]
    assert (identity["matched"], identity["ambiguous"], identity["refused"]) == (allocations, 0, 0)

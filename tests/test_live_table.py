"""The probes' table of live objects: compiled for this machine, under threads; and recordings that overfill it."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from bpf_structures import WITHOUT_BPF, definitions
from recording import Recorder, waiting

import bpf_programs
from leakscope.detect.attribution import Options, attribute
from leakscope.record import records

SLOTS = 2048
"""The hash map for what is spilled has room for a quarter of them."""
PAIRS = 61


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/live_table.c, built with the structures of maps.h."""
    place = tmp_path_factory.mktemp("live")
    (place / "structures.h").write_text(WITHOUT_BPF + definitions())
    (place / "common.h").write_text('#include "verifier.h"\n')
    for name in ("verifier.h", "live.bpf.h"):
        (place / name).write_text((bpf_programs.DIRECTORY / name).read_text())
    command = ["gcc", "-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-pthread", "-o", "table"]
    subprocess.run([*command, "-I", ".", Path(__file__).parent / "live_table.c"], cwd=place, check=True)
    return place / "table"


def run(table: Path, *arguments: int) -> dict[str, int]:
    command = [str(table), *map(str, arguments)]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


@pytest.mark.parametrize(("threads", "addresses"), [(1, 200), (2, 100), (7, 60), (16, 60)])
def test_every_object_is_found_as_it_was_begun_and_nothing_else_is(table: Path, threads: int, addresses: int) -> None:
    # given 256 slots, and up to 960 addresses that are live half of the time
    found = run(table, threads, addresses, 50_000)
    assert found["wrong"] == found["full"] == found["filling"] == 0
    assert found["begun"] + found["ended"] == threads * 50_000
    assert found["left"] == found["begun"] - found["ended"] > 0
    assert found["spilled_most"] > 0


def test_what_finds_no_room_is_refused_and_counted(table: Path) -> None:
    found = run(table, 4, 300, 20_000, 10)
    assert found["wrong"] == 0 and found["spilled_most"] == 10
    assert found["full"] == 80_000 - found["begun"] - found["ended"] > 0


def bucket_of(addresses: np.ndarray, buckets: int) -> np.ndarray:
    """Where the probes look for addresses (live.bpf.h)."""
    page = addresses >> np.uint64(12) << np.uint64(3) | addresses >> np.uint64(3) & np.uint64(7)
    page = page * np.uint64(0x9E3779B97F4A7C15)
    page ^= page >> np.uint64(32)
    return (page & ~np.uint64(15) | (addresses >> np.uint64(8) ^ page) & np.uint64(15)) & np.uint64(buckets - 1)


@pytest.mark.parametrize(("size", "most_spilled"), [(64, 0.22), (192, 0.08), (1024, 0.06), (4096, 0.04)])
def test_objects_of_every_size_spread_over_a_table_that_is_half_full(
    table: Path, size: int, most_spilled: float
) -> None:
    # given 2,048 objects in slabs of 8 pages anywhere in 8 GiB, for 1,024 buckets of four
    slabs = np.random.default_rng(1).choice((8 << 30) >> 15, 2048 * size >> 15, replace=False).astype(np.uint64)
    within = np.arange((1 << 15) // size, dtype=np.uint64) * np.uint64(size)
    objects = (np.uint64(0xFFFF888000000000) + (slabs[:, None] << np.uint64(15)) + within).ravel()
    buckets = np.bincount(bucket_of(objects, 1024), minlength=1024)
    spilled = np.maximum(buckets - records.LIVE_WAYS, 0).sum() / len(objects)
    assert spilled <= most_spilled
    # as the probes see it
    shown = subprocess.run([table, "buckets"], input="\n".join(map(str, objects)), capture_output=True, text=True)
    assert list(map(int, shown.stdout.split())) == bucket_of(objects, 64).tolist()


@pytest.mark.bpf
@pytest.mark.parametrize("mode", ["stream", "census"])
def test_what_the_table_has_no_slot_for_is_recorded_all_the_same(bpf: str, tmp_path: Path, mode: str) -> None:
    # given a table with room for all that is kept, but buckets that are too few for some of it
    options = ("--mode", mode, "--live-entries", SLOTS, "--stacks", "all")
    with (
        waiting("leak_socketpair", "--count", PAIRS, "--churn", 2, "--pause-us", 500) as target,
        Recorder(tmp_path / "x.lscope", "-p", target.pid, *options) as recorder,
    ):
        recorder.wait_ready()
        report = target.go()
        time.sleep(0.3)  # what RCU frees late
        recording = recorder.stop()
    assert recording.losses("live_map_full") == recording.losses("live_map_busy") == 0
    # when what the leaking function keeps is counted
    [site] = report["sites"]
    with recording.capture.connect() as con:
        found = attribute(con, recording.capture.manifest, Options()).sites
    kept: Counter[str] = Counter()
    for one in found:
        if any(site["function"] in frame for frame in one.stack) and one.live_objects >= PAIRS:
            kept[one.slab_cache] += one.live_objects
    # then it is whole
    assert kept["kmalloc-cg-4k"] == site["objects"] == PAIRS
    assert len(kept) >= 5
    if mode == "stream":
        live = recording.rows("SELECT addr FROM events WHERE layer = 'kernel' GROUP BY addr HAVING sum(object) > 0")
        buckets = np.bincount(bucket_of(np.array(live, np.uint64).reshape(-1), SLOTS // records.LIVE_WAYS))
        assert buckets.max() > records.LIVE_WAYS
        assert np.maximum(buckets - records.LIVE_WAYS, 0).sum() < SLOTS // 4

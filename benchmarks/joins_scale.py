"""Time and peak memory of the joins on generated tables, beside a plain one-level ``pandas.merge_asof``.

    python -m benchmarks.joins_scale [--millions 10] [--plain]

10 M kernel events, 1 M CUDA API calls of two depths and 100 k launches of 20 threads in 4 processes, and an export of
the same calls and 200 k device allocations: clocks, identity, nesting at every depth, both windows and launch order.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from benchmarks.attribute_scale import _filled, _text
from leakscope.capture import Capture, CaptureWriter
from leakscope.model.manifest import ClockAnchor, Manifest, Source
from leakscope.model.tables import CALLS, KERNEL_PROFILES, LAUNCHES, MAX_PART_ROWS, MEM_EVENTS, PROCESSES

START_NS, STEP_NS, THREADS, PROCESSES_COUNT = 1_000_000_000, 4_000, 20, 4
AHEAD_NS = 1_700_000_000_000_000_000


def write(path: Path, source: Source, tables: dict[str, pa.Table]) -> Path:
    """A capture of one source."""
    writer = CaptureWriter.create(path, Manifest(sources=[source]))
    for name, table in tables.items():
        for at in range(0, len(table), MAX_PART_ROWS):
            writer.write(name, table.slice(at, MAX_PART_ROWS))
    writer.finish()
    return path


def build(folder: Path, events: int) -> tuple[Path, Path, Path]:
    """(recording, export, ncu report) with ``events`` kernel events and a tenth of that of calls."""
    rng = np.random.default_rng(1)
    anchor = ClockAnchor(AHEAD_NS + START_NS, START_NS, START_NS)
    pairs = events // 20
    enter = START_NS + np.arange(pairs, dtype=np.int64) * STEP_NS
    who = rng.integers(0, THREADS, pairs)
    pid, tid = 100 + who % PROCESSES_COUNT, 1000 + who
    # A runtime call of 3 µs and the driver call inside it.
    calls = {
        "id": np.arange(1, 2 * pairs + 1), "parent_id": np.repeat(np.arange(pairs) * 2 + 1, 2) * np.tile([0, 1], pairs),
        "pid": np.repeat(pid, 2), "tid": np.repeat(tid, 2), "api": np.tile(["cudaMalloc", "cuMemAlloc"], pairs),
        "enter_ns": np.repeat(enter, 2) + np.tile([0, 500], pairs),
        "exit_ns": np.repeat(enter, 2) + np.tile([3_000, 2_500], pairs),
    }  # fmt: skip
    span = pairs * STEP_NS
    at = np.sort(START_NS + rng.integers(0, span, events))
    by = rng.integers(0, THREADS, events)
    kernel_site = rng.integers(1, 2_000, events)
    zeros = np.zeros(events, np.int64)
    made = max(1, events // 50)
    chosen = np.sort(rng.choice(pairs, made, replace=False))

    def mem(count: int, device: bool, **columns: object) -> pa.Table:
        none = np.zeros(count, np.int64)
        words = ("gpu", "device", "cudaMalloc") if device else ("kernel", "kmalloc", "kmalloc")
        fixed = dict(zip(("layer", "kind", "api"), ([word] for word in words), strict=True))
        fixed |= {"op": ["alloc"], "cause": ["call"], "slab_cache": [""]}
        given = {name: _text(none, values) for name, values in fixed.items()} | columns
        arrays = [given.get(f.name, none) for f in MEM_EVENTS]
        arrays = [a if isinstance(a, pa.Array) else pa.array(a) for a in arrays]
        return pa.table(arrays, names=MEM_EVENTS.names).cast(MEM_EVENTS)

    address = (0x7F00_0000_0000 + np.arange(made) * 4096).astype(np.uint64)
    device = {"pid": pid[chosen], "tid": tid[chosen], "addr": address, "size_bytes": np.full(made, 4096)}
    kernel = mem(
        events, False, ts_ns=at, pid=100 + by % PROCESSES_COUNT, tid=1000 + by, size_bytes=zeros + 64,
        weight=zeros + 1, kernel_stack=kernel_site, call_site=kernel_site,
    )  # fmt: skip
    ours = mem(made, True, ts_ns=enter[chosen] + 3_000, weight=np.ones(made), **device)
    theirs = mem(made, True, ts_ns=enter[chosen] + 1_000 + AHEAD_NS, weight=np.ones(made), **device)
    count = events // 100
    launched = np.sort(START_NS + rng.integers(0, span, count))
    of = rng.integers(0, THREADS, count)
    kernels = np.array(["gemm", "softmax", "reduce"])[rng.integers(0, 3, count)]
    shapes = [[int(i % 7) + 1, 1, 1] for i in range(count)]
    launch = {
        "id": np.arange(1, count + 1), "ts_ns": launched, "pid": 100 + of % PROCESSES_COUNT, "tid": 1000 + of,
        "api": ["cuLaunchKernel"] * count, "kernel": kernels, "grid": shapes, "block": shapes,
    }  # fmt: skip
    processes = {"pid": np.arange(100, 104), "namespace_pid": np.arange(100, 104), "start_ns": [START_NS] * 4,
                 "role": ["root"] * 4}  # fmt: skip
    recording = Source(
        0, "recording", "recording", "monotonic", start_ns=START_NS, end_ns=START_NS + span, anchors=[anchor, anchor]
    )
    paths = folder / "recording.lscope", folder / "export.lscope", folder / "ncu.lscope"
    write(
        paths[0], recording,
        {"mem_events": pa.concat_tables([kernel, ours]), "calls": _filled(CALLS, calls, 2 * pairs),
         "launches": _filled_lists(LAUNCHES, launch, count), "processes": _filled(PROCESSES, processes, 4)},
    )  # fmt: skip
    moved = calls | {name: calls[name] + AHEAD_NS for name in ("enter_ns", "exit_ns")}
    export = Source(0, "nsys", "export.sqlite", "utc")
    write(paths[1], export, {"mem_events": theirs, "calls": _filled(CALLS, moved, 2 * pairs)})
    order = np.argsort(launch["pid"], kind="stable")
    profile = {"id": np.arange(1, count + 1), "api_call_id": np.arange(1, count + 1)}
    profile |= {name: np.asarray(launch[name])[order] for name in ("pid", "tid", "kernel")}
    profile |= {name: [shapes[i] for i in order.tolist()] for name in ("grid", "block")}
    facts = {"launch_order": {"status": "usable", "reason": ""}}
    write(
        paths[2], Source(0, "ncu_rep", "report.ncu-rep", "none", facts=facts),
        {"kernel_profiles": _filled_lists(KERNEL_PROFILES, profile, count)},
    )  # fmt: skip
    return paths


def _filled_lists(schema: pa.Schema, columns: dict, rows: int) -> pa.Table:
    """As ``_filled``, for a schema with lists."""
    columns = dict(columns)
    for field in schema:
        if pa.types.is_list(field.type):
            columns.setdefault(field.name, [[]] * rows)
    return _filled(schema, columns, rows)


def measure(paths: tuple[Path, ...]) -> dict:
    """Join the three; seconds, peak MiB and what was matched by each rule."""
    from leakscope.correlate.joins.driver import join
    from leakscope.correlate.joins.evidence import evidence_of

    captures = [Capture.open(path) for path in paths]
    began = time.perf_counter()
    evidence = [
        e for number, c in enumerate(captures) for e in evidence_of(c.connect(memory_limit="1GiB"), c.manifest, number)
    ]
    joined = join(evidence)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    matched: dict[str, int] = {}
    for outcome in joined.outcomes:
        matched[outcome.rule] = matched.get(outcome.rule, 0) + outcome.matched
    return {"seconds": round(seconds, 2), "peak_mib": round(peak), "matched": matched}


def measure_plain(path: Path) -> dict:
    """One level of ``pandas.merge_asof`` on the same events and calls; reading and sorting them is not counted."""
    con = Capture.open(path).connect()
    events = con.execute("SELECT tid, ts_ns FROM mem_events WHERE layer = 'kernel' ORDER BY ts_ns").df()
    calls = con.execute("SELECT tid, enter_ns AS ts_ns, exit_ns FROM calls WHERE parent_id = 0 ORDER BY enter_ns").df()
    began = time.perf_counter()
    found = pd.merge_asof(events, calls, on="ts_ns", by="tid")
    inside = int((found["ts_ns"] <= found["exit_ns"]).sum())
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": round(seconds, 2), "peak_mib": round(peak), "matched": {"nesting": inside}}


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=10.0, help="kernel events, in millions")
    parser.add_argument("--build", type=Path, help="only build the captures, in this directory")
    parser.add_argument("--captures", type=Path, help="use the captures in this directory")
    parser.add_argument("--plain", action="store_true", help="pandas.merge_asof, one level")
    options = parser.parse_args()
    if options.build:
        build(options.build, int(options.millions * 1e6))
        return
    with tempfile.TemporaryDirectory(prefix="leakscope-bench-") as folder:
        at = options.captures or Path(folder)
        if not options.captures:
            build(at, int(options.millions * 1e6))
        paths = tuple(at / f"{name}.lscope" for name in ("recording", "export", "ncu"))
        print(json.dumps(measure_plain(paths[0]) if options.plain else measure(paths)))


if __name__ == "__main__":
    main()

"""Time and peak memory of ``leakscope attribute`` on a synthetic capture of N million events.

    python benchmarks/attribute_scale.py [--millions 10] [--directory DIR] [--keep]

The capture has 3,000 kernel sites in 200 processes with Zipf-like rates, stacks sampled 1 in 64 at the hot
ones, as many frees as allocations but for one site that leaks, and CUDA calls with allocations nested in
them.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from leakscope.capture import CaptureWriter
from leakscope.model.manifest import Manifest, Source
from leakscope.model.tables import CALLS, FRAMES, MAX_PART_ROWS, MEM_EVENTS, PROCESSES, STACKS

SITES, PROCESSES_COUNT, LEAKING_SITE, NS_A_ROUND = 3000, 200, 7, 300
START_NS = 1_000_000_000
CACHES = [
    "kmalloc-64",
    "kmalloc-cg-4k",
    "filp",
    "dentry",
    "sock_inode_cache",
    "signal_cache",
    "kmalloc-rnd-03-96",
]


def _text(codes: np.ndarray, values: list[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int16)), pa.array(values))


def _events(rng: np.random.Generator, first: int, rounds: int) -> pa.Table:
    """``rounds`` allocations and their frees (none at the leaking site), sorted by time."""
    site = np.minimum(SITES - 1, rng.zipf(1.35, rounds) - 1).astype(np.int32)
    at = START_NS + (first + np.arange(rounds, dtype=np.int64)) * NS_A_ROUND
    weight = np.where(site < 50, np.where(rng.random(rounds) < 1 / 64, 64, 0), 1).astype(np.int32)
    freed = np.flatnonzero(site != LEAKING_SITE)
    pick = np.concatenate([np.arange(rounds), freed])
    free = np.concatenate([np.zeros(rounds, bool), np.ones(len(freed), bool)])
    ts = at[pick] + np.where(free, 5_000, 0)
    order = np.argsort(ts, kind="stable")
    pick, free, ts = pick[order], free[order], ts[order]
    n, s, w = len(pick), site[pick], weight[pick]
    zeros = np.zeros(n, np.int64)
    pid = (1000 + (pick * 7919 + first) % PROCESSES_COUNT).astype(np.int32)
    size = 32 * (1 + s.astype(np.int64) % 16)
    columns = {
        "source_id": zeros, "ts_ns": ts, "pid": pid, "tid": pid, "cpu": zeros, "op": _text(free, ["alloc", "free"]),
        "cause": _text(zeros, ["call"]), "layer": _text(zeros, ["kernel"]), "kind": _text(s % 2, ["kmalloc", "slab"]),
        "api": _text(s % 2, ["kmalloc", "kmem_cache_alloc"]), "slab_cache": _text(s % len(CACHES), CACHES),
        "addr": (0xFFFF_8880_0000_0000 + (first + pick).astype(np.uint64) % 50_000_000 * 64),
        "size_bytes": size, "requested_bytes": size, "call_site": 1 + s,
        "kernel_stack": np.where(w, SITES + 1 + s, 1 + s), "user_stack": np.where(w, 2 * SITES + 1 + s, 0),
        "python_stack": zeros, "weight": w, "call_id": zeros, "result": zeros,
        "alloc_ts_ns": np.where(free, at[pick], 0),
    }  # fmt: skip
    arrays = [c if isinstance(c, pa.Array) else pa.array(c) for c in (columns.get(f.name, zeros) for f in MEM_EVENTS)]
    return pa.table(arrays, names=MEM_EVENTS.names).cast(MEM_EVENTS)


def build(path: Path, events: int) -> None:
    """Write a capture of about ``events`` mem_events to ``path``."""
    rng = np.random.default_rng(1)
    rounds = events // 2
    end = START_NS + rounds * NS_A_ROUND
    source = Source(0, "recording", "synthetic", "monotonic", start_ns=START_NS, end_ns=end)
    writer = CaptureWriter.create(path, Manifest(sources=[source]), force=True)
    chunk = MAX_PART_ROWS // 2
    for first in range(0, rounds, chunk):
        writer.write("mem_events", _events(rng, first, min(chunk, rounds - first)))
    # Stacks: 1.. of the call sites alone, then the kernel stacks, then the user stacks of the sites.
    frames = [f"function_{i}" for i in range(3 * SITES)]
    texts = {"function": frames, "kind": ["kernel"] * (2 * SITES) + ["native"] * SITES}
    ids = np.arange(1, 3 * SITES + 1, dtype=np.int32)
    stacks = [[i] for i in range(1, SITES + 1)]
    stacks += [[SITES + i, i] for i in range(1, SITES + 1)] + [
        [2 * SITES + 1, 2 * SITES + i] for i in range(1, SITES + 1)
    ]
    writer.write("frames", _filled(FRAMES, {"id": ids, **texts}, len(ids)))
    writer.write("stacks", pa.table({"id": ids, "frames": stacks}).cast(STACKS))
    pids = np.arange(1000, 1000 + PROCESSES_COUNT)
    roles = ["root"] + ["other"] * (PROCESSES_COUNT - 1)
    writer.write(
        "processes",
        _filled(PROCESSES, {"pid": pids, "start_ns": [START_NS] * len(pids), "role": roles}, len(pids)),
    )
    calls = max(1, events // 200)
    enter = START_NS + np.arange(calls, dtype=np.int64) * ((end - START_NS) // calls)
    call = {"id": np.arange(1, calls + 1), "pid": 1000 + np.arange(calls) % 20, "tid": 1000 + np.arange(calls) % 20,
            "api": ["cudaMalloc"] * calls, "enter_ns": enter, "exit_ns": enter + 10_000}  # fmt: skip
    table = _filled(CALLS, call, calls)
    for at in range(0, calls, MAX_PART_ROWS):
        writer.write("calls", table.slice(at, MAX_PART_ROWS))
    writer.finish()


def _filled(schema: pa.Schema, columns: dict, rows: int) -> pa.Table:
    """A table of ``schema`` with 0 and '' in the columns that are not given."""
    arrays = []
    for field in schema:
        plain = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        values = columns.get(field.name, [""] * rows if pa.types.is_string(plain) else np.zeros(rows, np.int64))
        arrays.append(pa.array(values).cast(plain))
    return pa.table(arrays, names=schema.names).cast(schema)


def measure(path: Path) -> dict:
    """Run ``attribute --json`` on ``path`` in a process of its own; seconds, peak RSS and the verdict."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "leakscope", "attribute", str(path), "--json"], capture_output=True, check=True
    )
    seconds = time.perf_counter() - began
    verdict = json.loads(done.stdout)["verdict"]
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {"seconds": round(seconds, 2), "peak_mib": round(peak_mib), "verdict": verdict["verdict"],
            "culprit": (verdict["culprit"] or {}).get("frame")}  # fmt: skip


def main() -> None:
    """Build, measure, print one line of JSON a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="+", default=[10.0], help="events, in millions")
    parser.add_argument("--directory", type=Path, help="where to build the captures; default a temporary folder")
    parser.add_argument("--keep", action="store_true", help="keep the captures")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="leakscope-bench-", dir=options.directory))
    try:
        for millions in options.millions:
            path = folder / f"{millions:g}m.lscope"
            build(path, int(millions * 1e6))
            print(json.dumps({"million_events": millions, **measure(path)}), flush=True)
    finally:
        if not options.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()

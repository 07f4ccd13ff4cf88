"""``leakscope liveness`` on a cache of a million objects: the whole verb on a capture, in a process of its own.

    python -m benchmarks.liveness --nodes 1000000     build, measure, print one line of JSON

Half of the objects are blocks of prefixes (each keeps the block before it), more than half are held by some of 1,000
owners, the others are kept by the cache alone; a tenth as many were evicted before the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.results import ROOT, Bar, Options, Result, Table
from leakscope.capture import Capture, CaptureWriter
from leakscope.model.manifest import Manifest, Source
from leakscope.model.tables import MAX_PART_ROWS
from nsight_parsers.arrow import Coded, build_table

NODES, EDGES, QUICK_NODES = 1_000_000, 1_500_000, 20_000
LIMIT_S, LIMIT_MIB = 8.0, 700
OWNERS, PREFIX, BLOCK_BYTES = 1_000, 64, 1 << 20
OPS = ("insert", "evict", "pin", "unpin")


VERB = """
import sys
from leakscope.cli.main import main
code = main(sys.argv[1:])
sys.stdout.flush()
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""
"""The verb, and its peak of resident memory on stderr: the ru_maxrss of a child that was made by vfork is at least what
its parent had, which built the capture."""


def build(path: Path, nodes: int) -> None:
    """A capture with about ``nodes`` live objects and 1.5 times as many edges."""
    rng = np.random.default_rng(1)
    live = nodes - OWNERS - 3
    number = np.arange(live + live // 10)
    in_prefix = (number % PREFIX != 0) & (number % (2 * PREFIX) < PREFIX)
    names = np.char.add("block-", number.astype(str))
    parents = np.where(in_prefix, np.char.add("block-", (number - 1).astype(str)), "")
    gone = number[number >= live]
    held = rng.choice(live, nodes * 21 // 20, replace=True)
    owner = rng.integers(0, OWNERS, len(held))
    given_up = rng.random(len(held)) < 0.25
    which = np.concatenate([number, gone, held, held[given_up]])
    ops = np.repeat([0, 1, 2, 3], [len(number), len(gone), len(held), int(given_up.sum())])
    who = np.concatenate([np.full(len(number) + len(gone), OWNERS), owner, owner[given_up]])
    at = np.concatenate(
        [number * 1_000, (number[gone] + 5_000) * 1_000, 4 * live * 1_000 + np.arange(len(held)) * 1_000,
         4 * live * 1_000 + np.flatnonzero(given_up) * 1_000 + 500_000_000]
    )  # fmt: skip
    order = np.argsort(at, kind="stable")
    which, ops, who, at = which[order], ops[order], who[order], at[order] + 1_000_000_000
    owners = [f"request-{i}" for i in range(OWNERS)] + ["store"]
    table = build_table(
        "cache_events",
        len(which),
        ts_ns=at,
        op=Coded(ops, OPS),
        object=pa.array(names[which]),
        parent=pa.array(np.where(ops == 0, parents[which], "")),
        size_bytes=np.where(ops == 0, BLOCK_BYTES, 0),
        owner=pa.array(np.array(owners)[who]),
    )
    source = Source(0, "cache_log", "cache", "relative", start_ns=int(at[0]), end_ns=int(at[-1]))
    writer = CaptureWriter.create(path, Manifest(sources=[source]), force=True)
    for first in range(0, len(table), MAX_PART_ROWS):
        writer.write("cache_events", table.slice(first, MAX_PART_ROWS))
    writer.finish()


def measure(path: Path) -> dict[str, object]:
    """Run the verb; seconds, peak MiB, nodes and edges."""
    began = time.perf_counter()
    command = [sys.executable, "-c", VERB, "liveness", str(path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    seconds = time.perf_counter() - began
    found = json.loads(done.stdout)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": round(int(done.stderr.split()[-2]) / 1024),
        "events": Capture.open(path).rows("cache_events"),
        "nodes": sum(found["nodes"].values()),
        "edges": sum(found["edges"].values()),
    }


def run(options: Options) -> Result:
    """The verb a few times, in processes of their own: a run is short."""
    nodes = QUICK_NODES if options.quick else NODES
    command = [sys.executable, "-m", "benchmarks.liveness", "--nodes", str(nodes)]
    measured = [
        json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)
        for _ in range(1 if options.quick else min(options.rounds, 3))
    ]
    best = sorted(measured, key=lambda m: m["seconds"])[len(measured) // 2]
    result = Result("liveness", "liveness of a large cache", figures={"runs": measured})
    row = [f"{best[name]:,}" for name in ("nodes", "edges", "events", "seconds", "cpu_seconds", "peak_mib")]
    headers = ["nodes", "edges", "events", "seconds", "CPU seconds", "peak memory, MiB"]
    result.tables.append(Table("The whole verb, from capture to JSON", headers, [row]))
    if not options.quick:
        result.bars.append(Bar("liveness, 1 M nodes", best["seconds"], LIMIT_S, unit="s"))
        result.bars.append(Bar("liveness, 1 M nodes, peak memory", best["peak_mib"], LIMIT_MIB, unit="MiB"))
    return result


def main() -> None:
    """Build, measure, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=NODES, help="objects that are live at the end, about")
    parser.add_argument("--capture", type=Path, help="use this capture")
    parser.add_argument("--build", type=Path, help="only build the capture, here")
    options = parser.parse_args()
    if options.build:
        build(options.build, options.nodes)
        return
    with tempfile.TemporaryDirectory(prefix="leakscope-bench-") as folder:
        path = options.capture or Path(folder) / "cache.lscope"
        if not options.capture:
            build(path, options.nodes)
        print(json.dumps(measure(path)))


if __name__ == "__main__":
    main()

"""How much slower storms of kernel allocations run while they are recorded, beside memleak and bpftrace."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from benchmarks.recorders import Recording, Tool, bpftrace, leakscope, memleak
from benchmarks.results import Bar, Options, Result, Spread, Table
from benchmarks.workloads import OPERATIONS, build_storms, operations, run_storm

NONE, SAMPLED, ALL, MEMLEAK = (
    "leakscope --stacks none",
    "leakscope (default)",
    "leakscope --stacks all",
    "memleak-bpfcc",
)
_QUICK_TOOLS = {NONE, SAMPLED, MEMLEAK}
_PAUSE_S = 0.3  # lets RCU callbacks of the recorder before run out

_LIMITS = {  # storm: without stacks, default, default's added cost as a share of memleak's
    "open": (1.7, 1.9, 1 / 3),
    "socketpair": (1.7, 1.9, 1 / 3),
    "spawn": (1.4, 1.6, 1 / 2),
}


def tools() -> list[Tool]:
    """All that is compared. Every one records the whole host, but for the two that are named otherwise."""
    return [
        leakscope(NONE, "--stacks", "none"),
        leakscope(SAMPLED),
        leakscope(ALL, "--stacks", "all"),
        leakscope("leakscope -p (the storm)", "-p", str(os.getpid())),  # the storms are its children
        leakscope("leakscope -p (another process)", "-p", str(os.getppid())),
        memleak(),
        bpftrace("bpftrace, live map", stacks=False),
        bpftrace("bpftrace, live map with kernel stacks", stacks=True),
    ]


def run(options: Options) -> Result:
    """Rounds of: every tool once, in an order that rotates, with the storms alone before and after."""
    build_storms()
    result = Result("overhead", "Slow-down of storms of kernel allocations")
    wanted = [tool for tool in tools() if not options.quick or tool.name in _QUICK_TOOLS]
    present = [tool for tool in wanted if tool.installed]
    result.notes += [f"{tool.name} is not installed" for tool in wanted if not tool.installed]
    ratios: dict[str, dict[str, list[float]]] = {tool.name: {storm: [] for storm in OPERATIONS} for tool in present}
    alone_ns: dict[str, list[float]] = {storm: [] for storm in OPERATIONS}
    starts: dict[str, list[float]] = {tool.name: [] for tool in present}
    stops: dict[str, list[float]] = {tool.name: [] for tool in present}
    dropped = dict.fromkeys((tool.name for tool in present if tool.makes_capture), 0)
    for number in range(1 if options.quick else options.rounds):
        first = _storms(options)
        times: dict[str, dict[str, float]] = {}
        turn = number % len(present)
        for tool in present[turn:] + present[:turn]:
            with tempfile.TemporaryDirectory(prefix="leakscope-bench-") as folder:
                recording = Recording(tool, Path(folder))
                times[tool.name] = _storms(options)
                summary = recording.stop()
            starts[tool.name].append(recording.start_s)
            stops[tool.name].append(recording.stop_s)
            if tool.makes_capture:
                dropped[tool.name] += sum(loss["count"] for loss in summary["losses"] if loss["what"] == "ring_drop")
            time.sleep(0 if options.quick else _PAUSE_S)
        last = _storms(options)
        for storm in OPERATIONS:
            alone = (first[storm] + last[storm]) / 2
            alone_ns[storm] += [first[storm], last[storm]]
            for name, measured in times.items():
                ratios[name][storm].append(measured[storm] / alone)
    spreads = {name: {storm: Spread.of(values) for storm, values in row.items()} for name, row in ratios.items()}
    result.figures = {
        "ratios": ratios,
        "alone_ns": alone_ns,
        "start_s": starts,
        "stop_s": stops,
        "ring_drops": dropped,
        "operations": {storm: operations(storm, options) for storm in OPERATIONS},
    }
    result.tables.append(_ratio_table(spreads, alone_ns))
    result.tables.append(
        Table(
            "Start, stop and events lost",
            ["tool", "start to attached, s", "end to prompt, s", "ring drops, all rounds"],
            [
                [
                    n,
                    Spread.of(starts[n]).text(1),
                    Spread.of(stops[n]).text(1),
                    f"{dropped[n]:,}" if n in dropped else "",
                ]
                for n in ratios
            ],
        )
    )
    result.bars = _bars(ratios, spreads)
    return result


def _storms(options: Options) -> dict[str, float]:
    return {storm: run_storm(storm, operations(storm, options)) for storm in OPERATIONS}


def _ratio_table(spreads: dict[str, dict[str, Spread]], alone_ns: dict[str, list[float]]) -> Table:
    rows = [["alone, µs an operation", *(Spread.of(v / 1000 for v in ns).text() for ns in alone_ns.values())]]
    rows += [[name, *(spread.text() for spread in row.values())] for name, row in spreads.items()]
    return Table("Times as long as alone", ["tool", *alone_ns], rows)


def _bars(ratios: dict[str, dict[str, list[float]]], spreads: dict[str, dict[str, Spread]]) -> list[Bar]:
    bars = []
    for storm, (without_stacks, default, share) in _LIMITS.items():
        bars.append(Bar(f"{storm} without stacks", spreads[NONE][storm].median, without_stacks, unit="x"))
        bars.append(Bar(f"{storm} default", spreads[SAMPLED][storm].median, default, unit="x"))
        if MEMLEAK in ratios:
            pairs = zip(ratios[SAMPLED][storm], ratios[MEMLEAK][storm], strict=True)
            added = Spread.of((ours - 1) / max(theirs - 1, 1e-9) for ours, theirs in pairs)
            bars.append(Bar(f"{storm}: default's added cost / memleak's", added.median, share))
    return bars

"""How much slower storms of kernel allocations run while they are recorded, beside memleak and bpftrace."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from benchmarks.recorders import Recording, Tool, bpftrace, leakscope, memleak
from benchmarks.results import Bar, Options, Result, Spread, Table
from benchmarks.workloads import OPERATIONS, Cost, build_storms, operations, run_storm

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


Costs = dict[str, dict[str, list[float]]]
"""Tool: storm: figures by round."""


def run(options: Options) -> Result:
    """Rounds of: every tool once, in an order that rotates, with the storms alone before and after."""
    build_storms()
    result = Result("overhead", "Slow-down of storms of kernel allocations")
    wanted = [tool for tool in tools() if not options.quick or tool.name in _QUICK_TOOLS]
    present = [tool for tool in wanted if tool.installed]
    result.notes += [f"{tool.name} is not installed" for tool in wanted if not tool.installed]
    wall: Costs = {tool.name: {storm: [] for storm in OPERATIONS} for tool in present}
    processor: Costs = {tool.name: {storm: [] for storm in OPERATIONS} for tool in present}
    alone: dict[str, list[Cost]] = {storm: [] for storm in OPERATIONS}
    starts: dict[str, list[float]] = {tool.name: [] for tool in present}
    stops: dict[str, list[float]] = {tool.name: [] for tool in present}
    dropped = dict.fromkeys((tool.name for tool in present if tool.makes_capture), 0)
    for number in range(1 if options.quick else options.rounds):
        first = _storms(options)
        recorded: dict[str, dict[str, Cost]] = {}
        turn = number % len(present)
        for tool in present[turn:] + present[:turn]:
            with tempfile.TemporaryDirectory(prefix="leakscope-bench-") as folder:
                recording = Recording(tool, Path(folder))
                recorded[tool.name] = _storms(options)
                summary = recording.stop()
            starts[tool.name].append(recording.start_s)
            stops[tool.name].append(recording.stop_s)
            if tool.makes_capture:
                dropped[tool.name] += sum(loss["count"] for loss in summary["losses"] if loss["what"] == "ring_drop")
            time.sleep(0 if options.quick else _PAUSE_S)
        last = _storms(options)
        for storm in OPERATIONS:
            alone[storm] += [first[storm], last[storm]]
            for name, costs in recorded.items():
                wall[name][storm].append(2 * costs[storm].wall_ns / (first[storm].wall_ns + last[storm].wall_ns))
                own_ns = first[storm].processor_ns + last[storm].processor_ns
                processor[name][storm].append(2 * costs[storm].processor_ns / own_ns)
    alone_wall = {storm: Spread.of(cost.wall_ns / 1000 for cost in costs) for storm, costs in alone.items()}
    alone_processor = {storm: Spread.of(cost.processor_ns / 1000 for cost in costs) for storm, costs in alone.items()}
    result.tables = [
        _ratios("Times as long as alone, wall time", wall, alone_wall),
        _ratios("Times the processor time of the storm alone (without the recorder's own)", processor, alone_processor),
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
                for n in wall
            ],
        ),
    ]
    result.bars = _bars(wall)
    result.figures = {
        "ratios": wall,
        "processor_ratios": processor,
        "alone_ns": alone,
        "start_s": starts,
        "stop_s": stops,
        "ring_drops": dropped,
        "operations": {storm: operations(storm, options) for storm in OPERATIONS},
    }
    return result


def _storms(options: Options) -> dict[str, Cost]:
    return {storm: run_storm(storm, operations(storm, options)) for storm in OPERATIONS}


def _ratios(title: str, ratios: Costs, alone_us: dict[str, Spread]) -> Table:
    rows = [["alone, µs an operation", *(spread.text() for spread in alone_us.values())]]
    rows += [[name, *(Spread.of(values).text() for values in row.values())] for name, row in ratios.items()]
    return Table(title, ["tool", *alone_us], rows)


def _bars(ratios: Costs) -> list[Bar]:
    bars = []
    for storm, (without_stacks, default, share) in _LIMITS.items():
        bars.append(Bar(f"{storm} without stacks", Spread.of(ratios[NONE][storm]).median, without_stacks, unit="x"))
        bars.append(Bar(f"{storm} default", Spread.of(ratios[SAMPLED][storm]).median, default, unit="x"))
        if MEMLEAK in ratios:
            pairs = zip(ratios[SAMPLED][storm], ratios[MEMLEAK][storm], strict=True)
            added = Spread.of((ours - 1) / max(theirs - 1, 1e-9) for ours, theirs in pairs)
            bars.append(Bar(f"{storm}: default's added cost / memleak's", added.median, share))
    return bars

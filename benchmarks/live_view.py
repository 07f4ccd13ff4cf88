"""What the live view of ``leakscope record`` adds to the recorder's processor time: beside nothing and a storm."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from benchmarks.recorders import Recording, Tool, leakscope
from benchmarks.results import Bar, Options, Result, Spread, Table
from benchmarks.workloads import build_storms, operations, run_storm

STORM = "open"
MOST_ADDED_SHARE = 0.02
QUIET_S, QUICK_S = 15.0, 0.5
_SETTLED_S = 1.5
_HOW = ("none", "live")


def run(options: Options) -> Result:
    """Rounds of: recorder without a view and with one, each beside nothing and beside a storm."""
    build_storms()
    quiet: dict[str, list[float]] = {how: [] for how in _HOW}
    storm: dict[str, list[float]] = {how: [] for how in _HOW}
    for _ in range(1 if options.quick else options.rounds):
        for how in _HOW:
            # The storm is this process's child: others of the host do not count.
            tool = leakscope(f"--progress {how}", "--progress", how, "-p", str(os.getpid()))
            share, a_million = _measure(tool, options, terminal=how == "live")
            quiet[how].append(100 * share)
            storm[how].append(a_million)
    table = Table(
        "Processor time of the recorder",
        ["stderr shows", "quiet target, % of a CPU", f"storm ({STORM}), CPU s per M events"],
        [[how, Spread.of(quiet[how]).text(), Spread.of(storm[how]).text()] for how in _HOW],
    )
    added = Spread.of(quiet["live"]).median - Spread.of(quiet["none"]).median
    bars = [Bar("live view, quiet target: added", added, 100 * MOST_ADDED_SHARE, unit="% of a CPU")]
    return Result("live_view", "The live view", [table], bars, {"quiet_percent": quiet, "storm_s_a_million": storm})


def _measure(tool: Tool, options: Options, *, terminal: bool) -> tuple[float, float]:
    """(share of a CPU beside a quiet target, CPU seconds a million events of a storm)."""
    with tempfile.TemporaryDirectory(prefix="leakscope-bench-") as folder:
        recording = Recording(tool, Path(folder), terminal=terminal)
        time.sleep(0.0 if options.quick else _SETTLED_S)  # imports of the view
        began, before = time.monotonic(), recording.cpu_seconds()
        time.sleep(QUICK_S if options.quick else QUIET_S)
        share = (recording.cpu_seconds() - before) / (time.monotonic() - began)
        before = recording.cpu_seconds()
        run_storm(STORM, 3 * operations(STORM, options))
        time.sleep(_SETTLED_S)  # until the last batch is written
        used = recording.cpu_seconds() - before
        events = recording.stop()["rows"]["mem_events"]
    return share, used / events * 1e6

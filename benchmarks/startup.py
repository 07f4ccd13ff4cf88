"""How long ``leakscope --help`` takes, beside an empty Python."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.results import ROOT, Bar, Options, Result, Spread, Table

_COMMANDS = {
    "leakscope --help": [sys.executable, "-m", "leakscope", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def run(options: Options) -> Result:
    """Rounds of both commands in turn; seconds of wall time of the whole process."""
    seconds: dict[str, list[float]] = {name: [] for name in _COMMANDS}
    for number in range(2 if options.quick else 2 * options.rounds + 1):
        for name, command in _COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
            if number:  # the first fills the page cache and writes byte code
                seconds[name].append(time.perf_counter() - began)
    spreads = {name: Spread.of(values) for name, values in seconds.items()}
    table = Table("Start-up", ["command", "seconds"], [[name, spread.text()] for name, spread in spreads.items()])
    bar = Bar("leakscope --help", spreads["leakscope --help"].median, 0.3, unit="s")
    return Result("startup", "Start-up", [table], [bar], {"seconds": seconds})

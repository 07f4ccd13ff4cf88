"""The storms: C programs that repeat one operation and time it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import ROOT, Options

STORMS_DIRECTORY = ROOT / "benchmarks" / "storms"

OPERATIONS = {"open": 300_000, "socketpair": 80_000, "spawn": 800}
"""Operations a run, about one second each without a recorder."""
_QUICK_OPERATIONS = {"open": 2_000, "socketpair": 500, "spawn": 10}


def build_storms() -> None:
    """Compile what changed; raises CalledProcessError."""
    subprocess.run(["make", "--silent", "-C", str(STORMS_DIRECTORY)], check=True)


def operations(storm: str, options: Options) -> int:
    """How many operations a run of ``storm`` makes."""
    return _QUICK_OPERATIONS[storm] if options.quick else max(10, int(OPERATIONS[storm] * options.scale))


class Cost(NamedTuple):
    """What one operation took on average, in nanoseconds; processor time includes that of children."""

    wall_ns: float
    processor_ns: float


def start_storm(storm: str, count: int) -> subprocess.Popen[str]:
    """Start a storm; :func:`finish_storm` gives what it measured."""
    program: Path = STORMS_DIRECTORY / "bin" / storm
    return subprocess.Popen([str(program), str(count)], stdout=subprocess.PIPE, text=True)


def finish_storm(running: subprocess.Popen[str]) -> Cost:
    """Wait for a storm; raises CalledProcessError when it failed."""
    output, _ = running.communicate()
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, running.args)
    return Cost(*map(float, output.split()))


def run_storm(storm: str, count: int) -> Cost:
    """Run one storm alone."""
    return finish_storm(start_storm(storm, count))

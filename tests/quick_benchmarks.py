"""Benchmarks at their smallest size."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.results import ROOT


def run(*names: str) -> dict[str, dict]:
    """What `python -m benchmarks --quick --json NAME ...` prints, by name."""
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout)
    assert printed["schema"] == "leakscope-benchmarks/1"
    return {result["name"]: result for result in printed["benchmarks"]}

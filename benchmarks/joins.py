"""Joins of 10 M kernel events, 1 M CUDA API calls and 100 k launches with an export and an ncu report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import ROOT, Bar, Options, Result, Table

LIMIT_S, LIMIT_MIB, FULL = 60.0, 3072, 10.0


def run(options: Options) -> Result:
    """One run in a process of its own, beside one level of ``pandas.merge_asof`` in another."""
    millions = 0.05 if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="leakscope-bench-") as folder:
        _run("--millions", str(millions), "--build", folder)
        joined = json.loads(_run("--captures", folder))
        plain = json.loads(_run("--captures", folder, "--plain"))
    result = Result(
        "joins", "joins across sources", figures={"millions": millions, "joins": joined, "merge_asof": plain}
    )
    rows = [
        ["all joins: two clocks, identity, nesting, windows, order", *_cells(joined)],
        ["pandas.merge_asof, one level of nesting, tables read already", *_cells(plain)],
    ]
    title = f"{millions:g} M kernel events, a tenth of that of calls in each of two sources, a hundredth of launches"
    result.tables.append(Table(title, ["", "seconds", "peak memory, MiB", "nested events"], rows))
    if not options.quick:
        result.bars.append(Bar("all joins", joined["seconds"], LIMIT_S, unit="s"))
        result.bars.append(Bar("all joins, peak memory", joined["peak_mib"], LIMIT_MIB, unit="MiB"))
    return result


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.joins_scale", *arguments]
    return subprocess.run(command, cwd=Path(ROOT), stdout=subprocess.PIPE, text=True, check=True).stdout


def _cells(measured: dict) -> list[str]:
    return [f"{measured['seconds']:.1f}", f"{measured['peak_mib']:,}", f"{measured['matched']['nesting']:,}"]

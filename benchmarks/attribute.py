"""``leakscope attribute`` on large captures; the capture and the measuring are those of attribute_scale.py."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.results import ROOT, Bar, Options, Result, Table

_LIMITS = {10.0: (10.0, 1024), 100.0: (60.0, 4096)}  # million events: seconds, MiB


def run(options: Options) -> Result:
    """One run a size: they are long, and their time hardly varies."""
    sizes = [0.1] if options.quick else [10.0, 100.0] if options.full else [10.0]
    command = [sys.executable, "-m", "benchmarks.attribute_scale", "--millions", *map(str, sizes)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    result = Result("attribute", "attribute on large captures", figures={"sizes": measured})
    rows = [[f"{m['million_events']:g}", f"{m['seconds']:.1f}", f"{m['peak_mib']:,}"] for m in measured]
    result.tables.append(Table("One process, all cores", ["M events", "seconds", "peak memory, MiB"], rows))
    for m in measured:
        if (size := m["million_events"]) in _LIMITS:
            seconds, mib = _LIMITS[size]
            result.bars.append(Bar(f"attribute, {size:g} M events", m["seconds"], seconds, unit="s"))
            result.bars.append(Bar(f"attribute, {size:g} M events, peak memory", m["peak_mib"], mib, unit="MiB"))
    return result

"""Whether verdicts on leak cases hold when nothing that matters changes: other sizes, noise, gaps, columns, ends.

Usage: python tools/perturb_cases.py FOLDER [SEED…]
FOLDER has ``*.expect.json`` with their tables of counters, as grade.py reads them. Each is judged as it is and in every
way of :data:`WAYS`; what changes is printed. Exits with 1 where a verdict or class does.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from leakscope.detect.series.counters import Counter
from leakscope.detect.series.judge import judge

FloatArray = npt.NDArray[np.float64]
BASE = ("rss_bytes", "vss_bytes", "gpu_used_bytes", "cgroup_bytes")
"""Columns that are always there: 0 throughout means not recorded."""


@dataclass(frozen=True)
class Table:
    """Columns by name, float64[rows] each, NaN for an empty cell; the first is ``t_s``. ``factor``: of all bytes."""

    columns: dict[str, FloatArray]
    factor: float = 1.0

    def counters(self) -> list[Counter]:
        """As they are judged."""
        found = []
        for name, value in self.columns.items():
            known = ~np.isnan(value)
            if name == "t_s" or (name in BASE and not np.nanmax(np.abs(value))):
                continue
            counter = name.removesuffix("_bytes")
            found.append(Counter(counter, self.columns["t_s"][known], value[known], counter != name))
        return found

    def only(self, rows: npt.NDArray[np.bool_]) -> Table:
        """Some rows."""
        return replace(self, columns={name: value[rows] for name, value in self.columns.items()})


def scaled(table: Table, rng: np.random.Generator) -> Table:
    """All sizes by one factor of a third to three."""
    factor = float(np.exp(rng.uniform(-1, 1)))
    columns = {n: v * factor if n.endswith("_bytes") else v for n, v in table.columns.items()}
    return Table(columns, factor)


def noisier(table: Table, rng: np.random.Generator) -> Table:
    """White noise of half of what each counter moves between two readings, as a rule."""
    columns = dict(table.columns)
    for name, value in columns.items():
        steps = np.diff(value[~np.isnan(value)])
        if name.endswith("_bytes") and len(steps) and np.any(steps):
            deviation = 0.5 * float(np.median(np.abs(steps))) / 0.6745
            columns[name] = np.maximum(0.0, value + rng.normal(0.0, deviation, len(value)))
    return replace(table, columns=columns)


def sparser(table: Table, rng: np.random.Generator) -> Table:
    """Up to a third of the rows missing, and some cells."""
    kept = rng.random(len(table.columns["t_s"])) > rng.uniform(0.05, 0.3)
    kept[[0, -1]] = True
    some = table.only(kept)
    columns = {
        name: value if name == "t_s" else np.where(rng.random(len(value)) < 0.02, np.nan, value)
        for name, value in some.columns.items()
    }
    return replace(some, columns=columns)


def thinner(table: Table, rng: np.random.Generator) -> Table:
    """Every second row."""
    return table.only(np.arange(len(table.columns["t_s"])) % 2 == 0)


def wider(table: Table, rng: np.random.Generator) -> Table:
    """Columns that mean nothing."""
    count = len(table.columns["t_s"])
    more = {"cpu_temp": rng.normal(5, 1, count), "uptime_s": np.arange(float(count)), "foo_rate": rng.random(count)}
    return replace(table, columns=table.columns | more)


def shorter(table: Table, rng: np.random.Generator) -> Table:
    """Without the last rows, up to a tenth."""
    count = len(table.columns["t_s"])
    return table.only(np.arange(count) < count * rng.uniform(0.9, 1.0))


WAYS: dict[str, Callable[[Table, np.random.Generator], Table]] = {
    "as it is": lambda table, rng: table,
    "scaled": scaled,
    "noisier": noisier,
    "sparser": sparser,
    "thinner": thinner,
    "wider": wider,
    "shorter": shorter,
}


def read(path: Path) -> Table:
    """A table of counters."""
    with path.open(newline="") as file:
        names, *rows = list(csv.reader(file))
    values = np.array([[float(cell) if cell else np.nan for cell in row] for row in rows])
    return Table({name: values[:, number] for number, name in enumerate(names)})


def wrong(table: Table, expected: dict[str, Any]) -> list[str]:
    """What differs from what is expected: of verdict and class, and of the rate of a leak."""
    verdict = judge(table.counters()).verdict
    either = [expected, *expected.get("also_acceptable", [])]
    if not any(e["verdict"] == verdict.verdict and e.get("class") == verdict.kind for e in either):
        return [f"{verdict.verdict}/{verdict.kind} instead of {expected['verdict']}/{expected['class']}"]
    growth = expected.get("growth")
    if expected["verdict"] != "leak" or not growth or not growth["bytes_per_s"]:
        return []
    said = verdict.growth
    options = [growth, *growth.get("accept", [])]
    options = [o for o in options if said and o["counter"] == said.counter] or options
    rates = [o["bytes_per_s"] * table.factor for o in options]
    if said and any(abs(said.bytes_per_s - rate) <= growth["rel_tol"] * abs(rate) for rate in rates):
        return []
    return [f"rate {said.bytes_per_s if said else 0:,.0f} instead of {rates[0]:,.0f} bytes/s"]


def main(folder: str, *seeds: str) -> int:
    changed = judged = 0
    for path in sorted(Path(folder).glob("*.expect.json")):
        expected = json.loads(path.read_text())
        if expected["format"] != "samples":
            continue
        table = read(path.parent / expected["inputs"][0])
        for way, change in WAYS.items():
            for seed in map(int, seeds or ("1", "2")):
                rng = np.random.default_rng([seed, *path.name.encode(), *way.encode()])
                said = wrong(change(table, rng), expected)
                judged += 1
                changed += any("instead of" in what and "/" in what.split()[0] for what in said)
                for what in said:
                    print(f"{expected['case']}, {way}, seed {seed}: {what}")
    print(f"{judged} tables judged, {changed} verdicts changed")
    return int(changed > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

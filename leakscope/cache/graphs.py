"""Whether CUDA-graph launches get slower with the number of bound buffers and with the page tables in use.

Rank correlation (Spearman) with the interval of Bonett and Wright (Psychometrika 65, 2000): Fisher's z with standard
error sqrt((1 + r²/2) / (n − 3)). Launches one after another resemble each other, so n is the effective number of them:
n (1 − ab) / (1 + ab), with a and b the lag-one autocorrelations of the two ranks (Bartlett 1935; Bayley and Hammersley
1946). The slope is Theil and Sen's. Correlation is no cause: a partial correlation, with the other quantity held still,
stands beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.errors import BadInputError
from nsight_parsers import ReportError
from nsight_parsers.delimited import read_csv, read_json_lines
from nsight_parsers.sniffing import MAX_LINE_BYTES

MIN_LAUNCHES = 10
"""Fewer say nothing of a correlation: the interval of 9 independent pairs spans 1.3 of its 2."""
SLOPE_POINTS = 1_000
Z_95 = 1.959963984540054
LATENCY_US = {"latency_us": 1.0, "launch_us": 1.0, "latency_ns": 1e-3, "launch_ns": 1e-3, "latency_ms": 1e3}
QUANTITIES = {
    "bind count": ("bind_count", "binds", "bound_buffers"),
    "page table": ("page_table_bytes", "page_table_entries", "page_table_pages", "page_table"),
}
GRAPH_NAMES = ("graph", "graph_id", "graph_exec")
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Correlation:
    """Of latency with one quantity. Everything but ``quantity`` and ``launches`` is None where it cannot be told."""

    quantity: str
    column: str
    launches: int
    effective: float | None = None
    spearman: float | None = None
    low: float | None = None
    high: float | None = None
    partial: float | None = None
    """With the other quantity held still; None where there is no other."""
    slope_us: float | None = None
    """µs a unit of the quantity."""
    why_not: str = ""

    @property
    def verdict(self) -> str:
        """`grows`, `falls`, `no correlation shown` or `cannot tell`."""
        if self.low is None or self.high is None:
            return "cannot tell"
        return "grows" if self.low > 0 else "falls" if self.high < 0 else "no correlation shown"


@dataclass(frozen=True)
class GraphLaunches:
    """What a trace of graph launches says."""

    path: str
    launches: int
    graphs: int
    latency_us: dict[str, float]
    """p50, p95, p99 and max."""
    correlations: tuple[Correlation, ...]
    left_out: int

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        rows = [{**vars(one), "verdict": one.verdict} for one in self.correlations]
        return {**vars(self), "correlations": rows}


def graph_launches(path: Path) -> GraphLaunches:
    """Reads a trace (CSV with a header or JSON lines) with a latency and a quantity, in the order of launches.

    Raises BadInputError where it has neither.
    """
    table, left_out = _read(path)
    names = {name.lower(): name for name in table.columns}
    latency = next((name for name in LATENCY_US if name in names), None)
    found = {what: next((n for n in wanted if n in names), None) for what, wanted in QUANTITIES.items()}
    if latency is None or not any(found.values()):
        raise BadInputError(
            f"{path}: needs a latency ({', '.join(LATENCY_US)}) and a quantity "
            f"({', '.join(name for wanted in QUANTITIES.values() for name in wanted)})"
        )
    latency_us = _numbers(table[names[latency]]) * LATENCY_US[latency]
    good = np.isfinite(latency_us) & (latency_us >= 0)
    if not good.any():
        raise BadInputError(f"{path}: no launch with a latency in it")
    latency_us = latency_us[good]
    quantities = {what: (column, _numbers(table[names[column]])[good]) for what, column in found.items() if column}
    correlations = [
        _correlation(what, column, latency_us, values, [v for w, (_, v) in quantities.items() if w != what])
        for what, (column, values) in quantities.items()
    ]
    graph = next((names[name] for name in GRAPH_NAMES if name in names), None)
    p50, p95, p99 = np.percentile(latency_us, [50, 95, 99])
    return GraphLaunches(
        str(path),
        len(latency_us),
        int(table[graph][good].nunique()) if graph else 0,
        {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": float(latency_us.max())},
        tuple(correlations),
        left_out + int((~good).sum()),
    )


def _correlation(
    what: str, column: str, latency_us: FloatArray, values: FloatArray, others: list[FloatArray]
) -> Correlation:
    from scipy import stats

    good = np.isfinite(values)
    n = int(good.sum())
    if n < MIN_LAUNCHES:
        return Correlation(what, column, n, why_not=f"{n} launches have it, {MIN_LAUNCHES} are needed")
    y, x = latency_us[good], values[good]
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(what, column, n, why_not=f"{column if np.ptp(x) == 0 else 'the latency'} never changes")
    ranks = stats.rankdata(x), stats.rankdata(y)
    r = float(np.corrcoef(*ranks)[0, 1])
    product = _lag_one(ranks[0]) * _lag_one(ranks[1])
    effective = float(np.clip(n * (1 - product) / (1 + product), 0, n)) if product > -1 else float(n)
    partial = _partial(r, good, ranks, others)
    chosen = np.unique(np.linspace(0, n - 1, SLOPE_POINTS).astype(int))
    slope = float(stats.theilslopes(y[chosen], x[chosen])[0]) if np.ptp(x[chosen]) else None
    if effective <= MIN_LAUNCHES - 1:
        why = f"its {n} launches follow so slowly on one another that they tell as much as {effective:.0f}"
        return Correlation(what, column, n, effective, r, None, None, partial, slope, why)
    half = Z_95 * math.sqrt((1 + r * r / 2) / (effective - 3))
    z = math.atanh(float(np.clip(r, -1 + 1e-12, 1 - 1e-12)))
    return Correlation(what, column, n, effective, r, math.tanh(z - half), math.tanh(z + half), partial, slope)


def _partial(
    r: float, good: npt.NDArray[np.bool_], ranks: tuple[FloatArray, FloatArray], others: list[FloatArray]
) -> float | None:
    """Spearman's partial correlation given the one other quantity (Kendall 1942)."""
    from scipy import stats

    if not others or not np.isfinite(others[0][good]).all() or np.ptp(others[0][good]) == 0:
        return None
    other = stats.rankdata(others[0][good])
    rx, ry = (float(np.corrcoef(other, side)[0, 1]) for side in ranks)
    rest = (1 - rx * rx) * (1 - ry * ry)
    return (r - rx * ry) / math.sqrt(rest) if rest > 1e-12 else None


def _lag_one(values: FloatArray) -> float:
    centred = values - values.mean()
    return float(centred[1:] @ centred[:-1] / (centred @ centred))


def _numbers(column: pd.Series) -> FloatArray:
    return pd.to_numeric(column, errors="coerce").to_numpy(np.float64)


def _read(path: Path) -> tuple[pd.DataFrame, int]:
    wanted = [*LATENCY_US, *GRAPH_NAMES, *(name for names in QUANTITIES.values() for name in names)]
    try:
        with path.open("rb") as file:
            start = file.read(MAX_LINE_BYTES).lstrip()
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from error
    try:
        if start.startswith(b"{"):
            table, left_out = read_json_lines(path, wanted)
            frame = table.to_pandas()
            return frame.loc[:, frame.notna().any()], left_out
        table, left_out = read_csv(path)
        return table.to_pandas(), left_out
    except ReportError as error:
        raise BadInputError(str(error)) from error

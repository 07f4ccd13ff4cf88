"""Tables of counters over time: a column ``t_s`` and one column a counter.

A name that ends in ``_bytes`` is in bytes and is stored without that ending; what other endings say is told by the
name itself. An empty cell is a missing reading. Of the columns that every such table has
(:data:`BASE`), one that is 0 throughout was not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.arrow import Coded, build_table, not_empty
from nsight_parsers.delimited import read_csv

TIME = "t_s"
BASE = ("rss_bytes", "vss_bytes", "gpu_used_bytes", "cgroup_bytes")
MAX_TIME_S = 9e9
MAX_CELLS = 100_000_000

LIMITS = ["counters say that memory grows and of what kind it is, not who allocates it"]


def parse_samples_csv(path: Path | str, *, progress: Callable[[int, int], None] | None = None) -> ParsedReport:
    """Reads a table of counters as ``samples``; times start at 0 on a clock of the file's own.

    ``facts["byte_counters"]`` names the counters that are in bytes. Raises ReportError for a file without two rows.
    """
    path = Path(path)
    table, ragged = read_csv(path)
    if TIME not in table.column_names:
        raise ReportError(f"{path}: no column {TIME}: not a table of counters over time")
    if table.num_rows * table.num_columns > MAX_CELLS:
        raise ReportError(f"{path}: more than {MAX_CELLS:,} cells; split it or sample less often")
    times = _numbers(table[TIME])
    timed = np.isfinite(times) & (np.abs(times) <= MAX_TIME_S)
    times_ns = np.round(np.where(timed, times, 0.0) * 1e9).astype(np.int64)
    names: list[str] = []
    in_bytes: list[str] = []
    unrecorded: list[str] = []
    unread: list[str] = []
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for column in table.column_names:
        if column == TIME or not column:
            continue
        values = _numbers(table[column])
        known = timed & np.isfinite(values)
        if not known.any():
            unread.append(column)
            continue
        if column in BASE and not values[known].any():
            unrecorded.append(column)
            continue
        names.append(column.removesuffix("_bytes"))
        if column.endswith("_bytes"):
            in_bytes.append(names[-1])
        parts.append((times_ns[known], values[known]))
    if not parts or int(timed.sum()) < 2:
        raise ReportError(f"{path}: fewer than two rows with a time and a number")
    codes = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
    samples = build_table(
        "samples",
        len(codes),
        ts_ns=np.concatenate([part[0] for part in parts]),
        scope="service",
        scope_id="",
        counter=Coded(codes, names),
        value=np.concatenate([part[1] for part in parts]),
    )
    samples = samples.take(pa.array(np.argsort(samples["ts_ns"].to_numpy(), kind="stable")))
    report = ParsedReport(not_empty({"samples": samples}), tool="samples", clock="relative", limits=list(LIMITS))
    report.facts = {"counters": len(names), "rows": int(timed.sum()), "byte_counters": in_bytes}
    if unrecorded:
        report.findings.append(f"0 throughout, so not recorded: {', '.join(unrecorded)}")
    if unread:
        report.findings.append(f"columns without a number: {', '.join(name[:60] for name in unread[:10])}")
    if ragged or not timed.all():
        report.findings.append(f"{ragged + int((~timed).sum()):,} rows have no time or not as many cells as the header")
    return report


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """float64, NaN where a cell is empty or no number."""
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan)
    values = pd.to_numeric(column.to_pandas(), errors="coerce").to_numpy(np.float64)
    return np.where(np.isfinite(values), values, np.nan)

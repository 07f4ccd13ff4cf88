"""Cache objects over time: bytes that are live, and bytes that are pinned, referenced or kept by views."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from leakscope.detect.cache import COUNTERS, since_zero
from leakscope.detect.timeline_counters import thinned
from leakscope.liveness.holds import KINDS, OPEN_ROW
from leakscope.liveness.lives import CacheLives, cache_lives
from leakscope.liveness.rows import read_rows
from leakscope.model.results import Report
from leakscope.model.timeline import COUNTER, Series, Slope

if TYPE_CHECKING:
    import duckdb

FloatArray = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

LIVE_OBJECTS = "cache_live"
LABELS = {"pin": "pinned cache objects", "ref": "referenced cache objects", "view": "cache objects kept by views"}


def cache_series(con: duckdb.DuckDBPyConnection, source_id: int) -> list[Series]:
    """Bytes of one source's cache objects by time, [] where it has none. Views have no bytes of their own. Raises
    duckdb.Error."""
    rows = read_rows(con, source_id)
    if not len(rows):
        return []
    of = cache_lives(rows)
    times = np.array([since_zero(int(at), int(of.ts_ns[0])) for at in (of.ts_ns[0], of.ts_ns[-1])])
    t_s = times[0] + (of.ts_ns - of.ts_ns[0]) / 1e9
    sizes = np.where(of.lives.is_view, 0, of.lives.size_bytes)
    made = [
        _series(LIVE_OBJECTS, "live cache objects", t_s, _bytes(of.lives.born_row, of.lives.died_row, sizes, len(t_s)))
    ]
    for kind, name in COUNTERS.items():
        held = _held(of, kind, sizes)
        if held.any():
            made.append(_series(name, LABELS[kind], t_s, held))
    return made


def cache_slopes(series: list[Series], report: Report) -> list[Slope]:
    """The growth that verdicts tell of these series: from where it begins to the last event."""
    found = []
    for one in series:
        for verdict in (report.verdict, *report.findings):
            growth, start = verdict.growth, verdict.leak_start_s
            if growth is not None and start is not None and growth.counter == one.name and verdict.verdict == "leak":
                end = float(one.t_s[-1])
                limits = (growth.bytes_per_s, growth.ci_low, growth.ci_high)
                at = float(one.value[-1]) - growth.bytes_per_s * (end - start)
                found.append(Slope(one.name, COUNTER, start, end, start, at, *limits))
                break
    return found


def _series(name: str, label: str, t_s: FloatArray, value: FloatArray) -> Series:
    times, values = thinned(t_s, value)
    return Series(name, label, COUNTER, "host", True, times, values, len(t_s))


def _bytes(begin: npt.NDArray[np.int32], end: npt.NDArray[np.int32], sizes: Int64, rows: int) -> FloatArray:
    """Bytes that are there after each row: from row ``begin`` on until row ``end``."""
    gained = np.zeros(rows)
    np.add.at(gained, begin, sizes)
    ended = end != OPEN_ROW
    np.subtract.at(gained, end[ended], sizes[ended])
    return np.cumsum(gained)


def _held(of: CacheLives, kind: str, sizes: Int64) -> FloatArray:
    """Bytes of the objects with at least one hold of a kind, after each row."""
    chosen = np.flatnonzero(of.holds.kind == KINDS.index(kind))
    life = of.holds.life[chosen].astype(np.int64)
    begin, end = of.holds.from_row[chosen].astype(np.int64), of.holds.until_row[chosen].astype(np.int64)
    ended = end != OPEN_ROW
    lives = np.r_[life, life[ended]]
    rows = np.r_[begin, end[ended]]
    steps = np.r_[np.ones(len(life), np.int64), -np.ones(int(ended.sum()), np.int64)]
    order = np.lexsort((-steps, rows, lives))
    lives, rows, steps = lives[order], rows[order], steps[order]
    # Holds of a life add up to how many it has; all that end take the sum back to 0 only if all were given up.
    first = np.r_[True, lives[1:] != lives[:-1]] if len(lives) else np.zeros(0, bool)
    total = np.cumsum(steps)
    before = np.repeat(np.r_[0, total][np.flatnonzero(first)], np.diff(np.r_[np.flatnonzero(first), len(lives)]))
    count = total - before
    gained = np.zeros(len(of.ts_ns))
    np.add.at(gained, rows, ((count == 1) & (steps == 1)) * sizes[lives])
    np.subtract.at(gained, rows, ((count == 0) & (steps == -1)) * sizes[lives])
    return np.cumsum(gained)

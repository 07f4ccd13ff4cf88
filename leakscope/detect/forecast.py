"""When a limit is reached if growth goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from leakscope.detect.series.counters import Counter
from leakscope.model.forecast import Forecast
from leakscope.model.manifest import Source
from leakscope.model.results import Growth, Report, Verdict

if TYPE_CHECKING:
    import duckdb

LIMITED = ("cgroup", "rss", "pss")
"""What a limit is held against, the first that is there: the group's memory is what its limit is of."""
LIMIT = "cgroup_limit"
DEVICE = ("gpu_used", "gpu_total")


def forecast(counters: Sequence[Counter], growth: Growth | None, limit_bytes: float | None = None) -> Forecast | None:
    """The time from the last reading to ``limit_bytes`` (None: the group's own limit), at the rate of ``growth``.

    None without growth, limit or memory to hold it against. Device memory has a limit of its own: what grows there is
    held against ``gpu_total``.
    """
    if growth is None or growth.bytes_per_s <= 0:
        return None
    by_name = {counter.name: counter for counter in counters if len(counter.t_s)}
    device = growth.counter.startswith("gpu")
    names = ("gpu_used",) if device else LIMITED
    counter = next((by_name[name] for name in names if name in by_name), None)
    own = by_name.get("gpu_total" if device else LIMIT)
    limit = limit_bytes if limit_bytes is not None and not device else float(own.value[-1]) if own is not None else None
    if counter is None or limit is None:
        return None
    level = float(counter.value[-1])
    left = max(0.0, limit - level)
    return Forecast(
        counter.name,
        level,
        limit,
        left / growth.bytes_per_s,
        left / max(growth.ci_high, growth.bytes_per_s),
        left / growth.ci_low if growth.ci_low > 0 else None,
    )


def with_forecasts(
    con: duckdb.DuckDBPyConnection, sources: Sequence[Source], report: Report, limit_bytes: float | None
) -> Report:
    """``report``, whose leaks say when they reach the limit: ``limit_bytes``, or what the evidence knows of limits."""
    counters = [counter for source in sources for counter in last_readings(con, source.id)]
    report.verdict = _with_forecast(report.verdict, counters, limit_bytes)
    report.findings = [_with_forecast(finding, counters, limit_bytes) for finding in report.findings]
    return report


def _with_forecast(verdict: Verdict, counters: Sequence[Counter], limit_bytes: float | None) -> Verdict:
    if verdict.verdict != "leak":
        return verdict
    return replace(verdict, forecast=forecast(counters, verdict.growth, limit_bytes))


def last_readings(con: duckdb.DuckDBPyConnection, source_id: int) -> list[Counter]:
    """The last reading of each counter that a limit is known for; those of several processes, groups or devices are
    left out, as it is not known which of them grows."""
    rows = con.execute(
        """
        SELECT counter, max(ts_ns) / 1e9, arg_max(value, ts_ns) FROM samples
        WHERE source_id = ? AND list_contains(?, counter) GROUP BY counter HAVING count(DISTINCT scope_id) = 1
        ORDER BY counter
        """,
        [source_id, [*LIMITED, LIMIT, *DEVICE]],
    ).fetchall()
    return [Counter(str(name), np.array([at]), np.array([value], np.float64), True) for name, at, value in rows]

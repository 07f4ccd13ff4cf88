"""When a limit is reached if growth goes on."""

from __future__ import annotations

from collections.abc import Sequence

from leakscope.detect.series.counters import Counter
from leakscope.model.results import Growth
from leakscope.model.soak import Forecast

LIMITED = ("cgroup", "rss", "pss")
"""What a limit is held against, the first that is there: the group's memory is what its limit is of."""
LIMIT = "cgroup_limit"


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

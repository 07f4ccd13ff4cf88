"""When memory runs out, in words."""

from __future__ import annotations

from leakscope.model.forecast import Forecast
from leakscope.quantities import size


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``7.3 h``, ``3.0 d``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86_400:.1f} d"


def forecast_line(forecast: Forecast) -> str:
    """When memory runs out, in one line."""
    if forecast.level_bytes >= forecast.limit_bytes:
        return f"{forecast.counter} is at its limit of {size(forecast.limit_bytes)} now"
    latest = "never" if forecast.latest_s is None else duration(forecast.latest_s)
    return (
        f"{forecast.counter} {size(forecast.level_bytes)} reaches {size(forecast.limit_bytes)} in "
        f"{duration(forecast.expected_s)} if growth goes on ({duration(forecast.earliest_s)} … {latest})"
    )

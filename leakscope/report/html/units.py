"""Cells and axes in units that people read: bytes with binary units, seconds up to days."""

from __future__ import annotations

from leakscope.model.results import Growth
from leakscope.quantities import rate, size
from leakscope.report.html.parts import Value

_BYTES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_TIMES = (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_FEWEST = {"d": 3.0, "h": 3.0, "min": 5.0, "s": 0.0}


def bytes_cell(value: float | None, error: float = 0.0) -> Value | None:
    """``1.5 MiB``, with ``± …`` where there is an error; None stays None."""
    if value is None:
        return None
    return Value(size(value) + (f" ± {size(error)}" if error else ""), value)


def rate_cell(growth: Growth | None) -> Value | None:
    """Bytes a second, as the JSON report rounds them."""
    return None if growth is None else Value(rate(growth.bytes_per_s), round(growth.bytes_per_s, 3))


def interval_text(growth: Growth) -> str:
    """``1.7 MiB … 2.0 MiB/s``."""
    return f"{size(growth.ci_low)} … {rate(growth.ci_high)}"


def share_cell(value: float | None) -> Value | None:
    """``87 %``."""
    return None if value is None else Value(f"{value:.0%}".replace("%", " %"), round(value, 6))


def byte_axis(largest: float) -> tuple[str, float]:
    """(unit, bytes of one): the greatest unit of which ``largest`` is at least 2."""
    return next(((unit, float(one)) for unit, one in _BYTES if abs(largest) >= 2 * one), ("B", 1.0))


def time_axis(span_s: float) -> tuple[str, float]:
    """(unit, seconds of one) for an axis of ``span_s`` seconds."""
    return next((unit, one) for unit, one in _TIMES if span_s >= _FEWEST[unit] * one)


def duration_text(seconds: float) -> str:
    """``0.7 s``, ``12 min``, ``7.3 h``, ``3.0 d``."""
    unit, one = time_axis(abs(seconds))
    return f"{seconds / one:.1f} {unit}"

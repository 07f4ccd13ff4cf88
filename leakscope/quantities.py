"""Sizes, times and rates as people type them (in options, files of budgets, markers of tests) and as they read them."""

from __future__ import annotations

import math
import re

from leakscope.errors import BadInputError

_SIZES = {"": 1, "B": 1, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30,
          "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
          "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PERIODS = ("s", "m", "min", "h", "d")
_NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)")
LEAST_INTERVAL_S = 0.05
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_bytes(text: str, option: str) -> int:
    """Whole bytes of ``64MiB``, ``4k`` or ``65536``. Raises BadInputError, which names the option."""
    value = _size(text)
    if value is None or not value.is_integer():
        raise BadInputError(f"{option} {text}: needs a size such as 65536, 64KiB or 1MiB")
    return int(value)


def seconds(text: str, option: str) -> float:
    """Seconds of ``10s``, ``500ms``, ``1m`` or ``2.5``. Raises BadInputError, which names the option."""
    match = _NUMBER.fullmatch(text.strip())
    value = float(match[1]) * _TIMES.get(match[2], 0.0) if match else 0.0
    if value < LEAST_INTERVAL_S:
        raise BadInputError(f"{option} {text}: needs a time of at least 50ms, such as 500ms, 10s or 1m")
    return value


def amount(value: object, where: str) -> float:
    """Bytes (or plain counts) of ``65536``, ``"64MiB"``, ``"1.5 GiB"``. Raises BadInputError, which says where."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    found = _size(value) if isinstance(value, str) else None
    if found is None:
        raise BadInputError(f'{where}: {_shown(value)} is no size; write 65536, "64KiB" or "1.5MiB"')
    return found


def rate_per_s(value: object, where: str) -> float:
    """Bytes a second of ``"1MiB/h"``, ``"64KiB/s"`` or a plain number. Raises BadInputError, which says where."""
    wrong = BadInputError(f'{where}: {_shown(value)} is no rate; write "64KiB/s", "10MiB/h" or "1GiB/d"')
    text, _, period = value.rpartition("/") if isinstance(value, str) and "/" in value else (value, "/", "s")
    if str(period).strip() not in _PERIODS:
        raise wrong
    try:
        return amount(text, where) / _TIMES[str(period).strip()]
    except BadInputError:
        raise wrong from None


def _size(text: str) -> float | None:
    match = _NUMBER.fullmatch(text.strip())
    return float(match[1]) * _SIZES[match[2]] if match and match[2] in _SIZES else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def size(value: float) -> str:
    """Bytes with a binary unit: ``0 B``, ``1.5 KiB``, ``-25.0 MiB``."""
    if not math.isfinite(value):
        return "?"
    amount, unit = abs(float(value)), 0
    while amount >= 1023.95 and unit < len(_UNITS) - 1:
        amount /= 1024
        unit += 1
    number = f"{amount:.0f}" if unit == 0 else f"{amount:.1f}"
    sign = "-" if value < 0 and float(number) else ""
    return f"{sign}{number} {_UNITS[unit]}"


def exact(value: int) -> str:
    """Bytes exactly, with the readable form where it says more: ``26,214,400 B (25.0 MiB)``."""
    return f"{value:,} B" if abs(value) < 1024 else f"{value:,} B ({size(value)})"


def rate(value: float) -> str:
    """Bytes per second with a binary unit."""
    return f"{size(value)}/s"


def interval(low: float, high: float) -> str:
    """Bytes from low to high, the unit once where it is the same: ``1.7 … 2.0 MiB``, ``589.5 KiB … 1.4 MiB``."""
    first, last = size(low), size(high)
    if first.partition(" ")[2] == last.partition(" ")[2]:
        first = first.partition(" ")[0]
    return f"{first} … {last}"


def counted(number: int, noun: str) -> str:
    """``1 object``, ``3,000 objects``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

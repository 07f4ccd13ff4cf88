"""Sizes and rates as people write them in budgets."""

from __future__ import annotations

import math
import re

from leakscope.errors import BadInputError

_SIZES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
          "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_TIMES = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NUMBER = r"(\d{1,18}(?:\.\d{1,9})?)"


def amount(value: object, where: str) -> float:
    """Bytes (or plain counts) of ``65536``, ``"64MiB"``, ``"1.5 GiB"``. Raises BadInputError, which says where."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    match = re.fullmatch(rf"{_NUMBER}\s*([A-Za-z]*)", value.strip()) if isinstance(value, str) else None
    if match is None or match[2] not in _SIZES:
        raise BadInputError(f'{where}: {_shown(value)} is no size; write 65536, "64KiB" or "1.5MiB"')
    return float(match[1]) * _SIZES[match[2]]


def rate_per_s(value: object, where: str) -> float:
    """Bytes a second of ``"1MiB/h"``, ``"64KiB/s"`` or a plain number. Raises BadInputError, which says where."""
    text, _, unit = value.rpartition("/") if isinstance(value, str) and "/" in value else (value, "/", "s")
    if isinstance(text, str) and unit.strip() not in _TIMES:
        raise BadInputError(f'{where}: {_shown(value)} is no rate; write "64KiB/s", "10MiB/h" or "1GiB/d"')
    try:
        return amount(text, where) / _TIMES[str(unit).strip()]
    except BadInputError:
        raise BadInputError(f'{where}: {_shown(value)} is no rate; write "64KiB/s", "10MiB/h" or "1GiB/d"') from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

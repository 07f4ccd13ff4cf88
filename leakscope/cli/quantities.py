"""Sizes and times as people type them."""

from __future__ import annotations

import re

from leakscope.errors import BadInputError

_SIZES = {"": 1, "B": 1, "KiB": 1 << 10, "k": 1 << 10, "MiB": 1 << 20, "M": 1 << 20, "GiB": 1 << 30, "G": 1 << 30}
_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
LEAST_INTERVAL_S = 0.05


def size_bytes(text: str, option: str) -> int:
    """Bytes of ``64MiB``, ``4k`` or ``65536``. Raises BadInputError, which names the option."""
    match = re.fullmatch(r"(\d{1,15})\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _SIZES:
        raise BadInputError(f"{option} {text}: needs a size such as 65536, 64KiB or 1MiB")
    return int(match[1]) * _SIZES[match[2]]


def seconds(text: str, option: str) -> float:
    """Seconds of ``10s``, ``500ms``, ``1m`` or ``2.5``. Raises BadInputError, which names the option."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]*)", text.strip())
    value = float(match[1]) * _TIMES.get(match[2], 0.0) if match else 0.0
    if value < LEAST_INTERVAL_S:
        raise BadInputError(f"{option} {text}: needs a time of at least 50ms, such as 500ms, 10s or 1m")
    return value

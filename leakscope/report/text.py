"""Small pieces of text that every rendering needs."""

from __future__ import annotations

import math

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    """``text`` with every character that a terminal may act on shown as an escape (``\\x1b``, ``\\n``)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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


def counted(number: int, noun: str) -> str:
    """``1 object``, ``3,000 objects``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

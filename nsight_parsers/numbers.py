"""Numbers as a program prints them under a locale: which separator is the decimal one, decided by evidence only.

``117.344`` is 117.344 or 117344. Other values of the same table decide: both separators in one value, a separator
that repeats (thousands), or a group that is not of three digits (decimals). Nothing else does: then the user must say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Literal, get_args

NumberFormat = Literal["auto", "point", "comma"]
"""``point``: 1,234.5 means 1234.5; ``comma``: 1.234,5 does; ``auto``: whatever the values prove."""
Evidence = Literal["point", "comma", "ambiguous", "plain", "none"]
"""What one value proves: a format, nothing although it matters, nothing because it does not; ``none``: no number."""

_NUMBER = re.compile(r"[+-]?(\d[\d.,]*|[.,]\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_GROUP_MARKS = str.maketrans("", "", " '’\u00a0\u202f")
_SPECIAL = {
    "": math.nan, "n/a": math.nan, "na": math.nan, "nan": math.nan, "-nan": math.nan, "nan(ind)": math.nan,
    "-nan(ind)": math.nan, "inf": math.inf, "+inf": math.inf, "infinity": math.inf, "-inf": -math.inf,
    "-infinity": -math.inf,
}  # fmt: skip
MAX_DIGITS = 64


def check_number_format(name: str) -> NumberFormat:
    """``name`` as a number format; raises ValueError with the choices."""
    if name not in get_args(NumberFormat):
        raise ValueError(f"no number format {name!r}: choose one of {', '.join(get_args(NumberFormat))}")
    return name  # type: ignore[return-value]


def evidence(text: str) -> Evidence:
    """What ``text`` proves about the format that it was printed in."""
    text = text.translate(_GROUP_MARKS)
    found = _NUMBER.fullmatch(text) if len(text) <= MAX_DIGITS else None
    if not found:
        return "none"
    mantissa = found[1]
    dots, commas = mantissa.count("."), mantissa.count(",")
    if not dots and not commas:
        return "plain"
    if dots and commas:
        last = max(mantissa.rfind("."), mantissa.rfind(","))
        whole, separator = mantissa[:last], mantissa[last]
        other = "," if separator == "." else "."
        valid = separator not in whole and _is_grouped(whole, other)
        return ("point" if separator == "." else "comma") if valid else "none"
    separator = "." if dots else ","
    if dots + commas > 1:
        return ("comma" if dots else "point") if _is_grouped(mantissa, separator) else "none"
    whole, _, decimals = mantissa.partition(separator)
    if _is_grouped(mantissa, separator) and len(decimals) == 3 and len(found[0].lstrip("+-")) == len(mantissa):
        return "ambiguous"
    return "point" if dots else "comma"


def decide(texts: Iterable[str]) -> Literal["point", "comma", "plain", "ambiguous", "mixed"]:
    """The format that all ``texts`` prove together; ``plain`` where no value depends on it."""
    seen = {evidence(text) for text in texts}
    if {"point", "comma"} <= seen:
        return "mixed"
    for verdict in ("point", "comma", "ambiguous"):
        if verdict in seen:
            return verdict
    return "plain"


def parse_number(text: str, number_format: Literal["point", "comma"]) -> float | None:
    """The number that ``text`` is in ``number_format``; None for no number or one that contradicts the format.

    ``n/a``, empty and ``nan`` are NaN, never 0.
    """
    text = text.strip()
    special = _SPECIAL.get(text.lower())
    if special is not None:
        return special
    proof = evidence(text)
    if proof == "none" or (proof in ("point", "comma") and proof != number_format):
        return None
    text = text.translate(_GROUP_MARKS)
    text = text.replace(",", "") if number_format == "point" else text.replace(".", "").replace(",", ".")
    return float(text)


def _is_grouped(digits: str, separator: str) -> bool:
    """Whether ``digits`` is a whole number with groups of three, none of them leading with a zero."""
    first, *groups = digits.split(separator)
    return 1 <= len(first) <= 3 and first[0] != "0" and all(len(g) == 3 and g.isdigit() for g in groups)

"""What a rule finds: one explanation of what some counters do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leakscope.detect.series.book import Book
from leakscope.detect.series.counters import layer_of
from leakscope.detect.series.trend import Trend
from leakscope.quantities import rate


@dataclass(frozen=True)
class Found:
    """One finding of a rule.

    ``kind`` is the class of the verdict. ``counter`` shows the cause, ``growth`` is the counter in bytes whose course
    ``trend`` is. ``weight``: bytes that it explains, for ranking. ``explains``: counters that need no other reason.
    """

    verdict: str
    kind: str
    layer: str
    counter: str
    growth: str
    trend: Trend
    reasons: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    object: str = ""
    slab_cache: str = ""
    weight: float = 0.0
    explains: frozenset[str] = frozenset()
    per_unit: tuple[str, float] | None = None  # (work counter, bytes a unit)
    general: bool = False  # gives way to any finding that is not


def leak(
    book: Book,
    kind: str,
    counter: str,
    growth: str,
    trend: Trend,
    *reasons: str,
    layer: str = "",
    object: str = "",
    slab_cache: str = "",
    explains: frozenset[str] = frozenset(),
    general: bool = False,
) -> Found:
    """A leak in the words of its rule; what it is a unit of work, in how many lives and cycles is added."""
    unit = per_unit(book, growth, trend)
    speed = rate(trend.rate) if book.shown(counter).endswith("_bytes") else f"{trend.rate:,.4g} a second"
    text = f"{book.shown(counter)} rises to the end: {speed}" if not reasons else reasons[0]
    said = [text, *reasons[1:]]
    if trend.lives > 1:
        said.append(f"the same in {trend.lives} lives of the process, each judged by itself")
    if trend.cycles > 2:
        said.append(f"judged at the floor of {trend.cycles} cycles")
    if unit:
        said.append(f"{unit[1]:,.4g} bytes for each of {unit[0]}")
    return Found(
        "leak",
        kind,
        layer or layer_of(growth or counter),
        counter,
        growth,
        trend,
        tuple(said),
        object=object,
        slab_cache=slab_cache,
        weight=max(trend.line_rise, 0.0),
        explains=explains,
        per_unit=unit,
        general=general,
    )


def per_unit(book: Book, growth: str, trend: Trend) -> tuple[str, float] | None:
    """The running count of work that the growth follows best, and bytes for each unit of it."""
    best: tuple[float, str, float] | None = None
    for work in book.work():
        if growth not in book:
            continue
        times, done, value = book.pair(work, growth)
        later = times >= trend.start_s
        if later.sum() < 8 or np.ptp(done[later]) == 0:
            continue
        slope, rest = np.polyfit(done[later], value[later], 1, full=True)[:2]
        left = float(rest[0]) if len(rest) else 0.0
        if slope[0] > 0 and (best is None or left < best[0]):
            best = (left, work, trend.rate * float(times[later][-1] - times[later][0]) / float(np.ptp(done[later])))
    return (best[1], best[2]) if best else None

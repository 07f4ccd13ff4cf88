"""What the rules for growth that is no leak have in common, and those for device memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from leakscope.detect.series import counters as names
from leakscope.detect.series.book import Book
from leakscope.detect.series.found import Found
from leakscope.detect.series.totals import outside_allocators
from leakscope.detect.series.trend import Course, Trend

UNLIMITED = 2.0**62
PART_SHARE = 0.4
"""A part explains the growth of its total from this share on."""
ONE_STEP = 0.6
"""One step with this share of the rise is an initialisation, many are loads on first use."""


def gained(book: Book, name: str) -> float:
    """How much a counter went up over its lowest early reading, at its highest; 0 where it is not there."""
    counter = book.counters.get(name)
    if counter is None or len(counter.value) < 3:
        return 0.0
    first = float(np.median(counter.value[: max(3, len(counter.value) // 50)]))
    return max(0.0, float(np.percentile(counter.value, 99)) - first)


def not_leak(
    kind: str,
    layer: str,
    counter: str,
    trend: Trend,
    weight: float,
    *reasons: str,
    steady: str = "",
    general: bool = False,
    object: str = "",
    slab_cache: str = "",
) -> Found:
    return Found(
        "not_leak",
        kind,
        layer,
        counter,
        steady or counter,
        trend,
        tuple(reasons),
        weight=weight,
        general=general,
        object=object,
        slab_cache=slab_cache,
    )


def device_pools(book: Book) -> Iterator[Found]:
    """Device memory that an allocator holds beyond what is in use."""
    if "gpu_pool_reserved" in book and book["gpu_pool_reserved"].grew and not book.course("gpu_pool_used").rising:
        limit = book.counters.get("gpu_pool_release_threshold")
        reasons = ["the pool's use returns to its floor; reserved stays at the high-water mark"]
        if limit is not None and float(np.median(limit.value)) >= UNLIMITED:
            reasons.append("the release threshold is unlimited: retention is configured")
        yield not_leak(
            "pool_retention",
            "gpu",
            "gpu_pool_reserved",
            book["gpu_pool_reserved"],
            gained(book, "gpu_pool_reserved"),
            *reasons,
            steady="gpu_pool_used",
        )
    if "gpu_reserved" in book and book["gpu_reserved"].grew and not book.course("gpu_allocated").rising:
        rise = gained(book, "gpu_reserved")
        captures = _moved(book, names.CAPTURES)
        if gained(book, "gpu_inactive_split") >= PART_SHARE * rise:
            yield not_leak(
                "fragmentation",
                "gpu",
                "gpu_inactive_split",
                book["gpu_reserved"],
                rise,
                "allocated has no trend; what is reserved beyond it are free pieces of partly used blocks",
                "out-of-memory is possible although nothing leaks; variable sizes: expandable segments would help",
                steady="gpu_allocated",
            )
        elif captures and not book.course("gpu_reserved").rising:
            yield not_leak(
                "capture_reservation",
                "gpu",
                "gpu_reserved",
                book["gpu_reserved"],
                rise,
                f"reserved grew while {captures[0]} did, and stays",
                steady="gpu_allocated",
            )
        elif "gpu_allocated" in book:
            yield not_leak(
                "pool_retention",
                "gpu",
                "gpu_reserved",
                book["gpu_reserved"],
                rise,
                "allocated has no trend; the allocator keeps what it once reserved",
                steady="gpu_allocated",
            )


def device_outside(book: Book) -> Iterator[Found]:
    """Device memory outside of allocators that levelled off: contexts, modules, captured graphs."""
    name = outside_allocators(book) or ("gpu_used" if "gpu_used" in book else "")
    if not name or book.course(name).course is not Course.PLATEAU:
        return
    floor = book[name].floor
    if floor is None:
        return
    rise = gained(book, name)
    steps = np.diff(floor.level_value)
    largest = float(steps.max()) if len(steps) else 0.0
    captures, modules = _moved(book, names.CAPTURES), _moved(book, names.MODULES)
    general = name == "gpu_used"
    if captures:
        kind, reason = "capture_reservation", f"device memory grew while {captures[0]} did, and levelled off"
    elif modules or largest < ONE_STEP * rise:
        kind, reason = "lazy_load", "device memory outside of the allocators grew in ever rarer steps and levelled off"
    else:
        kind, reason = "first_use_init", "device memory outside of the allocators grew in one step"
    yield not_leak(
        kind, "gpu", "gpu_used", book[name], rise, reason, steady="gpu_used", general=general and not captures
    )


def _moved(book: Book, pattern: re.Pattern[str]) -> list[str]:
    return [n for n in book.matching(pattern, in_bytes=False) if np.ptp(book.counters[n].value) > 0]

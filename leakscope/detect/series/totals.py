"""Rules for what a process, a group or a device holds in all: is the rise explained by a part that is no leak?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from leakscope.detect.series import counters as names
from leakscope.detect.series.book import Book
from leakscope.detect.series.counters import HOST, HOST_TOTALS
from leakscope.detect.series.found import Found, leak
from leakscope.detect.series.leaks import SAME_SHARE

SAME_RATE = (0.6, 1.6)
LOAD_FIT = 0.9
"""Share of the variance of a total that its load must explain."""
ALLOCATOR_COUNTERS = ("gpu_reserved", "gpu_allocated", "gpu_pool_reserved", "gpu_pool_used")


def host(book: Book, explained: set[str]) -> Iterator[Found]:
    """Memory of the process (or its group) that no pool, sharing, cache or load explains."""
    total = next((n for n in HOST_TOTALS if n in book and n not in explained), "")
    if not total or HOST & explained & set(HOST_TOTALS):
        return
    if not book.course(total).rising:
        other = next((n for n in HOST_TOTALS if n in book and book.course(n).rising and n != "rss"), "")
        if not other:
            return
        total = other
    if _explained_by_part(book, total) or _explained_by_load(book, total):
        return
    rate = book.course(total).rate
    parts = [
        n
        for n in book.names()
        if book.counters[n].in_bytes
        and n not in (*HOST_TOTALS, "cgroup", "vss")
        and "-" not in n.split("_")[0]
        and not n.startswith(("gpu", "slab", "meminfo", "cgroup_slab", "cgroup_file"))
        and book.course(n).rising
        and SAME_RATE[0] * rate <= book.course(n).rate <= SAME_RATE[1] * rate
    ]
    parts.sort(key=lambda n: (n in ("heap_inuse", "anon_mmap"), book.course(n).level))
    counter = parts[0] if parts else total
    growth = counter if parts else total
    yield leak(book, "retained_growth", counter, growth, book.course(growth), layer="host", explains=HOST, general=True)


def _explained_by_part(book: Book, total: str) -> str:
    """The part that carries the rise of ``total`` although it is no leak: what is left does not rise."""
    if total == "pss" and "rss" in book and not book.course("rss").rising:
        return "rss"  # a sum that counts shared pages in every process: what is private now was shared before
    candidates: list[tuple[str, float]] = []
    if "malloc_free_retained" in book and book["malloc_free_retained"].grew:
        candidates.append(("malloc_free_retained", 1.0))
    if "pinned_allocated" in book and book["pinned_allocated"].grew and not book.course("pinned_requested").rising:
        candidates.append(("pinned_allocated", 1.0))
    for name in book.names():
        if name.endswith("_used") and f"{name.removesuffix('_used')}_capacity" in book and not name.startswith("gpu"):
            copies = f"{name.removesuffix('_used')}_processes"
            factor = float(np.median(book.counters[copies].value)) if copies in book else 1.0
            candidates.append((name, factor))
    if total in ("rss", "cgroup"):
        candidates += [(n, 1.0) for n in ("rss_file", "cgroup_file") if n in book and book[n].grew]
    for part, factor in candidates:
        rest = book.add(f"{total} - {part}", [(1.0, total), (-factor, part)])
        if rest and not book.course(rest).rising:
            return part
    return ""


def _explained_by_load(book: Book, total: str) -> str:
    """The gauge of load that the total follows: what is left when it is taken out does not rise."""
    if "pss" in book and total in ("rss",) and not book.course("pss").rising:
        return "pss"
    for gauge in book.matching(names.GAUGE, in_bytes=False):
        if names.WORK.fullmatch(gauge) or names.DESCRIPTORS.fullmatch(gauge) or np.ptp(book.counters[gauge].value) == 0:
            continue
        fit = book.correlation(total, gauge)
        if fit <= 0 or fit * fit < LOAD_FIT:
            continue
        _, load, value = book.pair(gauge, total)
        slope = float(np.polyfit(load, value, 1)[0])
        rest = book.add(f"{total} - {gauge}", [(1.0, total), (-slope, gauge)])
        if rest and not book.course(rest).rising:
            return gauge
    return ""


def group(book: Book, explained: set[str]) -> Iterator[Found]:
    """A control group that rises although its processes do not: only its parts can say what that is."""
    if "cgroup" in explained or not book.course("cgroup").rising:
        return
    if any(n in book and book.course(n).rising for n in HOST_TOTALS) or (
        "rss" not in book and "cgroup_anon" not in book
    ):
        return
    if any(n.startswith("cgroup_") and n != "cgroup_limit" for n in book.names()):
        return
    if any(book[n].grew for n in book.names() if names.RECLAIMABLE_SLAB.fullmatch(n) or names.PAGE_CACHE.fullmatch(n)):
        return
    yield Found(
        "inconclusive",
        "missing_data",
        "",
        "cgroup",
        "cgroup",
        book.course("cgroup"),
        ("the group's memory rises, that of its processes does not: page cache and kernel memory are in it too",),
        ("memory.stat of the group: anon, file, slab_reclaimable",),
        weight=book.course("cgroup").line_rise,
    )


def device(book: Book, explained: set[str]) -> Iterator[Found]:
    """Device memory: what its allocators use, what they hold, and what is outside of them."""
    if "gpu_used" in explained:
        return
    for name in ("gpu_allocated", "gpu_pool_used"):
        if book.course(name).rising:
            yield leak(
                book,
                "retained_growth",
                name,
                name,
                book.course(name),
                f"{book.shown(name)}: what is in use rises to the end",
                layer="gpu",
                explains=frozenset({"gpu_used", "gpu_reserved", "gpu_pool_reserved"}),
                general=True,
            )
            return
    if not any(name in book for name in ALLOCATOR_COUNTERS):
        if book.course("gpu_used").rising:
            yield Found(
                "inconclusive",
                "missing_allocator_counters",
                "",
                "gpu_used",
                "gpu_used",
                book.course("gpu_used"),
                ("device memory rises and does not level off; a cache of its allocator and a leak look alike",),
                ("reserved and allocated bytes of the device's allocator, or a memory snapshot",),
                weight=book.course("gpu_used").line_rise,
            )
        return
    outside = outside_allocators(book)
    if outside and book.course(outside).rising and book.course("gpu_used").rising:
        trend = book.course("gpu_used")
        own = book.course(outside)
        if own.rate >= SAME_SHARE * trend.rate:
            yield leak(
                book,
                "retained_growth",
                "gpu_used",
                "gpu_used",
                own,
                "device memory outside of the allocators rises to the end",
                layer="gpu",
                general=True,
            )


def outside_allocators(book: Book) -> str:
    """The name of device memory in use less what allocators hold, entered in the book; '' where it cannot be told."""
    held = [n for n in ("gpu_reserved", "gpu_pool_reserved") if n in book]
    if not held or "gpu_used" not in book:
        return ""
    name = "gpu_outside_allocators"
    return name if name in book else book.add(name, [(1.0, "gpu_used"), *((-1.0, h) for h in held)])


def address_space(book: Book, explained: set[str]) -> Iterator[Found]:
    """Address space alone: a leak only where maps become ever more."""
    if "vss" in explained or not book.course("vss").rising:
        return
    if any(book.course(n).rising for n in HOST_TOTALS):
        return
    if book.course("map_count").rising:
        yield leak(
            book,
            "mapping_outside_heap",
            "map_count",
            "vss",
            book.course("vss"),
            "maps become ever more, though nothing touches them",
            layer="host",
            explains=HOST,
            general=True,
        )


TOTALS = [host, group, device, address_space]

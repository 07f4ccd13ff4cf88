"""Rules for growth that is no leak: what grew and ended, fell back, or is held by design.

Each rule yields findings with the bytes that they explain; the specific ones go before the general ones, the larger
before the smaller. Evidence and sources of each stand in docs/verdicts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from leakscope.detect.series import counters as names
from leakscope.detect.series.benign_device import PART_SHARE, device_outside, device_pools, gained, not_leak
from leakscope.detect.series.book import Book
from leakscope.detect.series.counters import HOST_TOTALS
from leakscope.detect.series.found import Found
from leakscope.detect.series.trend import Course

ROUNDED = 1.15
"""Taken by the allocator over asked for, from which on rounding explains the difference."""
LOAD_FIT = 0.9
MORE_GROUPS = 1.5
RESIDENT_SHARE = 0.1
"""Address space of which less than this share became resident was only reserved."""
MIN_CYCLES = 2
CYCLE_LEVEL_SHARE = 0.15


def benign(book: Book) -> list[Found]:
    """All explanations, best first."""
    found = [finding for rule in RULES for finding in rule(book)]
    return sorted(found, key=lambda f: (f.general, -f.weight))


def _host_total(book: Book) -> str:
    return next((n for n in HOST_TOTALS if n in book), "cgroup" if "cgroup" in book else "")


def unsharing(book: Book) -> Iterator[Found]:
    """Pages shared at fork become private as they are written: the proportional share rises, the sum does not."""
    if "pss" not in book or "rss" not in book or not book["pss"].grew:
        return
    rise, total = gained(book, "pss"), gained(book, "rss")
    falls = "shared_clean" in book and book.correlation("pss", "shared_clean") < -0.8
    if total < PART_SHARE * rise and (falls or not book["rss"].grew):
        yield not_leak(
            "cow_unsharing",
            "host",
            "pss",
            book["pss"],
            rise,
            "the sum of rss is flat while pss grows: shared pages become private",
            steady="rss",
        )


def load(book: Book) -> Iterator[Found]:
    """Memory in proportion to workers, connections or requests in flight."""
    total = _host_total(book)
    for name in dict.fromkeys(n for n in (total, "rss") if n in book and book[n].grew):
        fits = [
            (fit, gauge)
            for gauge in book.matching(names.GAUGE, in_bytes=False)
            if not names.WORK.fullmatch(gauge)
            and not names.DESCRIPTORS.fullmatch(gauge)
            and (fit := book.correlation(name, gauge)) > 0
            and fit * fit >= LOAD_FIT
        ]
        if fits:
            gauge = max(fits)[1]
            yield not_leak(
                "load_correlated",
                "host",
                gauge,
                book[name],
                gained(book, name),
                f"{book.shown(name)} follows {gauge}",
                steady=total,
            )
        elif name == "rss" and "pss" in book and not book["pss"].grew:
            yield not_leak(
                "load_correlated",
                "host",
                "rss",
                book["pss"],
                gained(book, name),
                "the sum of rss counts shared pages once a process; pss is flat",
                steady="pss",
            )


def retained_in_malloc(book: Book) -> Iterator[Found]:
    """Memory free inside malloc and not given back."""
    name = "malloc_free_retained"
    rise = gained(book, name)
    total = _host_total(book)
    if name not in book or not book[name].grew or not total or book.course("heap_inuse").rising:
        return
    if rise >= PART_SHARE * gained(book, total):
        yield not_leak(
            "fragmentation",
            "host",
            name,
            book[total],
            rise,
            "heap in use has no trend; what grew is free inside malloc",
            steady="heap_inuse",
        )


def pinned_host(book: Book) -> Iterator[Found]:
    """Page-locked memory that the allocator keeps, rounded up."""
    name, asked = "pinned_allocated", "pinned_requested"
    if name not in book or not book[name].grew:
        return
    rise = gained(book, name)
    if asked in book:
        _, taken, wanted = book.pair(name, asked)
        ratio = float(taken.max()) / max(float(wanted.max()), 1.0)
        if ratio >= ROUNDED and not book.course(asked).rising:
            yield not_leak(
                "size_rounding",
                "host",
                name,
                book[name],
                rise,
                f"allocated / requested = {ratio:.2f}",
                "freed blocks stay in the allocator's cache",
                steady=_host_total(book),
            )
            return
    if not book.course(name).rising:
        yield not_leak(
            "pool_retention", "host", name, book[name], rise, "page-locked blocks stay cached", steady=_host_total(book)
        )


def page_cache(book: Book) -> Iterator[Found]:
    """File pages charged to a group; reclaimed at its limit."""
    for name in ("cgroup_file", "rss_file"):
        total = "cgroup" if name == "cgroup_file" else "rss"
        if name in book and book[name].grew and gained(book, name) >= PART_SHARE * gained(book, total):
            anon = next((n for n in ("cgroup_anon", "rss_anon", "rss") if n in book and n != total), "")
            yield not_leak(
                "page_cache",
                "host",
                name,
                book[name],
                gained(book, name),
                f"{book.shown(name)} carries the growth; it is reclaimed when memory is short",
                *([f"{book.shown(anon)} is flat"] if anon and not book.course(anon).rising else []),
                steady=anon or name,
            )
    for name in ("meminfo_cached", "meminfo_buffers"):
        if name in book and book[name].grew:
            yield not_leak(
                "page_cache",
                "kernel",
                name,
                book[name],
                gained(book, name),
                "the host's page cache grew; it is reclaimed when memory is short",
                general=True,
            )


def deleted_groups(book: Book) -> Iterator[Found]:
    """Deleted control groups that pages charged to them keep."""
    if "num_memcg" not in book or "num_memcg_live" not in book or not book["num_memcg"].grew:
        return
    _, all_of_them, alive = book.pair("num_memcg", "num_memcg_live")
    if float(np.percentile(all_of_them, 95)) < MORE_GROUPS * float(np.median(alive)):
        return
    slabs = [n for n in book.names() if n.startswith("slab_") and book.correlation(n, "num_memcg") > 0.9]
    weight = sum(gained(book, n) for n in (*slabs, "meminfo_percpu"))
    reasons = ["far more memory cgroups than live ones: pages still charged to deleted ones keep them"]
    if book["num_memcg"].course is Course.RETURNED:
        reasons.append("they went away when page cache was dropped")
    yield not_leak(
        "pinned_by_page_cache",
        "kernel",
        "num_memcg",
        book["num_memcg"],
        max(weight, 1.0),
        *reasons,
        slab_cache=names.slab_cache_of(slabs[0]) if slabs else "",
        steady=_host_total(book),
    )


def reclaimable(book: Book) -> Iterator[Found]:
    """Slab caches that the kernel empties when memory is short."""
    grown = [n for n in book.matching(names.RECLAIMABLE_SLAB, in_bytes=True) if book[n].grew]
    if not grown:
        return
    part = next((n for n in grown if not n.startswith("slab_")), max(grown, key=lambda n: gained(book, n)))
    largest = max((n for n in grown if n.startswith("slab_")), key=lambda n: gained(book, n), default="")
    falls = [n for n in grown if book[n].course is Course.RETURNED]
    yield not_leak(
        "reclaimable_slab",
        "kernel",
        part,
        book[part],
        gained(book, part),
        f"what grows is reclaimable slab ({', '.join(map(book.shown, grown[:3]))})",
        *(["it was given back in part under pressure"] if falls else []),
        slab_cache=names.slab_cache_of(largest),
        steady=_host_total(book) or part,
    )


def pending(book: Book) -> Iterator[Found]:
    """Memory that waits to be freed in a batch."""
    for name in book.matching(names.PENDING):
        if book[name].grew or book[name].cycles:
            yield not_leak(
                "pending_free",
                names.layer_of(name),
                name,
                book[name],
                max(gained(book, name), 1.0),
                f"{book.shown(name)}: what waits to be freed comes and goes",
                steady=_host_total(book) or name,
            )


def collections(book: Book) -> Iterator[Found]:
    """A saw-tooth: garbage that waits for its collection, buffers that are handed off full."""
    for name in (*HOST_TOTALS, "heap_inuse", "cgroup", "gpu_allocated"):
        if name not in book or book[name].course is not Course.RETURNED:
            continue
        trend = book[name]
        collected = [n for n in book.matching(names.COLLECTIONS) if np.ptp(book.counters[n].value) > 0]
        if trend.cycles >= MIN_CYCLES and (collected or trend.fall >= CYCLE_LEVEL_SHARE * trend.level):
            yield not_leak(
                "gc_deferred",
                names.layer_of(name),
                name,
                trend,
                trend.fall,
                f"the floor after each of {trend.cycles} drops is flat",
                *([f"drops go with {collected[0]}"] if collected else []),
                f"peaks stand {trend.fall:,.4g} above the floor: what memory must be there for",
                general=not collected,
            )
            return


def address_space(book: Book) -> Iterator[Found]:
    """Virtual size that grew while nothing of it is resident."""
    total = _host_total(book)
    if "vss" not in book or not book["vss"].grew or book.course("vss").rising or not total:
        return
    if gained(book, total) < RESIDENT_SHARE * gained(book, "vss") and not book.course(total).rising:
        yield not_leak(
            "address_reservation",
            "host",
            "vss",
            book["vss"],
            1.0,
            "virtual size levelled off; resident size is flat: reservations of stacks, arenas or the driver",
        )


def warm_up(book: Book) -> Iterator[Found]:
    """Growth that ends in a plateau: caches, pools and keys filling up."""
    for name in (*(n for n in book.names() if n.endswith(names.STORE_BYTES)), *HOST_TOTALS, "cgroup", "gpu_used"):
        if name in book and book.course(name).course in (Course.PLATEAU, Course.RETURNED):
            trend = book.course(name)
            ends = [n for n in book.matching(names.EVICTIONS) if np.ptp(book.counters[n].value) > 0]
            how = "levelled off" if trend.course is Course.PLATEAU else "was given back"
            yield not_leak(
                "cache_warmup",
                names.layer_of(name),
                name,
                trend,
                gained(book, name) + (name in HOST_TOTALS),
                f"{book.shown(name)} grew and {how}",
                *([f"{ends[0]} moves: what comes in drives others out"] if ends else []),
                steady=_host_total(book) or name,
                general=True,
            )


RULES: list[Callable[[Book], Iterable[Found]]] = [
    unsharing,
    load,
    retained_in_malloc,
    pinned_host,
    device_pools,
    device_outside,
    page_cache,
    deleted_groups,
    reclaimable,
    pending,
    collections,
    address_space,
    warm_up,
]

"""Rules for growth that is no leak: what grew and ended, fell back, or is held by design.

Each rule yields findings with the bytes that they explain; the specific ones go before the general ones, the larger
before the smaller. Evidence and sources of each stand in docs/verdicts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from leakscope.detect.series import counters as names
from leakscope.detect.series.book import Book
from leakscope.detect.series.found import Found
from leakscope.detect.series.leaks import HOST_TOTALS
from leakscope.detect.series.totals import outside_allocators
from leakscope.detect.series.trend import Course, Trend

UNLIMITED = 2.0**62
ROUNDED = 1.15
"""Taken by the allocator over asked for, from which on rounding explains the difference."""
PART_SHARE = 0.4
"""A part explains the growth of its total from this share on."""
LOAD_FIT = 0.9
MORE_GROUPS = 1.5
ONE_STEP = 0.6
"""One step with this share of the rise is an initialisation, many are loads on first use."""
RESIDENT_SHARE = 0.1
"""Address space of which less than this share became resident was only reserved."""
MIN_CYCLES = 2
CYCLE_LEVEL_SHARE = 0.15


def benign(book: Book) -> list[Found]:
    """All explanations, best first."""
    found = [finding for rule in RULES for finding in rule(book)]
    return sorted(found, key=lambda f: (f.general, -f.weight))


def gained(book: Book, name: str) -> float:
    """How much a counter went up over its lowest early reading, at its highest; 0 where it is not there."""
    counter = book.counters.get(name)
    if counter is None or len(counter.value) < 3:
        return 0.0
    first = float(np.median(counter.value[: max(3, len(counter.value) // 50)]))
    return max(0.0, float(np.percentile(counter.value, 99)) - first)


def _found(kind: str, layer: str, counter: str, trend: Trend, weight: float, *reasons: str, steady: str = "",
           general: bool = False, object: str = "", slab_cache: str = "") -> Found:  # fmt: skip
    return Found("not_leak", kind, layer, counter, steady or counter, trend, tuple(reasons), weight=weight,
                 general=general, object=object, slab_cache=slab_cache)  # fmt: skip


def _host_total(book: Book) -> str:
    return next((n for n in HOST_TOTALS if n in book), "cgroup" if "cgroup" in book else "")


def unsharing(book: Book) -> Iterator[Found]:
    """Pages shared at fork become private as they are written: the proportional share rises, the sum does not."""
    if "pss" not in book or "rss" not in book or not book["pss"].grew:
        return
    rise, total = gained(book, "pss"), gained(book, "rss")
    falls = "shared_clean" in book and book.correlation("pss", "shared_clean") < -0.8
    if total < PART_SHARE * rise and (falls or not book["rss"].grew):
        yield _found("cow_unsharing", "host", "pss", book["pss"], rise,
                     "the sum of rss is flat while pss grows: shared pages become private", steady="rss")  # fmt: skip


def load(book: Book) -> Iterator[Found]:
    """Memory in proportion to workers, connections or requests in flight."""
    total = _host_total(book)
    for name in dict.fromkeys(n for n in (total, "rss") if n in book and book[n].grew):
        fits = [
            (fit, gauge) for gauge in book.matching(names.GAUGE, in_bytes=False)
            if not names.WORK.fullmatch(gauge) and not names.DESCRIPTORS.fullmatch(gauge)
            and (fit := book.correlation(name, gauge)) > 0 and fit * fit >= LOAD_FIT
        ]  # fmt: skip
        if fits:
            gauge = max(fits)[1]
            yield _found("load_correlated", "host", gauge, book[name], gained(book, name),
                         f"{book.shown(name)} follows {gauge}", steady=total)  # fmt: skip
        elif name == "rss" and "pss" in book and not book["pss"].grew:
            yield _found("load_correlated", "host", "rss", book["pss"], gained(book, name),
                         "the sum of rss counts shared pages once a process; pss is flat", steady="pss")  # fmt: skip


def retained_in_malloc(book: Book) -> Iterator[Found]:
    """Memory free inside malloc and not given back."""
    name = "malloc_free_retained"
    rise = gained(book, name)
    total = _host_total(book)
    if name in book and book[name].grew and total and rise >= PART_SHARE * gained(book, total):
        if not book.course("heap_inuse").rising:
            yield _found("fragmentation", "host", name, book[total], rise,
                         "heap in use has no trend; what grew is free inside malloc", steady="heap_inuse")  # fmt: skip


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
            yield _found("size_rounding", "host", name, book[name], rise,
                         f"allocated / requested = {ratio:.2f}", "freed blocks stay in the allocator's cache",
                         steady=_host_total(book))  # fmt: skip
            return
    if not book.course(name).rising:
        yield _found("pool_retention", "host", name, book[name], rise, "page-locked blocks stay cached",
                     steady=_host_total(book))  # fmt: skip


def device_pools(book: Book) -> Iterator[Found]:
    """Device memory that an allocator holds beyond what is in use."""
    if "gpu_pool_reserved" in book and book["gpu_pool_reserved"].grew and not book.course("gpu_pool_used").rising:
        limit = book.counters.get("gpu_pool_release_threshold")
        reasons = ["the pool's use returns to its floor; reserved stays at the high-water mark"]
        if limit is not None and float(np.median(limit.value)) >= UNLIMITED:
            reasons.append("the release threshold is unlimited: retention is configured")
        yield _found("pool_retention", "gpu", "gpu_pool_reserved", book["gpu_pool_reserved"],
                     gained(book, "gpu_pool_reserved"), *reasons, steady="gpu_pool_used")  # fmt: skip
    if "gpu_reserved" in book and book["gpu_reserved"].grew and not book.course("gpu_allocated").rising:
        rise = gained(book, "gpu_reserved")
        captures = _moved(book, names.CAPTURES)
        if gained(book, "gpu_inactive_split") >= PART_SHARE * rise:
            yield _found("fragmentation", "gpu", "gpu_inactive_split", book["gpu_reserved"], rise,
                         "allocated has no trend; what is reserved beyond it are free pieces of partly used blocks",
                         "out-of-memory is possible although nothing leaks; variable sizes: expandable segments would help",
                         steady="gpu_allocated")  # fmt: skip
        elif captures and not book.course("gpu_reserved").rising:
            yield _found("capture_reservation", "gpu", "gpu_reserved", book["gpu_reserved"], rise,
                         f"reserved grew while {captures[0]} did, and stays", steady="gpu_allocated")  # fmt: skip
        elif "gpu_allocated" in book:
            yield _found("pool_retention", "gpu", "gpu_reserved", book["gpu_reserved"], rise,
                         "allocated has no trend; the allocator keeps what it once reserved",
                         steady="gpu_allocated")  # fmt: skip


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
    yield _found(kind, "gpu", "gpu_used", book[name], rise, reason, steady="gpu_used", general=general and not captures)


def _moved(book: Book, pattern: object) -> list[str]:
    import re

    assert isinstance(pattern, re.Pattern)
    return [n for n in book.matching(pattern, in_bytes=False) if np.ptp(book.counters[n].value) > 0]


def page_cache(book: Book) -> Iterator[Found]:
    """File pages charged to a group; reclaimed at its limit."""
    for name in ("cgroup_file", "rss_file"):
        total = "cgroup" if name == "cgroup_file" else "rss"
        if name in book and book[name].grew and gained(book, name) >= PART_SHARE * gained(book, total):
            anon = next((n for n in ("cgroup_anon", "rss_anon", "rss") if n in book and n != total), "")
            yield _found("page_cache", "host", name, book[name], gained(book, name),
                         f"{book.shown(name)} carries the growth; it is reclaimed when memory is short",
                         *([f"{book.shown(anon)} is flat"] if anon and not book.course(anon).rising else []),
                         steady=anon or name)  # fmt: skip
    for name in ("meminfo_cached", "meminfo_buffers"):
        if name in book and book[name].grew:
            yield _found("page_cache", "kernel", name, book[name], gained(book, name),
                         "the host's page cache grew; it is reclaimed when memory is short", general=True)  # fmt: skip


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
    yield _found("pinned_by_page_cache", "kernel", "num_memcg", book["num_memcg"], max(weight, 1.0), *reasons,
                 slab_cache=names.slab_cache_of(slabs[0]) if slabs else "", steady=_host_total(book))  # fmt: skip


def reclaimable(book: Book) -> Iterator[Found]:
    """Slab caches that the kernel empties when memory is short."""
    grown = [n for n in book.matching(names.RECLAIMABLE_SLAB, in_bytes=True) if book[n].grew]
    if not grown:
        return
    part = next((n for n in grown if not n.startswith("slab_")), max(grown, key=lambda n: gained(book, n)))
    largest = max((n for n in grown if n.startswith("slab_")), key=lambda n: gained(book, n), default="")
    falls = [n for n in grown if book[n].course is Course.RETURNED]
    yield _found("reclaimable_slab", "kernel", part, book[part], gained(book, part),
                 f"what grows is reclaimable slab ({', '.join(map(book.shown, grown[:3]))})",
                 *(["it was given back in part under pressure"] if falls else []),
                 slab_cache=names.slab_cache_of(largest), steady=_host_total(book) or part)  # fmt: skip


def pending(book: Book) -> Iterator[Found]:
    """Memory that waits to be freed in a batch."""
    for name in book.matching(names.PENDING):
        if book[name].grew or len(book[name].floor.cycles if book[name].floor else ()) > 0:
            yield _found("pending_free", names.layer_of(name), name, book[name], max(gained(book, name), 1.0),
                         f"{book.shown(name)}: what waits to be freed comes and goes", steady=_host_total(book) or name)  # fmt: skip


def collections(book: Book) -> Iterator[Found]:
    """A saw-tooth: garbage that waits for its collection, buffers that are handed off full."""
    for name in (*HOST_TOTALS, "heap_inuse", "cgroup", "gpu_allocated"):
        if name not in book or book[name].course is not Course.RETURNED:
            continue
        trend = book[name]
        collected = [n for n in book.matching(names.COLLECTIONS) if np.ptp(book.counters[n].value) > 0]
        if trend.cycles >= MIN_CYCLES and (collected or trend.fall >= CYCLE_LEVEL_SHARE * trend.level):
            yield _found("gc_deferred", names.layer_of(name), name, trend, trend.fall,
                         f"the floor after each of {trend.cycles} drops is flat",
                         *([f"drops go with {collected[0]}"] if collected else []),
                         f"peaks stand {trend.fall:,.4g} above the floor: what memory must be there for",
                         general=not collected)  # fmt: skip
            return


def address_space(book: Book) -> Iterator[Found]:
    """Virtual size that grew while nothing of it is resident."""
    total = _host_total(book)
    if "vss" not in book or not book["vss"].grew or book.course("vss").rising or not total:
        return
    if gained(book, total) < RESIDENT_SHARE * gained(book, "vss") and not book.course(total).rising:
        yield _found("address_reservation", "host", "vss", book["vss"], 1.0,
                     "virtual size levelled off; resident size is flat: reservations of stacks, arenas or the driver")  # fmt: skip


def warm_up(book: Book) -> Iterator[Found]:
    """Growth that ends in a plateau: caches, pools and keys filling up."""
    for name in (*(n for n in book.names() if n.endswith(names.STORE_BYTES)), *HOST_TOTALS, "cgroup", "gpu_used"):
        if name in book and book.course(name).course in (Course.PLATEAU, Course.RETURNED):
            trend = book.course(name)
            ends = [n for n in book.matching(names.EVICTIONS) if np.ptp(book.counters[n].value) > 0]
            how = "levelled off" if trend.course is Course.PLATEAU else "was given back"
            yield _found("cache_warmup", names.layer_of(name), name, trend, gained(book, name) + (name in HOST_TOTALS),
                         f"{book.shown(name)} grew and {how}",
                         *([f"{ends[0]} moves: what comes in drives others out"] if ends else []),
                         steady=_host_total(book) or name, general=True)  # fmt: skip


RULES: list[Callable[[Book], Iterable[Found]]] = [
    unsharing, load, retained_in_malloc, pinned_host, device_pools, device_outside, page_cache, deleted_groups,
    reclaimable, pending, collections, address_space, warm_up,
]  # fmt: skip

"""Rules for leaks: which counter, rising for good, means what. The first ones are the narrowest.

Each rule is a function of the :class:`Book`; it yields findings and says which counters they explain, so that the sum
of parts is not found again. What the classes mean stands in docs/verdicts.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from leakscope.detect.series import counters as names
from leakscope.detect.series.book import Book
from leakscope.detect.series.counters import HOST, HOST_TOTALS, layer_of
from leakscope.detect.series.found import Found, leak
from leakscope.detect.series.kernel_leaks import descriptors, pages, slabs
from leakscope.detect.series.trend import Course, Trend

SAME_SHARE = 0.5
"""A part carries the growth of its total from this share of its rate on."""
FULL_SHARE = 0.9
"""Pinned entries that fill this share of a cache leave nothing to evict."""
STACK_BYTES = (32 << 10, 256 << 20)
"""Virtual size of a thread's stack: 32 KiB (PTHREAD_STACK_MIN is 16 KiB) to 256 MiB."""
MAX_TEARDOWNS = 2000
MIN_TEARDOWNS = 3
STEP_FIT = 0.9


def pinned_entries(book: Book, explained: set[str]) -> Iterator[Found]:
    """Pins that keep ever more of a cache from eviction, until nothing can be evicted."""
    for name in book.matching(names.PINNED_ENTRIES):
        prefix = name.rsplit("_", 1)[0]
        capacity = next((c for c in (f"{prefix}_capacity", f"{prefix}_size", f"{prefix}_limit") if c in book), "")
        trend = book.course(name)
        counter = book.counters[name]
        full = capacity and np.median(counter.value[-5:]) >= FULL_SHARE * np.median(book.counters[capacity].value[-5:])
        if trend.rising or (trend.course is Course.PLATEAU and full):
            reasons = [f"{book.shown(name)} rises and nothing unpins"]
            if full:
                trend = _until_full(counter.t_s, counter.value, trend)
                reasons = [f"{book.shown(name)} rose until the cache was full of pinned entries"]
            if book["rss"].course is Course.FLAT:
                reasons.append("rss is flat: the cache's memory is allocated in advance")
            yield leak(
                book,
                "pinned_never_unpinned",
                name,
                name,
                trend,
                *reasons,
                object="cache entries pinned, never unpinned",
                layer="gpu" if name.startswith("gpu") else "host",
                explains=frozenset({f"{prefix}_used"}),
            )


def _until_full(times: np.ndarray, value: np.ndarray, trend: Trend) -> Trend:
    """The mean rate from the start of the rise to where the cache was full."""
    top = float(np.percentile(value, 95))
    end = int(np.argmax(value >= 0.97 * top))
    low = float(np.percentile(value, 2))
    start = int(np.flatnonzero(value[: end + 1] <= low + 0.02 * (top - low))[-1]) if end else 0
    rate = float(value[end] - value[start]) / max(float(times[end] - times[start]), 1e-9)
    error = abs(trend.high - trend.rate) if trend.rising else 0.1 * rate
    return replace(
        trend,
        course=Course.RISING,
        rate=rate,
        low=rate - error,
        high=rate + error,
        start_s=float(times[start]),
        line_rise=top - low,
    )


def keys_without_ttl(book: Book, explained: set[str]) -> Iterator[Found]:
    """A store whose keys without expiry become ever more."""
    for name in book.matching(names.KEYS_WITHOUT_TTL):
        if not book.course(name).rising:
            continue
        match = names.KEYS_WITHOUT_TTL.fullmatch(name)
        assert match is not None
        store = match["store"]
        size = next((s for s in (f"{store}_{word}" for word in names.STORE_BYTES) if s in book), "rss")
        trend = book.course(size)
        if size not in book or not trend.rising:
            continue
        yield leak(
            book,
            "keys_without_ttl",
            name,
            size,
            trend,
            f"{name} rises to the end, and {book.shown(size)} with it",
            layer="host",
            object="keys without expiry",
            explains=HOST | {size},
        )


def biggest_key(book: Book, explained: set[str]) -> Iterator[Found]:
    """One key of a store that grows: a container that nobody drains."""
    for name in book.matching(re.compile(r".*(biggest|largest|max)_key.*|.*key_max.*"), in_bytes=True):
        trend = book.course(name)
        if trend.rising:
            yield leak(
                book,
                "undrained_container",
                name,
                name,
                trend,
                f"{book.shown(name)}: one key grows to the end",
                layer="host",
                explains=HOST | {n for n in book.names() if n.endswith("_used_memory")},
            )


def send_queue(book: Book, explained: set[str]) -> Iterator[Found]:
    """Data that waits to be sent and is not."""
    for name in sorted(book.matching(names.SEND_QUEUE), key=lambda n: not book.counters[n].in_bytes):
        trend = book.course(name)
        if trend.rising and not names.WORK.fullmatch(name) and name not in explained:
            size = name if book.counters[name].in_bytes else book.rising("heap_inuse", *HOST_TOTALS)
            if size:
                yield leak(
                    book,
                    "unbounded_send_queue",
                    name,
                    size,
                    book.course(size),
                    f"{book.shown(name)} rises to the end",
                    layer=layer_of(size),
                    explains=HOST | set(book.matching(names.SEND_QUEUE)),
                )


def teardown(book: Book, explained: set[str]) -> Iterator[Found]:
    """A floor that rises by a step with each re-creation."""
    for work in book.matching(names.TEARDOWN):
        _, done, _ = book.pair(work, work)
        times = float(np.ptp(done))
        if not MIN_TEARDOWNS <= times <= MAX_TEARDOWNS:
            continue
        for name in _device_then_host(book):
            trend = book.course(name)
            if not trend.rising or name in explained or trend.floor is None:
                continue
            at = book.counters[work]
            fitted = np.interp(trend.floor.t_s, at.t_s, at.value)
            fit = np.corrcoef(fitted, trend.floor.value)[0, 1] if np.ptp(fitted) else 0.0
            if fit * fit < STEP_FIT:
                continue
            unit = (
                trend.rate
                * (trend.end_s - trend.start_s)
                / max(1.0, float(at.value[-1] - np.interp(trend.start_s, at.t_s, at.value)))
            )
            layer = "gpu" if name.startswith("gpu") else "host"
            finding = leak(
                book,
                "not_destroyed_on_teardown",
                name,
                name,
                trend,
                f"the floor of {book.shown(name)} rises by {unit:,.4g} bytes with each of {work}",
                layer=layer,
                explains=frozenset(n for n in book.names() if layer_of(n) == layer),
            )
            yield replace(finding, per_unit=(work, unit))
            return


def _device_then_host(book: Book) -> list[str]:
    return [n for n in ("gpu_used", "gpu_pool_used", "gpu_allocated", "pinned_driver", *HOST_TOTALS) if n in book]


def thread_stacks(book: Book, explained: set[str]) -> Iterator[Found]:
    """Address space that rises by one stack a thread."""
    created = next((n for n in ("threads_created_total", "threads") if n in book and book[n].rising), "")
    if not created or not book.course("vss").rising:
        return
    trend = book.course("vss")
    count = book.counters[created].value
    unit = trend.rise / max(1.0, float(count[-1] - count[0]))
    if not STACK_BYTES[0] <= unit <= STACK_BYTES[1]:
        return
    reasons = [f"vss rises by {unit:,.4g} bytes for each of {created}"]
    if "threads" in book and not book["threads"].rising:
        reasons.append("the number of live threads is flat: threads that ended were never joined")
    finding = leak(
        book,
        "unjoined_thread_stacks",
        "vss",
        "vss",
        trend,
        *reasons,
        layer="host",
        explains=HOST | {"threads"},
        object="stacks of threads that ended and were not joined",
    )
    yield replace(finding, per_unit=(created, unit))


def released_by_the_pool(book: Book, explained: set[str]) -> Iterator[Found]:
    """A pool whose own books are flat while the figure of who is below it rises."""
    for name in book.matching(names.DRIVER, in_bytes=True):
        pool = name.removesuffix("_driver")
        own = [n for n in book.names() if n.startswith(f"{pool}_") and n != name and book.counters[n].in_bytes]
        if own and book.course(name).rising and not book.rising(*own):
            yield leak(
                book,
                "evicted_but_not_released",
                name,
                name,
                book.course(name),
                f"{', '.join(map(book.shown, own))} flat while {book.shown(name)} rises",
                layer=_layer(name),
                explains=HOST | {"gpu_used"},
            )
    for name in book.matching(names.TRACKED, in_bytes=True):
        total = (
            book.rising("gpu_used")
            if name.startswith("gpu")
            else book.rising("pinned_driver", "heap_inuse", "anon_mmap", *HOST_TOTALS)
        )
        if total and total not in explained and not book.course(name).rising:
            yield leak(
                book,
                "evicted_but_not_released",
                total,
                total,
                book.course(total),
                f"{book.shown(name)} is flat while {book.shown(total)} rises: given up, not given back",
                layer=_layer(total),
                explains=HOST,
            )
            return


def _layer(name: str) -> str:
    return "gpu" if name.startswith("gpu") else "host"


def mappings(book: Book, explained: set[str]) -> Iterator[Found]:
    """Anonymous maps that rise while malloc's memory does not."""
    if "anon_mmap" in explained or not book.course("anon_mmap").rising or book.course("heap_inuse").rising:
        return
    total = book.rising("rss_anon", "rss", "pss", "cgroup_anon") or "anon_mmap"
    yield leak(
        book,
        "mapping_outside_heap",
        "anon_mmap",
        total,
        book.course(total),
        "anonymous maps rise to the end" + (" while heap in use is flat" if "heap_inuse" in book else ""),
        layer="host",
        explains=HOST,
    )


RULES: list[Callable[[Book, set[str]], Iterable[Found]]] = [
    pinned_entries,
    keys_without_ttl,
    biggest_key,
    send_queue,
    teardown,
    thread_stacks,
    descriptors,
    slabs,
    pages,
    released_by_the_pool,
    mappings,
]
"""The narrow rules; those for totals stand in :mod:`leakscope.detect.series.totals`."""

"""Rules for leaks in the kernel: open files, objects of one slab cache, pages outside of slab."""

from __future__ import annotations

import re
from collections.abc import Iterator

from leakscope.detect.series import counters as names
from leakscope.detect.series.book import Book
from leakscope.detect.series.counters import HOST, HOST_TOTALS, slab_cache_of
from leakscope.detect.series.found import Found, leak

UNRECLAIMABLE = re.compile(r"slab_.*|cgroup_slab_unreclaimable|meminfo_sunreclaim|cgroup_kernel")
OF_FILES = re.compile(r"slab_(filp|sock_inode_cache|dentry|.*inode.*|TCP.*|UNIX|eventpoll.*|pid)")
"""Caches that grow with every open file."""
PAGES = ("meminfo_unaccounted", "meminfo_vmallocused", "meminfo_kernelstack", "meminfo_percpu", "meminfo_pagetables")


def descriptors(book: Book, explained: set[str]) -> Iterator[Found]:
    """Open files that become ever more."""
    open_files = [n for n in book.matching(names.DESCRIPTORS) if n not in explained and book.course(n).rising]
    if not open_files:
        return
    slabs = [n for n in ("slab_filp", *HOST_TOTALS, "cgroup") if n in book and book.course(n).rising]
    name = open_files[0]
    size = slabs[0] if slabs else name
    yield leak(
        book,
        "descriptor_leak",
        name,
        size,
        book.course(size),
        f"{book.shown(name)} rises to the end",
        layer="kernel" if size.startswith("slab") else "host",
        slab_cache="filp" if size == "slab_filp" else "",
        explains=HOST | {n for n in book.names() if OF_FILES.fullmatch(n)},
    )


def slabs(book: Book, explained: set[str]) -> Iterator[Found]:
    """Kernel objects of one cache; caches that the kernel empties under pressure are not asked."""
    deleted_groups = "num_memcg" in book and "num_memcg_live" in book and book["num_memcg"].grew
    for name in book.matching(UNRECLAIMABLE, in_bytes=True):
        if names.RECLAIMABLE_SLAB.fullmatch(name) or name in explained or name.endswith("_num"):
            continue
        trend = book.course(name)
        if not trend.rising:
            continue
        if deleted_groups and book.correlation(name, "num_memcg") > 0.95:
            continue
        cache = slab_cache_of(name)
        reasons = [f"{cache or name} rises to the end and is not reclaimable"]
        if not book.rising(*HOST_TOTALS):
            reasons.append("the process's own memory is flat")
        elif trend.lives == 1 and len(book.restarted_s):
            reasons.append("it outlives restarts of the process")
        yield leak(
            book,
            "kernel_object_per_event",
            name,
            name,
            trend,
            *reasons,
            layer="kernel",
            slab_cache=cache,
            explains=frozenset(
                {
                    "cgroup",
                    "cgroup_slab_unreclaimable",
                    "meminfo_sunreclaim",
                    "meminfo_slab",
                    "cgroup_kernel",
                    "meminfo_unaccounted",
                }
                if cache
                else {"cgroup", "cgroup_kernel"}
            ),
        )


def pages(book: Book, explained: set[str]) -> Iterator[Found]:
    """Kernel memory that no line accounts for, or that vmalloc or drivers took by the page."""
    for name in PAGES:
        if name in explained or not book.course(name).rising:
            continue
        if book["num_memcg"].grew and book.correlation(name, "num_memcg") > 0.95:
            continue
        yield leak(
            book,
            "pages_outside_slab",
            name,
            name,
            book.course(name),
            f"{book.shown(name)} rises to the end, outside of slab and of processes",
            layer="kernel",
            explains=frozenset({"meminfo_unaccounted", "cgroup"}),
        )

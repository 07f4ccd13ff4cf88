"""The tracepoints of the kernel, map and process probes, and how they are attached."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from leakscope.model.recording import Loss
from leakscope.record.kernel import bpf, perf
from leakscope.record.kernel.btf import KernelTypes
from leakscope.record.kernel.syscalls import wait_for_grace_period
from leakscope.record.kernel.tracefs import tracepoint_id
from leakscope.record.loader import LoadedPrograms

KERNEL_OBJECTS = {
    "kmalloc": "on_kmalloc",
    "kmem_cache_alloc": "on_kmem_cache_alloc",
    "kfree": "on_kfree",
    "kmem_cache_free": "on_kmem_cache_free",
    "mm_page_alloc": "on_mm_page_alloc",
    "mm_page_free": "on_mm_page_free",
}
"""Raw tracepoints: 15-50 ns an empty hit where classic ones take 100-190 ns, and fewer lost nested events."""

OLD_NODE_VARIANTS = {"kmalloc_node": "on_kmalloc", "kmem_cache_alloc_node": "on_kmem_cache_alloc"}
"""Before v6.1 (2c1d697fb8ba) NUMA-aware allocations had tracepoints of their own, with the same first arguments."""

ALLOCATIONS = frozenset({"kmalloc", "kmem_cache_alloc", "mm_page_alloc", *OLD_NODE_VARIANTS})

SETTLING_GRACE_PERIODS = 2
"""Callbacks run soon after their grace period, not in it: those that waited for the first have run by the second."""
_GRACE_PERIOD_S = 0.05  # where it cannot be waited for

PROCESS_LIVES = {
    "task_newtask": "on_new_task",
    "sched_process_exit": "on_process_exit",
    "sched_process_exec": "on_process_exec",
}
"""Raw tracepoints, too."""

RESIDENT_SETS = {"rss_stat": "on_rss_stat"}
"""Raw, too: for a classic one the kernel sums a counter over all CPUs with its lock held, at each fault."""

MAP_CALLS = {
    ("syscalls", f"sys_{when}_{call}"): f"on_{when}_map_call"
    for when, calls in (("exit", ("mmap", "munmap", "mremap", "brk", "madvise")), ("enter", ("munmap", "mremap")))
    for call in calls
}

CLOSING_THREADS = 32


@dataclass
class Attachments:
    """What is attached: descriptors to close, names for the manifest, and what could not be attached and why.

    `descriptors` are of links, `events` of the perf events that some of them link a program to; `allocations` are links
    of the probes that see kernel objects begin.
    """

    allocations: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    programs: dict[str, int] = field(default_factory=dict)  # program name: its descriptor, for its counters
    names: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    _closing: threading.Thread | None = None

    def losses(self) -> list[Loss]:
        """What could not be attached."""
        return [Loss(probe, "attach_failed", 1, reason) for probe, reason in self.failed]

    def detach(self) -> None:
        """End all links: no program runs afterwards.

        Those of allocations first. Much of what is freed is freed by RCU, after a grace period of some tens of
        milliseconds: by then the frees of all that was allocated before are seen, and none of it looks kept.
        The kernel waits for RCU at each; side by side these waits are one. The events behind the links are closed in
        the background: there each waits with a lock held, 40 ms one after another. :meth:`close` waits for them.
        """
        allocations, self.allocations = self.allocations, []
        _close_side_by_side(allocations)
        for _ in range(SETTLING_GRACE_PERIODS if allocations else 0):
            if not wait_for_grace_period():
                time.sleep(_GRACE_PERIOD_S)
        links, self.descriptors = self.descriptors, []
        _close_side_by_side(links)
        events, self.events = self.events, []
        if events:
            self._closing = threading.Thread(target=_close_all, args=(events,), name="leakscope-closing")
            self._closing.start()

    def close(self) -> None:
        """Detach, and return when everything is closed."""
        self.detach()
        if self._closing is not None:
            self._closing.join()
            self._closing = None


def _close_side_by_side(links: list[int]) -> None:
    if links:
        with ThreadPoolExecutor(min(len(links), CLOSING_THREADS)) as pool:
            list(pool.map(os.close, reversed(links)))


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def attach_raw(programs: LoadedPrograms, attachments: Attachments, tracepoints: dict[str, str]) -> None:
    """Attach raw tracepoints; one that is missing is noted in `failed`."""
    for tracepoint, program in tracepoints.items():
        try:
            fd = programs.program(program, "raw_tracepoint")
            links = attachments.allocations if tracepoint in ALLOCATIONS else attachments.descriptors
            links.append(bpf.open_raw_tracepoint(fd, tracepoint))
        except OSError as error:
            attachments.failed.append((f"raw_tracepoint:{tracepoint}", str(error.strerror)))
            continue
        attachments.programs[program] = fd
        attachments.names.append(f"raw_tracepoint:{tracepoint}")


def attach_classic(programs: LoadedPrograms, attachments: Attachments, tracepoints: dict[tuple[str, str], str]) -> None:
    """Attach classic tracepoints through perf events; one that is missing is noted in `failed`."""
    for (category, name), program in tracepoints.items():
        label = f"tracepoint:{category}:{name}"
        number = tracepoint_id(category, name)
        if number is None:
            attachments.failed.append((label, "this kernel has no such tracepoint"))
            continue
        try:
            fd = programs.program(program, "tracepoint")
            event = perf.open_tracepoint(number)
            attachments.events.append(event)
            attachments.descriptors.append(bpf.link_perf_event(fd, event))
        except OSError as error:
            attachments.failed.append((label, str(error.strerror)))
            continue
        attachments.programs[program] = fd
        attachments.names.append(label)


def attach_all(programs: LoadedPrograms, attachments: Attachments) -> None:
    """Attach to processes, maps and kernel objects, in that order: frees are seen before the allocations they end."""
    # Kernels from 6.1 on lack the variants for NUMA nodes, which would only be told as failures there.
    types = KernelTypes()
    variants = {name: program for name, program in OLD_NODE_VARIANTS.items() if types.raw_tracepoint_arguments(name)}
    attach_raw(programs, attachments, PROCESS_LIVES)
    if types.member_offset("mm_struct", "rss_stat") is not None:
        attach_raw(programs, attachments, RESIDENT_SETS)
    else:  # the programs would read something else
        attachments.failed += [(f"raw_tracepoint:{name}", "mm_struct has no rss_stat here") for name in RESIDENT_SETS]
    attach_classic(programs, attachments, MAP_CALLS)
    attach_raw(programs, attachments, KERNEL_OBJECTS | variants)

"""The vocabulary of memory events: the values that columns of the tables may take.

Layers say where memory lives. Pinned host memory is layer ``host``, kind ``pinned``. Page kinds are never
added to the kernel layer when the pages back slabs or user memory (:data:`KINDS_NOT_ADDED`).
"""

from __future__ import annotations

LAYERS = ("kernel", "host", "gpu")

OPS = ("alloc", "free", "advise")
"""``advise`` is madvise: it changes what is resident, not what is mapped, and never counts in live bytes."""

CAUSES = ("call", "reuse", "context", "exit", "exec")
"""Why a free happened: a call; the address was handed out again although no free was seen; the owning CUDA
context was destroyed; the process ended (never counted as given back); the process image was replaced."""

KINDS = (
    *("kmalloc", "slab", "page", "page_slab", "page_user", "slab_meta"),
    *("mmap_anon", "mmap_file", "mmap_reserve", "brk", "heap", "heap_backing", "pinned", "registered"),
    *("device", "managed", "async", "vmm", "array", "ipc", "pool_segment", "pool_block"),
)
"""Kinds of memory, a line a layer. kernel: kmalloc, slab, page (kernel pages outside slab), page_slab (back slabs),
page_user (back user memory), slab_meta (the slab allocator's own bookkeeping). host: maps, brk, heap (malloc),
heap_backing (maps and brk that malloc made for itself, told where malloc is recorded), pinned, registered (page-locked
after the fact). gpu: device and pitched memory, managed, stream-ordered pools, physical memory of cuMemCreate, arrays,
memory of other processes, segments that a caching allocator took from the driver, blocks that it hands out of
them."""

KINDS_NOT_ADDED = frozenset(
    {"page_slab", "page_user", "slab_meta", "mmap_reserve", "ipc", "heap", "registered", "pool_block"}
)
"""Kinds that are shown but not added to a layer's total: their bytes are already counted by another kind
(page_slab and slab_meta by slab objects, heap and registered by brk and maps, pool_block by segments) or are not
memory of the layer (reservations, other owners)."""

LOSS_KINDS = (
    "ring_drop", "recursion_miss", "live_map_full", "live_map_busy", "stack_miss",
    "call_map_full", "attach_failed", "symbol_unresolved", "page_user_not_streamed", "sampler_error",
    "sideband_lost", "address_only_free", "python_frames_unavailable", "native_unwind_unavailable", "mark_lost",
    "arguments_lost", "arguments_approximate", "arguments_partial", "kernel_names_lost",
    "below_min_size", "not_sampled",
    "failed_allocation", "attached_mid_run", "stack_map_full", "events_lost", "sequence_gap", "undecodable_event",
)  # fmt: skip
"""What the ``losses`` table counts. A loss widens or withholds a verdict; it is never silent."""

CACHE_OPS = (
    *("insert", "evict", "pin", "unpin", "ref", "unref", "view", "insert_fail"),
    *("access", "state", "clear", "invalidate", "gap"),
)
"""What happens to a cache object. ``insert`` and ``view`` make it live, ``evict`` ends it (whoever does it: eviction,
expiry, deletion). ``access`` is a hit. ``state`` is what a scan found: the object is there at that time, live from then
on if it was not. Without an object: ``clear`` ends all objects of its medium ('' = of the source), ``invalidate`` makes
those of its generation stale without removing them, ``gap`` says that events before it were lost."""

NEVER = -1
"""``expires_ns`` of an object without TTL."""

SCOPES = ("process", "cgroup", "device", "host", "service")

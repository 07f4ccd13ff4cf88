"""Arrow schemas of the tables of a capture: the only on-disk contract.

Times are ``int64`` nanoseconds of the source's clock (CLOCK_MONOTONIC for live recordings; the manifest holds
the anchors to UTC). Sizes are ``int64`` bytes, addresses ``uint64``. There are no nulls in hot columns:
0 means "none" for ids, addresses and ``alloc_ts_ns``; ids start at 1. Low-cardinality text is
dictionary-encoded. Every row carries ``source_id``, an index into the manifest's ``sources``.
"""

from __future__ import annotations

import pyarrow as pa

TEXT = pa.dictionary(pa.int16(), pa.string())
"""Dictionary-encoded text for columns of few distinct values."""

MEM_EVENTS = pa.schema(
    [
        ("source_id", pa.int16()),
        ("ts_ns", pa.int64()),
        ("pid", pa.int32()),  # the process that owns the memory (its allocator), for frees as well
        ("tid", pa.int32()),  # the thread that made this call; 0 where unknown
        ("cpu", pa.int16()),
        ("op", TEXT),  # words.OPS
        ("cause", TEXT),  # words.CAUSES
        ("layer", TEXT),  # words.LAYERS
        ("kind", TEXT),  # words.KINDS
        ("api", TEXT),  # tracepoint, syscall or function: kmem_cache_alloc, mmap, cudaMalloc…
        ("slab_cache", TEXT),  # '' where the layer has none
        ("addr", pa.uint64()),
        ("size_bytes", pa.int64()),  # what the layer takes; the same in the alloc and its free
        ("requested_bytes", pa.int64()),
        ("call_site", pa.int32()),  # frame id of the kernel function that called the allocator; 0 elsewhere
        ("kernel_stack", pa.int32()),  # stack ids; a free carries the stacks of its allocation
        ("user_stack", pa.int32()),
        ("python_stack", pa.int32()),
        ("weight", pa.int32()),  # allocations this row's stacks speak for: 1 own, N sampled 1/N, 0 not sampled
        ("call_id", pa.int64()),  # enclosing or own row of `calls`; 0 = none
        ("result", pa.int32()),  # 0; 1 in a free of only a part of a mapping, which lives on
        ("alloc_ts_ns", pa.int64()),  # for a free, the time of its allocation; 0 when it was never seen
        ("mark_id", pa.int64()),  # innermost range of `marks` open on the thread at the allocation; 0 = none, unknown
    ]
)

CALLS = pa.schema(
    [
        ("source_id", pa.int16()),
        ("id", pa.int64()),
        ("parent_id", pa.int64()),  # enclosing call of the same thread, 0 = outermost
        ("pid", pa.int32()),
        ("tid", pa.int32()),
        ("api", TEXT),
        ("enter_ns", pa.int64()),
        ("exit_ns", pa.int64()),
        ("result", pa.int32()),  # 0 = success; CUresult / cudaError_t / -errno otherwise
        ("context", pa.uint64()),  # CUcontext current on the thread, 0 = unknown
        ("addr", pa.uint64()),
        ("size_bytes", pa.int64()),
        ("user_stack", pa.int32()),
    ]
)

DEVICE_MAPS = pa.schema(
    [
        ("source_id", pa.int16()),
        ("ts_ns", pa.int64()),
        ("pid", pa.int32()),
        ("op", TEXT),  # map: cuMemMap; unmap: cuMemUnmap, of all mappings that begin in the range
        ("addr", pa.uint64()),
        ("size_bytes", pa.int64()),
        ("handle", pa.uint64()),  # of cuMemCreate: the `addr` of a mem_event of kind vmm; 0 in an unmap
    ]
)
STACKS = pa.schema([("id", pa.int32()), ("frames", pa.list_(pa.int32()))])  # outermost first
FRAMES = pa.schema(
    [
        ("id", pa.int32()),
        ("function", pa.string()),
        ("file", pa.string()),
        ("line", pa.int32()),
        ("module", pa.string()),
        ("build_id", pa.string()),
        # File offset in the module; address of kernel and JIT frames; 0 where inlined; Python: 1 = C code called it.
        ("offset", pa.uint64()),
        ("kind", TEXT),  # python, native, kernel; inlined into the native frame outside of it
    ]
)
SAMPLES = pa.schema(
    [
        ("source_id", pa.int16()),
        ("ts_ns", pa.int64()),
        ("scope", TEXT),  # words.SCOPES
        ("scope_id", TEXT),  # pid, cgroup path, GPU uuid or index, '' for the host
        ("counter", TEXT),  # rss, vss, pss, slab_<cache>, meminfo_<line>, gpu_used…
        ("value", pa.float64()),  # bytes unless the counter's name says otherwise
    ]
)
# A census recording has no mem_events. Each readout adds a row of what has changed since the one before: the state at
# a time is the last row up to it of each (site, cohort) in `census` and of each site in `census_totals`.
CENSUS_SITES = pa.schema(
    [
        ("source_id", pa.int16()),
        ("id", pa.int32()),  # from 1, unique in a source; the same identity may have several, their figures add up
        ("pid", pa.int32()),  # the process that owns the memory; -1: short-lived processes together
        ("layer", TEXT),
        ("kind", TEXT),
        ("api", TEXT),
        ("slab_cache", TEXT),
        ("size_bytes", pa.int64()),  # of each object; 0 where they differ
        ("call_site", pa.int32()),
        ("kernel_stack", pa.int32()),
        ("user_stack", pa.int32()),
        ("python_stack", pa.int32()),
        ("weight", pa.int32()),
        ("mark_id", pa.int64()),  # of its first allocation, as is the call
        ("call_id", pa.int64()),
        ("call_api", TEXT),  # kernel objects with stacks: outermost probed call around the allocation, '' = none
        ("call_stack", pa.int32()),  # and that call's user stack
    ]
)
CENSUS_TOTALS = pa.schema(
    [
        ("source_id", pa.int16()),
        ("ts_ns", pa.int64()),
        ("site", pa.int32()),
        ("allocated_objects", pa.int64()),  # all since the start of the recording, up to ts_ns
        ("allocated_bytes", pa.int64()),
        ("freed_objects", pa.int64()),  # cause call
        ("freed_bytes", pa.int64()),
        ("reused_objects", pa.int64()),
        ("reused_bytes", pa.int64()),
        ("context_objects", pa.int64()),
        ("context_bytes", pa.int64()),
        ("exit_objects", pa.int64()),  # causes exit and exec
        ("exit_bytes", pa.int64()),
        ("first_ns", pa.int64()),  # of its allocations
        ("last_ns", pa.int64()),
        ("smallest_bytes", pa.int64()),
        ("largest_bytes", pa.int64()),
    ]
)
CENSUS = pa.schema(
    [
        ("source_id", pa.int16()),
        ("ts_ns", pa.int64()),
        ("site", pa.int32()),
        ("cohort_ns", pa.int64()),  # allocated from this time on, up to the next cohort of the site
        ("objects", pa.int64()),  # live, 0: none is left, or they belong to an older cohort now
        ("bytes", pa.int64()),
    ]
)
LAUNCHES = pa.schema(
    [
        ("source_id", pa.int16()),
        ("id", pa.int64()),
        ("parent_id", pa.int64()),  # cuLaunchKernel inside cudaLaunchKernel: the outer launch; 0 = outermost
        ("ts_ns", pa.int64()),
        ("pid", pa.int32()),
        ("tid", pa.int32()),
        ("api", TEXT),
        ("function", pa.uint64()),  # CUfunction handle or host stub address
        ("grid", pa.list_(pa.int32())),
        ("block", pa.list_(pa.int32())),
        ("stream", pa.uint64()),
        ("result", pa.int32()),
        ("user_stack", pa.int32()),
        ("context", pa.uint64()),  # CUcontext current on the thread, 0 = unknown
        ("kernel", pa.string()),  # name of the kernel, '' where only its handle is known
        ("mark_id", pa.int64()),  # innermost range of `marks` open on the thread; 0 = none, unknown
    ]
)
LAUNCH_ARGUMENTS = pa.schema(
    [
        ("source_id", pa.int16()),
        ("launch_id", pa.int64()),
        ("ts_ns", pa.int64()),  # of the launch
        ("pid", pa.int32()),
        ("position", pa.int16()),  # of the parameter, from 0; -1: what of the launch's parameters was not read
        ("value", pa.uint64()),  # a pointer-sized argument: touches the live device range that it falls into
        (
            "approximate",
            pa.int8(),
        ),  # 1: the kernel's own parameter list was not to be had: a word that may be no argument
    ]
)
MARKS = pa.schema(
    [
        ("source_id", pa.int16()),
        ("id", pa.int64()),
        ("parent_id", pa.int64()),  # enclosing range of the same thread (recordings: of any domain); 0 = outermost
        ("pid", pa.int32()),
        ("tid", pa.int32()),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("domain", TEXT),
        ("name", pa.string()),
    ]
)
KERNEL_PROFILES = pa.schema(
    [
        ("source_id", pa.int16()),
        ("id", pa.int64()),  # from 1, in the order of the report: the order in which the kernels were launched
        ("pid", pa.int32()),  # of the PID namespace that the profiler ran in; 0 = the file does not say
        ("tid", pa.int32()),
        ("api_call_id", pa.int64()),  # CUDA API calls of the process up to the launch; 0 = the file does not say
        ("created_s", pa.int64()),  # when the result was complete: local wall-clock seconds written as if UTC; 0 = none
        ("device", pa.int32()),
        ("context", pa.int64()),  # the profiler's ids inside the process, no handles
        ("stream", pa.int64()),
        ("kernel", pa.string()),  # demangled name
        ("mangled", pa.string()),
        ("grid", pa.list_(pa.int32())),
        ("block", pa.list_(pa.int32())),
        ("ranges", pa.list_(pa.string())),  # NVTX ranges open at the launch, outermost first
        ("user_stack", pa.int32()),
        ("python_stack", pa.int32()),
        ("writable_bytes", pa.float64()),  # profiler__replayer_bytes_mem_accessible; NaN = the file does not say
    ]
)
KERNEL_METRICS = pa.schema(
    [
        ("source_id", pa.int16()),
        ("profile_id", pa.int64()),
        ("section", TEXT),
        ("metric", TEXT),
        ("unit", TEXT),
        ("value", pa.float64()),  # NaN where `text` says more: n/a is never 0
        ("text", pa.string()),
    ]
)
SEGMENTS = pa.schema(
    [
        ("source_id", pa.int16()),
        ("ts_ns", pa.int64()),  # of the snapshot, 0 = unknown
        ("pid", pa.int32()),
        ("device", pa.int32()),
        ("segment_addr", pa.uint64()),
        ("segment_bytes", pa.int64()),
        ("segment_type", TEXT),  # small, large, expandable…
        ("pool", TEXT),
        ("stream", pa.uint64()),
        ("addr", pa.uint64()),  # of a block of the segment
        ("size_bytes", pa.int64()),
        ("requested_bytes", pa.int64()),
        ("state", TEXT),  # active_allocated, active_awaiting_free, inactive
        ("user_stack", pa.int32()),
        ("python_stack", pa.int32()),
    ]
)
CACHE_EVENTS = pa.schema(
    [
        ("source_id", pa.int16()),
        ("ts_ns", pa.int64()),
        ("op", TEXT),  # words.CACHE_OPS
        ("object", pa.string()),  # '' in ops that speak of more than one object
        ("size_bytes", pa.int64()),  # 0 = not said
        ("owner", pa.string()),  # who inserts, pins, references or asks: component, request or session; '' = unknown
        ("hold", pa.int64()),  # which of the source's holds a pin, unpin, ref or unref takes or gives up; 0 = not said
        ("base", pa.string()),  # the object that a view keeps alive, '' = none
        ("parent", pa.string()),  # the block before this one in its prefix, '' = none
        ("medium", TEXT),  # where it lies: GPU, CPU, STORAGE, memory, redis…; '' = not said
        ("generation", pa.string()),  # of model and data that it was made from; '' = not said
        ("expires_ns", pa.int64()),  # when its TTL ends, on the clock of ts_ns; 0 = not said, words.NEVER = no TTL
        ("refcount", pa.float64()),  # references and pins after this event, as the source counts them; NaN = not said
        ("last_access_ns", pa.int64()),  # last use before this event, on the clock of ts_ns; 0 = not said
        ("user_stack", pa.int32()),  # of whoever took the hold or inserted; 0 = not said
    ]
)
PROCESSES = pa.schema(
    [
        ("source_id", pa.int16()),
        ("pid", pa.int32()),
        ("parent_pid", pa.int32()),
        ("namespace_pid", pa.int32()),
        ("start_ns", pa.int64()),
        ("exit_ns", pa.int64()),  # 0 = alive at the end
        ("name", pa.string()),
        ("role", TEXT),  # root: named by -p or the recorded command; child: followed; other
    ]
)
MODULES = pa.schema(
    [
        ("source_id", pa.int16()),
        ("pid", pa.int32()),
        ("ts_ns", pa.int64()),
        ("start", pa.uint64()),
        ("end", pa.uint64()),
        ("file_offset", pa.uint64()),
        ("path", pa.string()),
        ("build_id", pa.string()),
    ]
)
LOSSES = pa.schema(
    [
        ("source_id", pa.int16()),
        ("ts_ns", pa.int64()),
        ("probe", pa.string()),  # what lost it: a program, a ring, a sampler
        ("what", TEXT),  # words.LOSS_KINDS
        ("count", pa.int64()),
        ("detail", pa.string()),
    ]
)

TABLES: dict[str, pa.Schema] = {
    "mem_events": MEM_EVENTS,
    "calls": CALLS,
    "device_maps": DEVICE_MAPS,
    "stacks": STACKS,
    "frames": FRAMES,
    "samples": SAMPLES,
    "census": CENSUS,
    "census_sites": CENSUS_SITES,
    "census_totals": CENSUS_TOTALS,
    "launches": LAUNCHES,
    "launch_arguments": LAUNCH_ARGUMENTS,
    "marks": MARKS,
    "kernel_profiles": KERNEL_PROFILES,
    "kernel_metrics": KERNEL_METRICS,
    "segments": SEGMENTS,
    "cache_events": CACHE_EVENTS,
    "processes": PROCESSES,
    "modules": MODULES,
    "losses": LOSSES,
}
"""Every table of a capture by name."""

ROWS = {
    "mem_events": "one allocation, free or advice at one layer",
    "calls": "one call of a probed function or system call",
    "device_maps": "one mapping of physical device memory to addresses, or the end of some",
    "stacks": "one call stack, as ids of frames",
    "frames": "one frame of stacks",
    "samples": "one reading of a counter",
    "census": "a site's live memory of one age, as it was at a readout of a census",
    "census_sites": "a site of a census: who allocates",
    "census_totals": "all that a site of a census had allocated and freed by a readout",
    "launches": "one launch of a GPU kernel",
    "launch_arguments": "one pointer-sized argument of a launch",
    "marks": "one NVTX range or mark",
    "kernel_profiles": "one kernel that Nsight Compute profiled",
    "kernel_metrics": "one metric of such a kernel",
    "segments": "one block of a caching allocator's segment, in a snapshot",
    "cache_events": "one event in the life of a cache object",
    "processes": "one process",
    "modules": "one mapping of a file into a process",
    "losses": "one kind of evidence that is missing, and how much of it",
}
"""What a row of each table is."""

SCHEMA_VERSION = 1
MAX_PART_ROWS = 200_000
"""Rows a Parquet part may hold; larger parts stall the ring drain while they are compressed."""

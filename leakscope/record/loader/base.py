"""What a loader takes and gives."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Protocol

from leakscope.errors import NotCapableError
from leakscope.record.kernel.bpf import Map, possible_cpus
from leakscope.record.kernel.btf import KernelTypes
from leakscope.record.kernel.syscalls import number

SCOPE_HOST, SCOPE_PROCESSES, SCOPE_CGROUP = 0, 1, 2
STACK_POLICIES = {"none": 0, "sampled": 1, "all": 2}
MODES = {"stream": 0, "census": 1}
UNWIND_POLICIES = {"none": 0, "gpu": 1, "all": 2}
LIVE_WAYS = STACK_WAYS = 4
"""Slots of a bucket of live objects, and of one of known stacks (maps.h)."""
MIN_LIVE_BUCKETS = 64
"""A word of `spilled_from` is of so many."""


@dataclass
class ProgramConfig:
    """Constants compiled into the programs; each becomes ``CONFIG_<NAME>`` in the C source.

    Sizes of maps bound the recorder's own memory: a live entry takes about 100 bytes, a known stack 8.
    """

    scope: int = SCOPE_PROCESSES
    cgroup_id: int = 0
    cgroup_level: int = 0
    stacks: str = "sampled"
    unwind: str = "none"
    # Stacks that a site may take on a CPU: one each 2^20 ns (954/s) with bursts of 256; all sites together one each
    # 2^17 ns (7,629/s, some 5 % of a CPU) with bursts of 1,024; forks and processes in their first 100 ms an eighth of
    # it, with the same bursts. While that is used up each costs a site 32, those of the latter 128.
    site_stack_every_shift: int = 20
    site_stack_burst: int = 256
    cpu_stack_every_shift: int = 17
    cpu_stack_burst: int = 1024
    scarce_cost: int = 32
    sample_one_in: int = 64  # power of two
    mem_ring_bytes: int = 64 << 20
    call_ring_bytes: int = 8 << 20
    mark_ring_bytes: int = 4 << 20
    dump_ring_bytes: int = 16 << 20  # 1,000 stack dumps
    path_entries: int = 4096  # 2.7 KiB each
    live_entries: int = 1 << 20
    range_entries: int = 1 << 18
    stack_ring_bytes: int = 8 << 20
    known_stacks: int = 1 << 17  # whose numbers the probes know; 8 bytes each
    site_entries: int = 1 << 14
    launch_args: int = 0  # words of a launch's parameters that are read, at most 64; 0 = none
    launch_ring_bytes: int = 4096
    kernel_ring_bytes: int = 4096
    layout_entries: int = 64
    identity_entries: int = 1 << 15  # of a census; each takes 48 bytes a CPU
    mode: str = "stream"
    min_size: int = 0  # bytes: smaller kernel and heap objects are counted, not recorded
    sample_bytes: int = 0  # mean of the bytes between two samples, 0 = every allocation is recorded
    with_maps: bool = True
    with_functions: bool = False
    nvtx: bool = False

    def constants(self) -> dict[str, int]:
        """All CONFIG_* values, the kernel's offsets included. Raises NotCapableError where BTF is missing."""
        types = KernelTypes()
        live_buckets = max(MIN_LIVE_BUCKETS, 1 << (self.live_entries // LIVE_WAYS - 1).bit_length())
        stack_buckets = max(1, 1 << (self.known_stacks // STACK_WAYS - 1).bit_length())
        counter_bytes, counter_count = resident_counter(types)
        arguments = types.raw_tracepoint_arguments("kmem_cache_alloc")
        if arguments is None:
            raise NotCapableError(
                "the kernel has no raw tracepoint kmem_cache_alloc in its type information, so slab objects cannot be "
                "recorded; leakscope needs a kernel with BTF (CONFIG_DEBUG_INFO_BTF) and tracepoints"
            )
        return {
            "SELF_TGID": os.getpid(),
            "SCOPE": self.scope,
            "CGROUP_ID": self.cgroup_id,
            "CGROUP_LEVEL": self.cgroup_level,
            "STACKS": STACK_POLICIES[self.stacks],
            "SITE_STACK_EVERY_SHIFT": self.site_stack_every_shift,
            "SITE_STACK_BURST": self.site_stack_burst,
            "CPU_STACK_EVERY_SHIFT": self.cpu_stack_every_shift,
            "CPU_STACK_BURST": self.cpu_stack_burst,
            "SCARCE_COST": self.scarce_cost,
            "SAMPLE_ONE_IN": self.sample_one_in,
            "MEM_RING_BYTES": self.mem_ring_bytes,
            "CALL_RING_BYTES": self.call_ring_bytes,
            "MARK_RING_BYTES": self.mark_ring_bytes if self.nvtx else mmap.PAGESIZE,
            "DUMP_RING_BYTES": self.dump_ring_bytes if self.unwind != "none" else mmap.PAGESIZE,
            "PATH_ENTRIES": self.path_entries if self.unwind != "none" else 64,
            "LIVE_ENTRIES": live_buckets,
            "LIVE_BUCKETS": live_buckets,
            "SPILL_ENTRIES": self.live_entries // 4,
            "SPILLED_FROM_ENTRIES": live_buckets // 64,
            "RANGE_ENTRIES": self.range_entries,
            "STACK_RING_BYTES": self.stack_ring_bytes,
            "STACK_ENTRIES": stack_buckets,
            "STACK_BUCKETS": stack_buckets,
            "SITE_ENTRIES": self.site_entries,
            "SITE_NUMBERS": self.site_entries,
            "SITE_STATE_ENTRIES": self.site_entries * possible_cpus(),
            "IDENTITY_ENTRIES": self.identity_entries if self.mode == "census" else 1,
            "OUTERMOST_ENTRIES": 1 << 15 if self.mode == "census" else 1,
            "PROCESS_END_ENTRIES": 1 << 16 if self.mode == "census" else 64,
            "TARGET_ENTRIES": 1 if self.scope == SCOPE_HOST else 1 << 16,
            "MODE": MODES[self.mode],
            "MIN_SIZE": self.min_size,
            "SAMPLE_BYTES": self.sample_bytes,
            "PAGE_SIZE": mmap.PAGESIZE,
            "WITH_MAPS": int(self.with_maps),
            "WITH_FUNCTIONS": int(self.with_functions),
            "NVTX": int(self.nvtx),
            "SLAB_HAS_CACHE": int("kmem_cache" in arguments),
            "CACHE_NAME": types.member_offset("kmem_cache", "name") or 0,
            "CACHE_SIZE": types.member_offset("kmem_cache", "size") or 0,
            "CACHE_OBJECT_SIZE": types.member_offset("kmem_cache", "object_size") or 0,
            "TASK_PID": types.member_offset("task_struct", "pid") or 0,
            "EXIT_HAS_GROUP_DEAD": int(len(types.raw_tracepoint_arguments("sched_process_exit") or []) > 1),
            **{f"NR_{name.upper()}": number(name) for name in ("mmap", "munmap", "mremap", "brk", "madvise")},
            **{f"NR_{name.upper()}": number(name) for name in ("clone", "clone3", "fork", "vfork")},
            "TASK_MM": types.member_offset("task_struct", "mm") or 0,
            "MM_RSS": types.member_offset("mm_struct", "rss_stat") or 0,
            "COUNTER_BYTES": counter_bytes,
            "COUNTER_COUNT": counter_count,
            **{
                f"TASK_{name.upper()}": types.member_offset("task_struct", name) or 0
                for name in ("self_exec_id", "group_leader", "start_time")
            },
            "TASK_THREAD_PID": types.member_offset("task_struct", "thread_pid") or 0,
            "PID_LEVEL": types.member_offset("pid", "level") or 0,
            "LAUNCH_ARGS": self.launch_args,
            "LAUNCH_RING_BYTES": self.launch_ring_bytes,
            "KERNEL_RING_BYTES": self.kernel_ring_bytes,
            "LAYOUT_ENTRIES": self.layout_entries,
            "PID_NUMBERS": types.member_offset("pid", "numbers") or 0,
            "HAS_LOOP": int(types.function_id("bpf_loop") is not None),
            "UNWIND": UNWIND_POLICIES[self.unwind],
            "CPUS": possible_cpus(),
        }


def resident_counter(types: KernelTypes) -> tuple[int, int]:
    """(bytes of one counter of a resident set, offset of its pages in it).

    They are counters with a part a CPU since v6.2 (f1a7941243c1, "mm: convert mm's rss stats into percpu_counter"),
    before that an array of words in struct mm_rss_stat.
    """
    if types.member_offset("mm_rss_stat", "count") is not None:
        return 8, 0
    return types.struct_bytes("percpu_counter") or 0, types.member_offset("percpu_counter", "count") or 0


class LoadedPrograms(Protocol):
    """Programs and maps in the kernel."""

    name: str

    def program(self, function: str, kind: str) -> int:
        """Descriptor of a loaded program; `kind` is raw_tracepoint, tracepoint, uprobe (for uprobe_multi links) or
        uprobe_perf (for perf events). Raises NotCapableError if the kernel refuses it."""

    def map(self, name: str) -> Map:
        """A map by name."""

    def close(self) -> None:
        """Unload everything."""

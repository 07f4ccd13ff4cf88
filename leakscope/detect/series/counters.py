"""Counters by name: what their endings say, and which of them is what.

The names are those of recordings and of tables of counters (``rss``, ``gpu_reserved``, ``slab_<cache>``…). A counter
that no pattern here knows is judged all the same; its ending says whether it counts bytes, work or something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

PROCESS_START = "proc_start_s"

_NOT_BYTES = re.compile(
    r".*_(total|rate|ratio|count|processes|percent|perc|avg\d*|s|ms|us|ns|seconds|active|enabled|flag|injection|threshold)"
    r"|num_.*|threads|fds?|psi_.*|\w*_keys(_nottl|_expires)?|map_count|fd_count"
)
WORK = re.compile(r".*_total")
GAUGE = re.compile(
    r".*_(rate|ratio|processes|count)|num_.*|threads|.*(connections|clients|running|waiting|sessions|workers).*"
)

RECLAIMABLE_SLAB = re.compile(
    r"slab_(dentry|.*inode.*|radix_tree_node|xa_node|buffer_head|ext4_.*|xfs_.*|btrfs_.*|nfs_.*|fuse_.*|.*dquot.*)"
    r"|cgroup_slab_reclaimable|meminfo_sreclaimable|meminfo_kreclaimable"
)
PAGE_CACHE = re.compile(
    r"cgroup_file|rss_file|meminfo_(cached|buffers|active_file|inactive_file|mapped|dirty)|shared_clean"
)
PENDING = re.compile(
    r".*(pending_free|deferred|awaiting_free|rcu_pending|pending_rcu|lazy_free|vmap_lazy|quarantine).*"
)
SEND_QUEUE = re.compile(
    r".*(queue|backlog|outbuf|output_buffer|send_?buf|omem|mem_clients|unsent|unacked|inflight_send|outbound).*"
)
TEARDOWN = re.compile(
    r".*_(re_?init|destroy|teardown|re_?create|re_?load|recreation|reinitiali[sz]e|rebuild|shutdown)s?_total"
)
COLLECTIONS = re.compile(r"(.*_)?gc(_.*)?_total|.*collections?_total")
EVICTIONS = re.compile(r".*(evict|expire|purge|trim|flush).*_total")
CAPTURES = re.compile(r".*(capture|graph).*")
MODULES = re.compile(r".*(module|kernel_load|jit|compile|lazy).*")
DESCRIPTORS = re.compile(r"(num_)?fds?(_count)?|open_files(_count)?|fd_count|open_fds|slab_filp|num_open_.*")
KEYS_WITHOUT_TTL = re.compile(r"(?P<store>.*)_keys_no_?ttl")
PINNED_ENTRIES = re.compile(r"(?P<cache>.*cache.*|.*pool.*|.*kv.*)_(pinned|locked|held)")
TRACKED = re.compile(r"(?P<component>.+)_tracked")
DRIVER = re.compile(r"(?P<pool>.+)_driver")
STORE_BYTES = ("used_memory", "used", "memory")

HOST = frozenset({"rss", "rss_anon", "pss", "cgroup", "cgroup_anon", "vss", "heap_inuse", "anon_mmap", "map_count"})
HOST_TOTALS = ("rss_anon", "cgroup_anon", "pss", "rss")
"""What a process, or its group, holds in all, the narrowest first; and what goes with it."""


@dataclass(frozen=True)
class Counter:
    """One counter: readings in time order, missing ones left out. ``t_s`` is since time zero of its source."""

    name: str
    t_s: FloatArray
    value: FloatArray
    in_bytes: bool

    @property
    def shown(self) -> str:
        """The name with its unit, as in tables of counters."""
        return f"{self.name}_bytes" if self.in_bytes else self.name


def counts_bytes(name: str, declared: Iterable[str] | None) -> bool:
    """Whether a counter is in bytes: as its source says, else by its name."""
    if declared is not None:
        return name in set(declared)
    return not _NOT_BYTES.fullmatch(name)


def layer_of(name: str) -> str:
    """kernel, host or gpu, by the beginning of the name."""
    if name.startswith("gpu"):
        return "gpu"
    if re.match(r"slab_|meminfo_(?!anon|active_anon|inactive_anon)|num_memcg|cgroup_(slab|kernel|sock|percpu)", name):
        return "kernel"
    return "host"


def slab_cache_of(name: str) -> str:
    """``kmalloc-64`` of ``slab_kmalloc-64`` and of its randomised copies; '' for no slab counter."""
    if not name.startswith("slab_") or name.endswith("_num"):
        return ""
    return re.sub(r"^kmalloc-rnd-\d+-", "kmalloc-", name.removeprefix("slab_"))

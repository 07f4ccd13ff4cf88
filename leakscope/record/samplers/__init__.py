"""Samplers: periodic readings of counters, one module a source.

========== =============================== ==========================================================
module     source                          counters (bytes unless said otherwise)
========== =============================== ==========================================================
process    /proc/PID/status, smaps_rollup  rss, vss, rss_anon, rss_file, rss_shmem, swap, page_tables,
                                           pss, shared_clean; threads, fds (numbers); maps_* on request
cgroup     memory controller, v1 and v2    cgroup, cgroup_anon, cgroup_file, cgroup_kernel, cgroup_limit…
slabinfo   /proc/slabinfo                  slab_<cache>, slab_<cache>_num
meminfo    /proc/meminfo                   meminfo_<Line>
gpu        NVML                            gpu_used, gpu_total, gpu_process_used
========== =============================== ==========================================================

:class:`SamplerSet` reads them all and gives rows of the ``samples`` table.
"""

from leakscope.record.samplers.base import Reading, Sampler
from leakscope.record.samplers.cgroup import MemoryCgroup, MemoryHierarchy
from leakscope.record.samplers.sampler_set import SamplerSet

__all__ = ["MemoryCgroup", "MemoryHierarchy", "Reading", "Sampler", "SamplerSet"]

"""A capture as the demo's: three layers leak side by side with churn, and counters are read meanwhile."""

from __future__ import annotations

from pathlib import Path

from synthetic import PID, SyntheticCapture

SECONDS = 10
SERVE = ["py:main@/srv/app/service.py:12", "py:Service.request_handle@/srv/app/service.py:40"]
SESSION = "py:Service.session_open@/srv/app/service.py:51"
MAP = "py:Service.buffer_map@/srv/app/service.py:62"
BLOCK = "py:Service.kv_block@/srv/app/service.py:73"
STAGING = "py:Service.staging@/srv/app/service.py:84"
CULPRITS = ("Service.session_open (service.py:51)", "Service.buffer_map (service.py:62)",
            "Service.kv_block (service.py:73)")  # fmt: skip
FILP = {"layer": "kernel", "kind": "slab", "api": "kmem_cache_alloc", "cache": "filp"}
MMAP = {"layer": "host", "kind": "mmap_anon", "api": "mmap"}
DEVICE = {"layer": "gpu", "kind": "device", "api": "cudaMalloc"}
KERNEL_KEPT, HOST_KEPT, GPU_KEPT = 101 * 256, 37 * 4096, 53 * 65_536
CHURN_BYTES = 8192
FIRST_S, STEP_S = 0.542, 0.994
"""Counters are read while no churn is open: that is made each 49.7 ms for 30 ms."""


def three_leaks(path: Path, name: str = "") -> Path:
    """101 × 256 bytes of kernel memory, 37 × 4096 of host memory, 53 × 65,536 of device memory are kept; 200 × 8192 of
    host memory are given back. RSS rises by 1,000,000 bytes and VSS by what maps keep. ``name``: a frame more in every
    stack."""
    run = SyntheticCapture(SECONDS)
    run.process()
    within = [*SERVE, *([name] if name else [])]
    kernel = ["k:entry_SYSCALL_64", "k:__x64_sys_socketpair", "k:alloc_empty_file"]
    run.leak(101, 256, python=[*within, SESSION], kernel=kernel, **FILP)
    run.leak(37, 4096, python=[*within, MAP], **MMAP)
    for number in range(53):
        at = (number + 0.5) * SECONDS / 53
        call = run.call("cudaMalloc", at - 0.001, at + 0.001)
        run.alloc(at, 65_536, python=[*within, BLOCK], call_id=call, **DEVICE)
    run.churn(200, CHURN_BYTES, hold_s=0.03, python=[*within, STAGING], **MMAP)
    for step in range(10):
        at = FIRST_S + step * STEP_S
        run.sample(at, "rss", 5_000_000 + step * 1_000_000 / 9, "process", str(PID))
        run.sample(at, "vss", 90_000_000 + _maps_at(at), "process", str(PID))
    run.loss("on_kfree", "recursion_miss", 3)
    return run.write(path)


def _maps_at(at_s: float) -> int:
    """Bytes of the maps that are kept, at a time."""
    return sum((number + 0.5) * SECONDS / 37 <= at_s for number in range(37)) * 4096

"""Peaks of resident sets, between samples, against what the kernel says of itself."""

from __future__ import annotations

import sys
from mmap import PAGESIZE
from os import cpu_count
from pathlib import Path

import pytest
from recording import record

PEAK_MIB = 96
TARGET = f"""
import mmap, time
def touched(flags):
    memory = mmap.mmap(-1, {PEAK_MIB} << 20, flags)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    memory.close()
touched(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
touched(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
time.sleep(1.2)  # a sample after both are gone
print(open("/proc/self/status").read())
"""


@pytest.mark.bpf
def test_peaks_by_kind_are_seen_between_samples(bpf: str, tmp_path: Path) -> None:
    # given private and shared memory that is touched and gone before the next sample, one after the other
    recording = record(tmp_path / "x.lscope", [sys.executable, "-c", TARGET], "--interval", "1s")
    status = dict(line.split(":", 1) for line in recording.stdout.splitlines() if ":" in line)
    peak_bytes = int(status["VmHWM"].split()[0]) << 10
    peaks = dict(recording.rows("SELECT counter, max(value) FROM samples WHERE counter LIKE '%peak' GROUP BY 1"))
    # then each peak has the memory, both together what the kernel says that the process had at its highest
    assert peaks["rss_anon_peak"] >= PEAK_MIB << 20 and peaks["rss_shmem_peak"] >= (PEAK_MIB << 20) - behind_bytes()
    at_once = max(
        peaks["rss_anon_peak"] + peaks["rss_file_peak"],
        peaks["rss_anon_peak"] - (PEAK_MIB << 20) + peaks["rss_file_peak"] + peaks["rss_shmem_peak"],
    )
    assert abs(at_once - peak_bytes) <= 3 * behind_bytes()
    assert peaks["rss_file_peak"] < PEAK_MIB << 20


def behind_bytes() -> int:
    """What the CPUs may not have added to a counter yet (percpu_counter_batch, lib/percpu_counter.c)."""
    cpus = cpu_count() or 1
    return max(32, 2 * cpus) * cpus * PAGESIZE

"""Peaks of resident sets, as exact as /proc/PID/status, from what the probe of rss_stat leaves in a map."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import PAGESIZE

import numpy as np
import pyarrow as pa

from leakscope.model.tables import SAMPLES
from leakscope.record import records
from leakscope.record.kernel.bpf import Map

_MEMBERS = ("rss_file_peak", "rss_anon_peak", "swap_peak", "rss_shmem_peak")  # MM_FILEPAGES … MM_SHMEMPAGES


def rss_peaks(rss: Map, pids: Sequence[int], ts_ns: int, source_id: int) -> pa.Table:
    """`samples` rows: the highest resident-set figures of processes since the start, by kind, in bytes."""
    raw_keys, raw_values = rss.read_all()
    keys, values = raw_keys.view(np.uint32).reshape(-1), raw_values.view(records.RSS_PEAKS).reshape(-1)
    wanted = np.isin(keys, np.array(pids, np.uint32))
    rows = [
        {
            "source_id": source_id, "ts_ns": ts_ns, "scope": "process", "scope_id": str(pid),
            "counter": counter, "value": float(pages) * PAGESIZE,
        }
        for pid, peaks in zip(keys[wanted].tolist(), values["pages"][wanted].tolist(), strict=True)
        for counter, pages in zip(_MEMBERS, peaks, strict=True)
        if pages
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=SAMPLES)

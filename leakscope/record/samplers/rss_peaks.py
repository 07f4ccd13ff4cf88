"""Peaks of resident sets, exact, from what the rss_stat tracepoint leaves in a map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from leakscope.model.tables import SAMPLES
from leakscope.record import records
from leakscope.record.kernel.bpf import Map

_MEMBERS = ("rss_file_peak", "rss_anon_peak", "swap_peak", "rss_shmem_peak")  # MM_FILEPAGES … MM_SHMEMPAGES


def rss_peaks(rss: Map, pids: Sequence[int], ts_ns: int, source_id: int) -> pa.Table:
    """`samples` rows: the highest resident-set figures of processes since the start, by kind, in bytes."""
    raw_keys, raw_values = rss.read_all()
    keys, values = raw_keys.view(records.RSS_KEY).reshape(-1), raw_values.view(records.RSS_VALUE).reshape(-1)
    wanted = np.isin(keys["pid"], np.array(pids, np.uint32)) & (keys["member"] < len(_MEMBERS))
    rows = [
        {
            "source_id": source_id, "ts_ns": ts_ns, "scope": "process", "scope_id": str(key["pid"]),
            "counter": _MEMBERS[key["member"]], "value": float(value["peak_bytes"]),
        }
        for key, value in zip(keys[wanted], values[wanted], strict=True)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=SAMPLES)

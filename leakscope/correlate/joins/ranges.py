"""Rule 5, range: the NVTX range that was open on the thread. By id where events carry it, else by the thread's time."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.joins.timeline import Ints, thread_key
from nsight_parsers.intervals import innermost

NEVER = (1 << 62) - 1
MAX_DEPTH = 64


def open_ranges(marks: pd.DataFrame, thread: Ints, at_ns: Ints) -> Ints:
    """int64[n]: the id of the innermost range open on each thread at each time, 0 for none.

    ``marks``: id, pid, tid, start_ns, end_ns (0 = never closed). Domains are one stack here: the range that began last.
    """
    end = marks["end_ns"].to_numpy(np.int64)
    end = np.where(end == 0, NEVER, end)
    spans = (end > marks["start_ns"].to_numpy(np.int64)) & (marks["tid"] > 0).to_numpy()
    rows = np.flatnonzero(spans)
    own = thread_key(marks["pid"].to_numpy()[rows], marks["tid"].to_numpy()[rows])
    found = innermost(own, marks["start_ns"].to_numpy(np.int64)[rows], end[rows], thread, at_ns)
    ids = marks["id"].to_numpy(np.int64)[rows]
    return np.where(found >= 0, ids[np.maximum(found, 0)] if len(ids) else 0, 0)


def range_paths(marks: pd.DataFrame, ids: npt.NDArray[np.int64]) -> dict[int, tuple[str, ...]]:
    """id → names of the range and those around it, outermost first; a range directly in one of its own name once."""
    return {
        number: tuple(name for name, _ in groupby(name for _, name in path))
        for number, path in domain_paths(marks, ids).items()
    }


def domain_paths(marks: pd.DataFrame, ids: npt.NDArray[np.int64]) -> dict[int, tuple[tuple[str, str], ...]]:
    """id → (domain, name) of the range and those around it, outermost first."""
    index = marks.set_index("id")
    parent = index["parent_id"].to_dict()
    domain, name = index["domain"].astype(str).to_dict(), index["name"].astype(str).to_dict()
    paths: dict[int, tuple[tuple[str, str], ...]] = {}
    for number in {int(i) for i in ids} - {0}:
        path: list[tuple[str, str]] = []
        at = number
        while at in name and len(path) < MAX_DEPTH:
            path.append((domain[at], name[at]))
            at = int(parent[at])
        paths[number] = tuple(reversed(path))
    return paths

"""Ids of processes and threads in an export, and keys that are unique per process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def pids(global_id: Ints) -> Ints:
    """Process ids of ``globalTid`` or ``globalPid``: bits 24 to 47, as in NVIDIA's documented formula."""
    return (global_id >> 24) & 0xFFFFFF


def tids(global_id: Ints) -> Ints:
    """Thread ids of ``globalTid``: the lowest 24 bits."""
    return global_id & 0xFFFFFF


def correlation_key(pid: Ints, correlation_id: Ints) -> Ints:
    """One number for (process, correlation id): the id alone repeats between processes. 0 for no correlation."""
    key = (pid << 39) | (correlation_id & ((1 << 39) - 1))
    return np.where(correlation_id > 0, key, 0)


def rows_of_keys(keys: Ints, wanted: Ints) -> Ints:
    """For each of ``wanted`` the first row of ``keys`` that has it, -1 for none and for 0."""
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    at = np.searchsorted(sorted_keys, wanted)
    found = np.full(len(wanted), -1, np.int64)
    inside = at < len(sorted_keys)
    hit = np.flatnonzero(inside)
    hit = hit[(sorted_keys[at[hit]] == wanted[hit]) & (wanted[hit] != 0)]
    found[hit] = order[at[hit]]
    return found

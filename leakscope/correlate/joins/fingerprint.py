"""Rule 4, second form: the sequence of a thread's CUDA API calls as the fingerprint of a place in a run.

Asked where addresses, sizes and clocks do not decide, as in exports without memory events: which of several processes
a PID means, where on the recording's clock an export without a start lies, which thread of another PID namespace is
which. Only sequences that occur once on each side count, and only where they agree in time: all true pairs of one run
are the same distance apart. A program that always makes the same calls has no such sequence, and nothing is decided.

Nsight Compute stores how many API calls came before a launch, not which, so its kernels have no fingerprint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.joins.evidence import Evidence
from leakscope.correlate.joins.processes import Candidate
from leakscope.correlate.joins.timeline import Ints, combined

FINGERPRINT_CALLS = 8
AGREE_NS = 100_000
"""Sources stamp the begin of a call some microseconds apart; another run of the program drifts by more than this."""
MIN_PLACES = 3
"""Stretches of FINGERPRINT_CALLS calls in which pairs agree: one burst of calls may occur elsewhere too."""
_VERSION = re.compile(r"(_v\d+|_ptsz|_ptds)+$")


class ApiCalls(NamedTuple):
    """Outermost calls of a process, parallel int64 arrays: thread, begin, number of the function (api_numbers)."""

    thread: Ints
    at_ns: Ints
    api: Ints


class Agreed(NamedTuple):
    """Calls that two sides saw, a pair a row; empty where nothing is decided. ``apart_ns``: what to add to times of the
    right side. ``ambiguous``: calls of the right whose sequence occurs several times. ``rejected``: pairs of
    sequences that occur once on each side, but at another distance in time, or too few of them."""

    left: ApiCalls
    right: ApiCalls
    apart_ns: int
    ambiguous: int
    rejected: int


def same_calls(left: ApiCalls, right: ApiCalls) -> Agreed:
    """The calls that both sides saw. Functions that only one side traces are left out of the sequences."""
    both = np.intersect1d(left.api, right.api)
    left, right = (_rows(side, np.isin(side.api, both)) for side in (left, right))
    prints = [api_fingerprints(*side) for side in (left, right)]
    a, b = unique_on_both(*prints)
    shared = int(((prints[1] != 0) & np.isin(prints[1], prints[0])).sum())
    near = np.zeros(len(a), bool)
    median = 0
    if len(a):
        apart = left.at_ns[a] - right.at_ns[b]
        median = int(apart[0]) + int(np.median(apart - apart[0]))  # medians are floating point: keep the numbers small
        near = np.abs(apart - median) <= AGREE_NS
        places = len(np.unique(_position(right)[b[near]] // FINGERPRINT_CALLS))
        if places < MIN_PLACES or 2 * near.sum() <= len(near):
            near[:] = False
    return Agreed(_rows(left, a[near]), _rows(right, b[near]), median, shared - len(a), int((~near).sum()))


def same_threads(theirs: Ints, ours: Ints) -> dict[int, int]:
    """Thread of the one side → thread of the other, by what both did: ``theirs`` and ``ours`` are the threads of pairs.
    A thread with fewer than MIN_PLACES pairs, or with pairs of several threads, is left out."""
    if not len(theirs):
        return {}
    pairs, count = np.unique(np.stack([theirs, ours]), axis=1, return_counts=True)
    known: dict[int, int] = {}
    for mine, other, number in zip(*pairs.tolist(), count.tolist(), strict=True):
        if (pairs[0] == mine).sum() == 1 == (pairs[1] == other).sum() and number >= MIN_PLACES:
            known[mine] = other
    return known


def calls_of_life(recording: Evidence, life: Candidate) -> ApiCalls:
    """Calls and launches of a process of a recording."""
    sides = [
        _api_calls(table, time, life.pid, life.start_ns, life.end_ns)
        for table, time in ((recording.table("calls"), "enter_ns"), (recording.table("launches"), "ts_ns"))
    ]
    return ApiCalls(*(np.concatenate(columns) for columns in zip(*sides, strict=True)))


def calls_of_report(report: Evidence, pid: int) -> ApiCalls:
    """Calls of a process of a report, launches among them."""
    return _api_calls(report.table("calls"), "enter_ns", pid)


def _api_calls(table: pd.DataFrame, time: str, pid: int, *span: int) -> ApiCalls:
    at = table[time].to_numpy(np.int64)
    chosen = ((table["pid"] == pid) & (table["parent_id"] == 0)).to_numpy()
    if span:
        chosen = chosen & (at >= span[0]) & (at <= span[1])
    own = table[chosen]
    names, code = np.unique(own["api"].to_numpy(str), return_inverse=True)
    return ApiCalls(own["tid"].to_numpy(np.int64), at[chosen], api_numbers(names.tolist())[np.ravel(code)])


def plain_api(name: str) -> str:
    """The API's name without version and per-thread suffixes: ``cuMemAlloc_v2`` → ``cuMemAlloc``."""
    return _VERSION.sub("", name)


def api_fingerprints(thread: Ints, at_ns: Ints, api: npt.NDArray[np.int64], calls: int = FINGERPRINT_CALLS) -> Ints:
    """int64[n]: a hash of the last ``calls`` API calls of the thread up to and with each; 0 for the first ones.

    ``api`` must be numbers that mean the same on both sides (:func:`api_numbers`).
    """
    order = np.lexsort((at_ns, thread))
    sorted_api, sorted_thread = api[order], thread[order]
    count = len(order)
    result = np.zeros(count, np.int64)
    if count < calls:
        return result
    last = np.arange(calls - 1, count)
    value = combined(*(sorted_api[last - back] for back in range(calls)))
    whole = sorted_thread[last - (calls - 1)] == sorted_thread[last]
    result[order[last]] = np.where(whole, np.where(value == 0, 1, value), 0)
    return result


def api_numbers(names: Sequence[str]) -> Ints:
    """int64[n]: 63 bits of each name, without its version suffix."""
    return np.array(
        [int.from_bytes(hashlib.blake2b(plain_api(n).encode(), digest_size=8).digest(), "little") >> 1 for n in names],
        np.int64,
    )


def unique_on_both(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Pairs of rows whose fingerprint occurs once on each side."""
    sides = []
    for values in (left, right):
        unique, first, count = np.unique(values, return_index=True, return_counts=True)
        keep = (count == 1) & (unique != 0)
        sides.append((unique[keep], first[keep]))
    _, a, b = np.intersect1d(sides[0][0], sides[1][0], assume_unique=True, return_indices=True)
    return sides[0][1][a].astype(np.int64), sides[1][1][b].astype(np.int64)


def _rows(calls: ApiCalls, chosen: npt.NDArray[Any]) -> ApiCalls:
    return ApiCalls(*(column[chosen] for column in calls))


def _position(calls: ApiCalls) -> Ints:
    """int64[n]: the place of each call in the order of thread and time."""
    order = np.lexsort((calls.at_ns, calls.thread))
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    return position

"""Kernel allocations and CUDA calls: nested where they are, near where they are not.

Batches of kernel events run through the same searches: calls of the recording, calls of reports on its clock, then the
windows. Each event gets one call at most, by the strongest rule that has one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.joins.evidence import Batch
from leakscope.correlate.joins.nesting import CallIndex, Intervals, depths
from leakscope.correlate.joins.timeline import Ints, thread_key
from leakscope.correlate.joins.window import NearIndex


class CallTable(NamedTuple):
    """Calls (or launches, where start and end are one) on the recording's clock, parallel; tid -1 where unknown."""

    name: str  # of the source
    pid: Ints
    tid: Ints
    start_ns: Ints
    end_ns: Ints
    api: Ints  # number of the function
    own: bool  # of the recording itself


class Rule(NamedTuple):
    """One step: ``kind`` nesting or window, the calls, and how far a window reaches."""

    kind: str
    calls: CallTable
    window_ns: int = 0


@dataclass
class Counted:
    """What a rule did: events by (group, function), and those with several calls in the window."""

    rule: Rule
    matched: int = 0
    ambiguous: int = 0
    by_group: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, group: Ints, api: Ints) -> None:
        """Count pairs of events and functions."""
        self.matched += len(group)
        keys, counts = np.unique(np.stack([group, api]), axis=1, return_counts=True)
        for (g, a), count in zip(keys.T.tolist(), counts.tolist(), strict=True):
            self.by_group[g, a] = self.by_group.get((g, a), 0) + count

    def table(self) -> pd.DataFrame:
        """group, api, count."""
        rows = [(g, a, n) for (g, a), n in sorted(self.by_group.items())]
        return pd.DataFrame(rows, columns=["group", "api", "count"], dtype="int64")


class KernelJoin:
    """Applies rules, strongest first, to batches of kernel events; :attr:`counted` tells the outcome."""

    def __init__(self, rules: list[Rule]) -> None:
        self.counted = [Counted(rule) for rule in rules]
        self.events = 0
        self._indexes = [_index(rule) for rule in rules]

    def add(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Join a batch; int64[n]: the number of the rule that matched each event, -1 for none."""
        by_rule = np.full(len(batch.ts_ns), -1, np.int64)
        self.events += len(batch.ts_ns)
        left = np.arange(len(batch.ts_ns))
        thread = thread_key(batch.pid, batch.tid)
        for number, counted in enumerate(self.counted):
            rule, (index, rows) = counted.rule, self._indexes[number]
            if isinstance(index, CallIndex):
                found = index.innermost(thread[left], batch.ts_ns[left])
                hit = found >= 0
                done = hit
            else:
                near = index.near(batch.pid[left], batch.ts_ns[left], rule.window_ns)
                found, hit = near.row, near.candidates == 1
                several = near.candidates > 1
                counted.ambiguous += int(several.sum())
                done = hit | several  # a wider window would not make it less ambiguous
            if hit.any():
                counted.add(batch.group[left[hit]], rule.calls.api[rows[found[hit]]])
                by_rule[left[hit]] = number
            left = left[~done]
        return by_rule


def _index(rule: Rule) -> tuple[CallIndex | NearIndex, Ints]:
    """(what to search, the rows of the rule's table that its answers mean)."""
    calls = rule.calls
    rows = np.flatnonzero((calls.tid >= 0) & (calls.pid >= 0))
    by_thread = Intervals(thread_key(calls.pid[rows], calls.tid[rows]), calls.start_ns[rows], calls.end_ns[rows])
    if rule.kind == "nesting":
        return CallIndex(by_thread), rows
    unknown = np.flatnonzero((calls.tid < 0) & (calls.pid >= 0))
    rows = np.concatenate([rows[depths(by_thread) == 0], unknown])  # a call and those inside it are one candidate
    return NearIndex(Intervals(calls.pid[rows], calls.start_ns[rows], calls.end_ns[rows])), rows

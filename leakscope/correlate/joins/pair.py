"""Two sources, a recording and a report: whose process is whose, what both saw, how well their clocks agree."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.joins.clocks import Alignment, align, measured
from leakscope.correlate.joins.evidence import Evidence
from leakscope.correlate.joins.identity import TOLERANCE_NS, Allocations, same_allocations, seen_once_each
from leakscope.correlate.joins.processes import Candidate, candidates
from leakscope.correlate.joins.stack import api_numbers
from leakscope.correlate.joins.timeline import Ints, combined, thread_key
from leakscope.model.results import JoinOutcome


@dataclass
class Joint:
    """What is known of a pair of sources. ``lives``: PID of the report → life in the recording (0: it names none)."""

    recording: Evidence
    report: Evidence
    alignment: Alignment = field(default_factory=Alignment)
    lives: dict[int, Candidate] = field(default_factory=dict)
    refused_pids: dict[int, str] = field(default_factory=dict)
    pairs: tuple[Ints, Ints] = field(default_factory=lambda: (np.empty(0, np.int64), np.empty(0, np.int64)))
    """Rows of the allocations of both that are one."""
    outcomes: list[JoinOutcome] = field(default_factory=list)

    def on_recordings_clock(self, at_ns: npt.NDArray[np.int64]) -> Ints:
        """Times of the report as times of the recording."""
        return at_ns + self.alignment.offset_ns

    def mapped(self, rows: pd.DataFrame) -> tuple[Ints, Ints]:
        """(pid, tid) of rows of the report as the recording numbers them; tid -1 where it cannot be known: threads of
        another PID namespace but for the main one."""
        pid, tid = rows["pid"].to_numpy(np.int64), rows["tid"].to_numpy(np.int64).copy()
        own = np.full(len(pid), -1, np.int64)
        for number, life in self.lives.items():
            here = pid == number
            own[here] = life.pid
            if not life.same_namespace:
                tid[here] = np.where(tid[here] == number, life.pid, -1)
        tid[own < 0] = -1
        return own, tid


def owned(report: Evidence) -> pd.DataFrame:
    """The allocations of a report that are the driver's memory: not the blocks that a pool hands out again."""
    table = report.table("allocations")
    return table[table["kind"] != "pool_block"].reset_index(drop=True)


def join_pair(recording: Evidence, report: Evidence) -> Joint:
    """Find processes, clock and common allocations of a recording and a report."""
    joint = Joint(recording, report, align(recording.source, report.source))
    _find_lives(joint)
    ours, theirs = recording.table("allocations"), owned(report)
    if len(theirs) and len(ours):
        _join_allocations(joint, ours, theirs)
    if not joint.alignment.seen_twice or joint.alignment.refined:
        _measure_by_calls(joint)
    return joint


def _find_lives(joint: Joint) -> None:
    """The lives that the report's PIDs mean; several for a PID are told apart by the allocations that both saw."""
    ours, theirs = joint.recording.table("allocations"), owned(joint.report)
    known = joint.alignment.error_ns if not joint.alignment.refused else None
    for pid, (first, last) in _spans(joint.report).items():
        bounds: tuple[int | None, int | None] = (None, None)
        if known is not None and last:
            slack = known + TOLERANCE_NS
            bounds = (first + joint.alignment.offset_ns - slack, last + joint.alignment.offset_ns + slack)
        processes = joint.recording.table("processes")
        if pid:
            found = candidates(processes, pid, *bounds)
        else:  # the report does not say whose it is
            found = [life for own in sorted(ours["pid"].unique()) for life in candidates(processes, int(own), *bounds)]
        if not found:
            joint.refused_pids[pid] = f"no process of the recording has PID {pid}" if pid else "no process allocates"
            continue
        if len(found) > 1 or not pid:
            own = _columns(theirs[theirs["pid"] == pid], 0)
            scores = [len(seen_once_each(_columns(_of_life(ours, life), 0), own)[0]) for life in found]
            best = int(np.argmax(scores))
            if not scores[best] or scores.count(scores[best]) > 1:
                why = "several lives" if pid else "several processes"
                joint.refused_pids[pid] = f"PID {pid or 'unknown'} may be {why} of the recording ({len(found)})"
                continue
            found = [found[best]]
        joint.lives[pid] = found[0]


def _spans(report: Evidence) -> dict[int, tuple[int, int]]:
    """PID → first and last time of its rows in the report; those of profiles have none (0)."""
    spans: dict[int, tuple[int, int]] = {}
    columns = {"allocations": "ts_ns", "calls": "enter_ns", "launches": "ts_ns", "marks": "start_ns"}
    for name, column in columns.items():
        for pid, first, last in (
            report.table(name).groupby("pid")[column].agg(["min", "max"]).reset_index().itertuples(index=False)
        ):
            before = spans.get(int(pid), (int(first), int(last)))
            spans[int(pid)] = min(before[0], int(first)), max(before[1], int(last))
    for name in ("kernel_profiles", "segments"):
        for pid in report.table(name)["pid"].unique():
            spans.setdefault(int(pid), (0, 0))
    return spans


def _of_life(rows: pd.DataFrame, life: Candidate) -> pd.DataFrame:
    return rows[(rows["pid"] == life.pid) & (rows["ts_ns"] >= life.start_ns) & (rows["ts_ns"] <= life.end_ns)]


def _columns(rows: pd.DataFrame, process: int | Ints, offset_ns: int = 0) -> Allocations:
    return Allocations(
        np.full(len(rows), process) if isinstance(process, int) else process,
        rows["addr"].to_numpy(np.uint64),
        rows["size_bytes"].to_numpy(np.int64),
        rows["ts_ns"].to_numpy(np.int64) + offset_ns,
    )


def _join_allocations(joint: Joint, ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    pid, _ = joint.mapped(theirs)
    usable = np.flatnonzero(pid >= 0)
    left = _columns(ours, ours["pid"].to_numpy(np.int64))._replace(begin_ns=_begins(joint.recording, ours))
    right = _columns(theirs.iloc[usable], pid[usable])
    once = seen_once_each(left, right)
    joint.alignment = measured(joint.alignment, left.at_ns[once[0]], right.at_ns[once[1]])
    reasons = [f"{why}: {(theirs['pid'] == number).sum():,}" for number, why in joint.refused_pids.items()]
    if joint.alignment.refused:
        why = f"clocks cannot be aligned: {joint.alignment.refused}"
        joint.outcomes.append(_outcome(joint, "identity", len(theirs), 0, 0, [*reasons, why]))
        return
    tolerance = TOLERANCE_NS + (joint.alignment.error_ns or 0)
    moved = right._replace(at_ns=joint.on_recordings_clock(right.at_ns))
    same = same_allocations(left, moved, tolerance)
    joint.pairs = same.left, usable[same.right]
    alone = len(usable) - len(same.left) - same.ambiguous
    if alone:
        reasons.append(f"the recording has no such allocation: {alone:,}")
    joint.outcomes.append(_outcome(joint, "identity", len(theirs), len(same.left), same.ambiguous, reasons))
    if len(same.left) and not joint.alignment.seen_twice:
        joint.alignment = measured(joint.alignment, left.at_ns[same.left], right.at_ns[same.right])


def _begins(recording: Evidence, rows: pd.DataFrame) -> Ints:
    """int64[n]: when the call of each allocation began; the time of the allocation where no call is known."""
    calls = recording.table("calls").drop_duplicates("id").set_index("id")["enter_ns"]
    at = rows["ts_ns"].to_numpy(np.int64)
    begin = calls.reindex(rows["call_id"], fill_value=0).to_numpy(np.int64)
    return np.where((begin > 0) & (begin < at), begin, at)


def _outcome(joint: Joint, rule: str, rows: int, matched: int, ambiguous: int, reasons: list[str]) -> JoinOutcome:
    return JoinOutcome(
        rule, f"allocations of {joint.report.name}", f"allocations of {joint.recording.name}",
        matched, ambiguous, rows - matched - ambiguous, tuple(reasons), 1.0 if matched else None,
    )  # fmt: skip


def call_key(rows: pd.DataFrame, pid: Ints, tid: Ints) -> Ints:
    """One number for (thread, function) of calls."""
    names, code = np.unique(rows["api"].to_numpy(str), return_inverse=True)
    return combined(thread_key(pid, tid), api_numbers(names.tolist())[np.ravel(code)])


def _measure_by_calls(joint: Joint) -> None:
    """The residual over API calls that both saw: the same function on the same thread.

    Asked where no allocation was seen by both, and where allocations gave the offset: a recording stamps them at the
    end of their call and a report inside it, calls by their start.
    """
    ours, theirs = joint.recording.table("calls"), joint.report.table("calls")
    if not len(ours) or not len(theirs) or joint.alignment.refused or joint.alignment.error_ns is None:
        return
    pid, tid = joint.mapped(theirs)
    known = np.flatnonzero(tid >= 0)
    keys = (
        call_key(ours, ours["pid"].to_numpy(np.int64), ours["tid"].to_numpy(np.int64)),
        call_key(theirs.iloc[known], pid[known], tid[known]),
    )
    times = ours["enter_ns"].to_numpy(np.int64), theirs["enter_ns"].to_numpy(np.int64)[known]
    blank = np.zeros(len(ours), np.uint64), np.zeros(len(known), np.uint64)
    sides = [
        Allocations(key, none, none.astype(np.int64), at) for key, none, at in zip(keys, blank, times, strict=True)
    ]
    moved = sides[1]._replace(at_ns=joint.on_recordings_clock(times[1]))
    same = same_allocations(sides[0], moved, TOLERANCE_NS + joint.alignment.error_ns)
    joint.outcomes.append(
        JoinOutcome(
            "identity", f"calls of {joint.report.name}", f"calls of {joint.recording.name}", len(same.left),
            same.ambiguous, len(theirs) - len(same.left) - same.ambiguous,
        )
    )  # fmt: skip
    joint.alignment = measured(joint.alignment, times[0][same.left], times[1][same.right])

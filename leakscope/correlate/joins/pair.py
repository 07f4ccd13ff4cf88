"""Two sources, a recording and a report: whose process is whose, what both saw, how well their clocks agree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from leakscope.correlate.joins.clocks import align, measured
from leakscope.correlate.joins.evidence import Evidence
from leakscope.correlate.joins.fingerprint import (
    AGREE_NS,
    FINGERPRINT_CALLS,
    api_numbers,
    calls_of_life,
    calls_of_report,
    same_calls,
    same_threads,
)
from leakscope.correlate.joins.identity import TOLERANCE_NS, Allocations, same_allocations, seen_once_each
from leakscope.correlate.joins.joint import Joint, Sequences, columns, owned
from leakscope.correlate.joins.lives import find_lives
from leakscope.correlate.joins.timeline import Ints, combined, thread_key
from leakscope.model.results import JoinOutcome


def join_pair(recording: Evidence, report: Evidence) -> Joint:
    """Find processes, clock and common allocations of a recording and a report."""
    joint = Joint(recording, report, align(recording.source, report.source))
    find_lives(joint)
    ours, theirs = recording.table("allocations"), owned(report)
    if len(theirs) and len(ours):
        sides = _sides(joint, ours, theirs)
        once = seen_once_each(sides.left, sides.right)
        joint.alignment = measured(joint.alignment, sides.left.at_ns[once[0]], sides.right.at_ns[once[1]])
        _place_by_sequence(joint)
        _join_allocations(joint, theirs, sides)
    else:
        _place_by_sequence(joint)
    _find_threads(joint, ours, theirs)
    if not joint.alignment.seen_twice or joint.alignment.refined:
        _measure_by_calls(joint)
    joint.outcomes += [_of_sequences(joint, asked) for _, asked in sorted(joint.sequences.items())]
    if not joint.outcomes and len(calls := report.table("calls")):
        reasons = tuple(joint.refused_pids.values())
        joint.outcomes.append(
            JoinOutcome("identity", f"calls of {report.name}", f"calls of {recording.name}", 0, 0, len(calls), reasons)
        )
    return joint


class _Sides(NamedTuple):
    """Allocations of both, each on its own clock; ``usable``: rows of the report whose process is known."""

    left: Allocations
    right: Allocations
    usable: Ints


def _sides(joint: Joint, ours: pd.DataFrame, theirs: pd.DataFrame) -> _Sides:
    pid, _ = joint.mapped(theirs)
    usable = np.flatnonzero(pid >= 0)
    left = columns(ours, ours["pid"].to_numpy(np.int64))._replace(begin_ns=_begins(joint.recording, ours))
    return _Sides(left, columns(theirs.iloc[usable], pid[usable]), usable)


def _join_allocations(joint: Joint, theirs: pd.DataFrame, sides: _Sides) -> None:
    left, right, usable = sides
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


def _sequences(joint: Joint, pid: int) -> Sequences:
    """What both saw of the API calls of a PID whose process is known, compared once."""
    asked = joint.sequences.get(pid)
    if asked is None or asked.agreed is None:
        calls = calls_of_report(joint.report, pid)
        asked = joint.sequences.setdefault(pid, Sequences(len(calls.at_ns)))
        asked.agreed = same_calls(calls_of_life(joint.recording, joint.lives[pid]), calls)
    return asked


def _place_by_sequence(joint: Joint) -> None:
    """The clock by API calls, where neither the sources nor allocations gave it."""
    if not joint.unplaced:
        return
    for pid in _with_calls(joint):
        asked = _sequences(joint, pid)
        assert asked.agreed is not None
        left, right, *_ = asked.agreed
        if len(left.at_ns):
            joint.alignment = measured(joint.alignment, left.at_ns, right.at_ns)
            asked.told.append("where the report lies on the recording's clock")
            return
        asked.refused.append("where the report lies on the recording's clock")


def _find_threads(joint: Joint, ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    """Threads of other PID namespaces: by allocations that both saw, else by the sequence of their calls."""
    for pid, life in joint.lives.items():
        if life.same_namespace:
            continue
        left, right = joint.pairs
        tids = theirs["tid"].to_numpy(np.int64)[right], ours["tid"].to_numpy(np.int64)[left]
        chosen = (theirs["pid"].to_numpy()[right] == pid) & (tids[0] > 0) & (tids[1] > 0)
        joint.threads[pid] = same_threads(tids[0][chosen], tids[1][chosen])
        foreign = calls_of_report(joint.report, pid).thread
        unknown = np.setdiff1d(foreign[foreign > 0], [pid, *joint.threads[pid]])
        if len(unknown):
            _threads_by_sequence(joint, pid, unknown)


def _threads_by_sequence(joint: Joint, pid: int, unknown: Ints) -> None:
    asked = _sequences(joint, pid)
    assert asked.agreed is not None
    left, right, apart, *_ = asked.agreed
    what = f"which thread of the recording {len(unknown):,} of another PID namespace are"
    aligned = not joint.alignment.refused and joint.alignment.error_ns is not None
    off = abs(apart - joint.alignment.offset_ns) > (joint.alignment.error_ns or 0) + AGREE_NS
    if not len(left.at_ns) or (aligned and off):
        asked.refused.append(what)
        return
    known = same_threads(right.thread, left.thread)
    known = {foreign: own for foreign, own in known.items() if foreign in unknown}
    joint.threads[pid] |= known
    asked.told += [f"which thread {len(known):,} of another PID namespace are"] if known else []
    asked.refused += [what] if not known else []


def _with_calls(joint: Joint) -> list[int]:
    """PIDs of the report with a known process, those with most calls first."""
    count = joint.report.table("calls")["pid"].value_counts()
    return [int(pid) for pid in count.index if int(pid) in joint.lives]


def _of_sequences(joint: Joint, asked: Sequences) -> JoinOutcome:
    agreed = asked.agreed
    matched = len(agreed.left.at_ns) if agreed else 0
    ambiguous = agreed.ambiguous if agreed else 0
    reasons = [f"the order of API calls, {FINGERPRINT_CALLS} of a thread, tells {what}" for what in asked.told]
    reasons += [f"the order of API calls does not tell {what}" for what in asked.refused]
    if agreed and agreed.rejected:
        reasons.append(
            f"sequences that occur once on each side, but too few of them at one distance in time: {agreed.rejected:,}"
        )
    sure = matched / (matched + agreed.rejected) if agreed and matched else None
    return JoinOutcome(
        "stack", f"calls of {joint.report.name}", f"calls of {joint.recording.name}", matched, ambiguous,
        asked.calls - matched - ambiguous, tuple(reasons), sure,
    )  # fmt: skip


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

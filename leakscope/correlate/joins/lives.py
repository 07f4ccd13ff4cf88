"""Which process of a recording each PID of a report means: by PID and time, else by what both saw."""

from __future__ import annotations

import numpy as np

from leakscope.correlate.joins.evidence import Evidence
from leakscope.correlate.joins.fingerprint import Agreed, calls_of_life, calls_of_report, same_calls
from leakscope.correlate.joins.identity import TOLERANCE_NS, seen_once_each
from leakscope.correlate.joins.joint import Joint, Sequences, columns, of_life
from leakscope.correlate.joins.processes import Candidate, candidates
from leakscope.correlate.joins.segments import driver_memory


def find_lives(joint: Joint) -> None:
    """The lives that the report's PIDs mean; several for a PID are told apart by the allocations that both saw, else
    by the order of their API calls."""
    ours = joint.recording.table("allocations")
    processes = joint.recording.table("processes")
    known = joint.alignment.error_ns if not joint.alignment.refused else None
    for pid, (first, last) in _spans(joint.report).items():
        bounds: tuple[int | None, int | None] = (None, None)
        if known is not None and last:
            slack = known + TOLERANCE_NS
            bounds = (first + joint.alignment.offset_ns - slack, last + joint.alignment.offset_ns + slack)
        if pid:
            found = candidates(processes, pid, *bounds)
        else:  # the report does not say whose it is
            found = [life for own in sorted(ours["pid"].unique()) for life in candidates(processes, int(own), *bounds)]
        if not found:
            joint.refused_pids[pid] = f"no process of the recording has PID {pid}" if pid else "no process allocates"
            continue
        if len(found) > 1 or not pid:
            chosen = _by_allocations(joint, found, pid) or _by_sequence(joint, found, pid)
            if chosen is None:
                joint.refused_pids[pid] = (
                    f"PID {pid} may be several processes of the recording ({len(found):,})"
                    if pid
                    else f"it names no process and shares no memory with exactly one of the recording ({len(found):,})"
                )
                continue
            found = [chosen]
        joint.lives[pid] = found[0]


def _by_allocations(joint: Joint, found: list[Candidate], pid: int) -> Candidate | None:
    """The one life with most allocations that the report saw, too; None where none has any or several have as many."""
    theirs = driver_memory(joint.report)
    own = columns(theirs[theirs["pid"] == pid], 0)
    ours = joint.recording.table("allocations")
    scores = [len(seen_once_each(columns(of_life(ours, life), 0), own)[0]) for life in found]
    best = int(np.argmax(scores))
    return found[best] if scores[best] and scores.count(scores[best]) == 1 else None


def _by_sequence(joint: Joint, found: list[Candidate], pid: int) -> Candidate | None:
    """The one life whose API calls have the sequence of the report's."""
    calls = calls_of_report(joint.report, pid)
    if not len(calls.at_ns):
        return None
    fitting: list[tuple[Candidate, Agreed]] = []
    for life in found:
        agreed = same_calls(calls_of_life(joint.recording, life), calls)
        if len(agreed.left.at_ns):
            fitting.append((life, agreed))
    asked = joint.sequences.setdefault(pid, Sequences(len(calls.at_ns)))
    if len(fitting) == 1:
        asked.agreed = fitting[0][1]
        asked.told.append(f"which of {len(found)} processes PID {pid} is")
        return fitting[0][0]
    asked.refused.append(f"which of {len(found)} processes PID {pid} is: {len(fitting) or 'none'} of them fit")
    return None


def _spans(report: Evidence) -> dict[int, tuple[int, int]]:
    """PID → first and last time of its rows in the report; those of profiles have none (0)."""
    spans: dict[int, tuple[int, int]] = {}
    times = {"allocations": "ts_ns", "calls": "enter_ns", "launches": "ts_ns", "marks": "start_ns"}
    for name, column in times.items():
        for pid, first, last in (
            report.table(name).groupby("pid")[column].agg(["min", "max"]).reset_index().itertuples(index=False)
        ):
            before = spans.get(int(pid), (int(first), int(last)))
            spans[int(pid)] = min(before[0], int(first)), max(before[1], int(last))
    for name in ("kernel_profiles", "segments"):
        for pid in report.table(name)["pid"].unique():
            spans.setdefault(int(pid), (0, 0))
    return spans

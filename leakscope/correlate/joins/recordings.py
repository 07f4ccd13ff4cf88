"""Several recordings: which of them a report is about, and what they have to do with each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from leakscope.correlate.joins.evidence import Evidence
from leakscope.correlate.joins.fingerprint import AGREE_NS
from leakscope.correlate.joins.joint import Joint
from leakscope.correlate.joins.pair import join_pair
from leakscope.correlate.joins.profiles import join_profiles
from leakscope.model.results import JoinOutcome

CLEARLY_MORE = 2
"""A report is of the recording that it shares this many times as much with as with any other."""


class Chosen(NamedTuple):
    """``recording``: number of the one that the report is joined to, and how. Without one, ``refused`` says why."""

    recording: int
    joint: Joint | None
    refused: JoinOutcome | None = None


def choose(recordings: Sequence[Evidence], report: Evidence) -> Chosen:
    """The recording that a report is about: by allocations, launches and calls that both saw, else by its processes."""
    tried = [join_pair(recording, report) for recording in recordings]
    if len(tried) == 1:
        return Chosen(0, tried[0])
    shared = [_shared(joint) for joint in tried]
    first, second = sorted(range(len(tried)), key=lambda i: -shared[i])[:2]
    if shared[first] and shared[first] >= CLEARLY_MORE * shared[second]:
        return Chosen(first, tried[first])
    if shared[first] and _same_run(recordings[first], recordings[second]):
        return Chosen(min(first, second), tried[min(first, second)])
    fitting = [i for i, joint in enumerate(tried) if joint.lives and not _other_boot(joint)]
    if not shared[first] and len(fitting) <= 1:
        one = fitting[0] if fitting else 0
        return Chosen(one, tried[one])
    names = " and ".join(recordings[i].name for i in (sorted((first, second)) if shared[first] else fitting))
    why = f"it may be of {names}: name one of them alone"
    return Chosen(0, None, JoinOutcome("identity", report.name, "recordings", 0, 0, _rows(report), (why,)))


def relations(recordings: Sequence[Evidence]) -> list[JoinOutcome]:
    """What is said of each pair of recordings, which are attributed apart."""
    return [
        JoinOutcome("identity", one.name, other.name, reasons=(f"{_relation(one, other)}: attributed apart",))
        for one, other in combinations(recordings, 2)
        if one.capture != other.capture  # those of one capture are one: its recorder was started again
    ]


def _relation(one: Evidence, other: Evidence) -> str:
    if one.source.host != other.source.host:
        return f"recordings of two hosts ({one.source.host or 'unknown'}, {other.source.host or 'unknown'})"
    if one.source.boot_id != other.source.boot_id:
        return "recordings of two boots"
    if not _same_run(one, other):
        return "recordings of different times"
    both = one.table("processes").merge(other.table("processes"), on="pid")
    common = both[(both["start_ns_x"] == both["start_ns_y"])]["pid"].nunique()
    if not common:
        return "recordings of different processes at the same time"
    return f"{common:,} processes are in both recordings, so the same memory may stand in both"


def _same_run(one: Evidence, other: Evidence) -> bool:
    """Whether two recordings are of the same boot and overlap in time."""
    a, b = one.source, other.source
    if a.host != b.host or not a.boot_id or a.boot_id != b.boot_id:
        return False
    return a.start_ns <= (b.end_ns or a.start_ns) and b.start_ns <= (a.end_ns or b.start_ns)


def _other_boot(joint: Joint) -> bool:
    """Whether the clocks say that the report is of another boot or host."""
    return "another boot" in joint.alignment.refused or "another host" in joint.alignment.refused


def _shared(joint: Joint) -> int:
    """How many events both saw."""
    by_sequence = sum(len(s.agreed.left.at_ns) for s in joint.sequences.values() if s.agreed)
    launched = 0
    if len(joint.report.table("kernel_profiles")):
        pairs, _ = join_profiles(joint.recording, joint.report)
        launched = int((pairs["rule"] == "order").sum())
    residual = joint.alignment.residual_ns
    near = joint.alignment.seen_twice if residual and residual[0] <= AGREE_NS else 0
    return max(len(joint.pairs[0]), by_sequence, launched, near)


def _rows(report: Evidence) -> int:
    """Rows of the report that stay without a partner."""
    tables = ("allocations", "calls", "kernel_profiles", "segments")
    return max(len(report.table(name)) for name in tables)

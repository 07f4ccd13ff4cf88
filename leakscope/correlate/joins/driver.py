"""All joins of a set of sources, strongest rule first: what they matched, what counts once, and links for chains.

The recording is the reference: reports of other tools are joined to it one by one. With several recordings a report
joins the one that it shares most with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from leakscope.correlate.joins.evidence import SITE_IDENTITY, Evidence
from leakscope.correlate.joins.joint import Joint, owned
from leakscope.correlate.joins.kernel_events import CallTable, Counted, KernelJoin, Rule
from leakscope.correlate.joins.links import MIN_SHARE, SiteLinks, by_identity
from leakscope.correlate.joins.nesting import Intervals
from leakscope.correlate.joins.order import bare_name
from leakscope.correlate.joins.profiles import TRAFFIC, join_profiles
from leakscope.correlate.joins.ranges import open_ranges, range_paths
from leakscope.correlate.joins.recordings import choose, relations
from leakscope.correlate.joins.segments import join_segments
from leakscope.correlate.joins.stack import TOP_FRAMES
from leakscope.correlate.joins.timeline import Ints, thread_key
from leakscope.correlate.joins.window import GPU_WINDOW_NS, KERNEL_WINDOW_NS, beyond_chance, covered_share
from leakscope.model.results import ChainLink, JoinOutcome, Row

MAX_RANGE_ERROR_NS = 1_000_000
"""A clock that is further off than this says nothing about which range was open."""


@dataclass(frozen=True)
class JoinOptions:
    """Widths of the windows in ns; how many of the application's innermost frames the hash of the stack rule takes."""

    kernel_window_ns: int = KERNEL_WINDOW_NS
    gpu_window_ns: int = GPU_WINDOW_NS
    stack_frames: int = TOP_FRAMES


@dataclass
class Joined:
    """``outcomes``: every join that was tried. ``clocks``: residuals. ``twice``: capture number → source_id, pid, addr,
    ts_ns of allocations that another source counts already. ``links``: capture number → links of its sites.
    ``profiles``: profile_id, launch_id, ts_ns, rule, confidence by report."""

    outcomes: list[JoinOutcome] = field(default_factory=list)
    clocks: list[Row] = field(default_factory=list)
    twice: dict[int, pd.DataFrame] = field(default_factory=dict)
    links: dict[int, SiteLinks] = field(default_factory=dict)
    reconciliation: list[Row] = field(default_factory=list)
    profiles: dict[str, pd.DataFrame] = field(default_factory=dict)


def join(evidence: Sequence[Evidence], options: JoinOptions | None = None) -> Joined:
    """Join all sources. Nothing to join (no recording, or nothing but one) gives an empty result. Recordings are told
    apart, never joined with each other."""
    options = options or JoinOptions()
    joined = Joined()
    recordings = [e for e in evidence if e.source.kind == "recording"]
    reports = [e for e in evidence if e.source.kind != "recording"]
    joined.outcomes += relations(recordings)
    if not recordings or not reports:
        return joined
    joints: dict[int, list[Joint]] = {}
    for report in reports:
        chosen = choose(recordings, report)
        joined.outcomes += [chosen.refused] if chosen.refused else []
        if chosen.joint:
            joints.setdefault(chosen.recording, []).append(chosen.joint)
    for number, of_recording in sorted(joints.items()):
        recording = recordings[number]
        links = joined.links.setdefault(recording.capture, SiteLinks())
        for joint in of_recording:
            _tell_clock(joined, joint)
            joined.outcomes += joint.outcomes
            _seen_twice(joined, joint, links)
            _segments(joined, joint, links)
            _ranges(joined, joint, links)
            _profiles(joined, joint, links, options.stack_frames)
        _kernel_events(joined, recording, of_recording, links, options)
    return joined


def _tell_clock(joined: Joined, joint: Joint) -> None:
    alignment = joint.alignment
    if alignment.refused:
        if joint.report.source.clock != "none":
            joined.clocks.append(Row(joint.report.name, "clock not aligned", None, "ns", alignment.refused))
        return
    if alignment.residual_ns is None:
        known = (
            "unknown" if alignment.error_ns is None else f"at most {alignment.error_ns / 1e6:,.3f} ms by its own word"
        )
        detail = f"{alignment.how}; no event was seen by both, the error is {known}"
        joined.clocks.append(Row(joint.report.name, "clock residual not measured", None, "ns", detail))
        return
    median, most = alignment.residual_ns
    detail = f"{alignment.how}; median over {alignment.seen_twice:,} events seen by both, 99 % within {most:,} ns"
    joined.clocks.append(Row(joint.report.name, "clock residual", median, "ns", detail))


def _seen_twice(joined: Joined, joint: Joint, links: SiteLinks) -> None:
    """Allocations of both: counted once, a link on the recording's site, and a line of the reconciliation."""
    left, right = joint.pairs
    ours, theirs = joint.recording.table("allocations"), owned(joint.report)
    if not len(theirs) or not len(joint.lives):
        return
    both = theirs.iloc[right]
    if len(left):
        marked = both[["pid", "addr", "ts_ns"]].assign(source_id=joint.report.source.id)
        before = joined.twice.get(joint.report.capture)
        joined.twice[joint.report.capture] = marked if before is None else pd.concat([before, marked])
        chosen = np.zeros(len(ours), bool)
        chosen[left] = True
        sites = by_identity(ours, chosen).rename(columns={"share": "confidence"})
        name = f"the same allocations in {joint.report.name}"
        links.add(sites, place="seen", what="report", name=name, rule="identity")
        _frames(joint, links)
    seen, common = int(theirs["size_bytes"].sum()), int(both["size_bytes"].sum())
    joined.reconciliation += [
        Row(joint.report.name, "device and pinned bytes allocated", seen, "bytes"),
        Row(joint.report.name, "of these seen by the recording (counted once)", common, "bytes"),
        Row(joint.report.name, "unexplained", seen - common, "bytes"),
    ]


def _segments(joined: Joined, joint: Joint, links: SiteLinks) -> None:
    """Segments of a snapshot that are older than its trace, and what it says of reserved memory."""
    if not len(joint.report.table("segments")):
        return
    found, outcomes, rows = join_segments(joint)
    joined.outcomes += outcomes
    joined.reconciliation += rows
    if len(found):
        ours = joint.recording.table("allocations")
        chosen = np.zeros(len(ours), bool)
        chosen[found] = True
        sites = by_identity(ours, chosen).rename(columns={"share": "confidence"})
        links.add(sites, place="seen", what="report", name=f"segments in {joint.report.name}", rule="identity")


def _frames(joint: Joint, links: SiteLinks) -> None:
    """Python frames that only the report has: the one stack that most allocations of a site share."""
    left, right = joint.pairs
    ours = joint.recording.table("allocations")
    stack = np.zeros(len(ours), np.int64)
    stack[left] = owned(joint.report)["python_stack"].to_numpy(np.int64)[right]
    chosen = (stack > 0) & (ours["python_stack"] == 0).to_numpy()
    if not chosen.any():
        return
    most = by_identity(ours.assign(their_stack=stack), chosen, "their_stack")
    most = most.sort_values("share", ascending=False, kind="stable").drop_duplicates(list(SITE_IDENTITY))
    stacks = joint.report.stacks(most["their_stack"])
    for row in most[most["share"] >= MIN_SHARE].to_dict("records"):
        one = pd.DataFrame([{**{c: row[c] for c in SITE_IDENTITY}, "count": row["count"], "bytes": row["bytes"]}])
        for frame in stacks.get(int(row["their_stack"]), []):
            links.add(
                one, place="frame", what="frame", name=frame.text, rule="identity", confidence=float(row["share"])
            )


def _ranges(joined: Joined, joint: Joint, links: SiteLinks) -> None:
    """NVTX ranges that only the report has, for allocations of the recording without one."""
    marks = joint.report.table("marks")
    marks = marks[marks["tid"] > 0]
    ours = joint.recording.table("allocations")
    ours = ours[ours["mark_id"] == 0].reset_index(drop=True)
    if not len(marks) or not len(ours):
        return
    names = f"allocations of {joint.recording.name}", f"ranges of {joint.report.name}"
    error = joint.alignment.error_ns
    if joint.alignment.refused or error is None or error > MAX_RANGE_ERROR_NS:
        why = joint.alignment.refused or "its clock is not known well enough to say which range was open"
        joined.outcomes.append(JoinOutcome("range", *names, 0, 0, len(ours), (why,)))
        return
    pid, tid = joint.mapped(marks)
    end = marks["end_ns"].to_numpy(np.int64)
    moved = marks.assign(
        pid=pid, tid=tid, start_ns=joint.on_recordings_clock(marks["start_ns"].to_numpy(np.int64)),
        end_ns=np.where(end == 0, 0, joint.on_recordings_clock(end)),
    )  # fmt: skip
    moved = moved[moved["tid"] > 0]
    found = open_ranges(
        moved, thread_key(ours["pid"].to_numpy(), ours["tid"].to_numpy()), ours["ts_ns"].to_numpy(np.int64)
    )
    hit = found > 0
    joined.outcomes.append(JoinOutcome("range", *names, int(hit.sum()), 0, 0, (), 0.9 if hit.any() else None))
    if hit.any():
        paths = range_paths(moved, np.unique(found))
        ours["name"] = [" / ".join(paths.get(int(mark), ())) for mark in found]
        sites = by_identity(ours, hit, "name")
        sites = sites[sites["share"] >= MIN_SHARE]
        links.add(sites.assign(confidence=0.9 * sites["share"]), place="range", what="range", rule="range")


def _profiles(joined: Joined, joint: Joint, links: SiteLinks, stack_frames: int) -> None:
    profiles = joint.report.table("kernel_profiles")
    if not len(profiles):
        return
    pairs, outcomes = join_profiles(joint.recording, joint.report, stack_frames)
    joined.outcomes += outcomes
    joined.profiles[joint.report.name] = pairs
    if not len(pairs):
        return
    traffic = joint.report.con.execute(
        f"SELECT profile_id, sum(value) AS moved FROM kernel_metrics WHERE source_id = ? AND metric IN {TRAFFIC} "
        "AND NOT isnan(value) GROUP BY profile_id",
        [joint.report.source.id],
    ).df()
    rows = pairs.merge(profiles, left_on="profile_id", right_on="id").merge(traffic, on="profile_id", how="left")
    rows["bare"] = rows["kernel"].map(bare_name)
    for kernel, group in rows.groupby("bare", sort=True):
        moved = group["moved"].sum()
        rule = "order" if (group["rule"] == "order").all() else "stack"
        name = f"{len(group):,} launches of {kernel} profiled in {joint.report.name}"
        sure = float(group["confidence"].min())
        links.kernels[str(kernel)] = ChainLink("profile", name, rule, sure, len(group), int(moved) if moved > 0 else 0)


def _kernel_events(
    joined: Joined, recording: Evidence, joints: list[Joint], links: SiteLinks, options: JoinOptions
) -> None:
    """Nesting in the recording's calls, in those of reports; then the windows around calls, and around launches."""
    apis: dict[str, int] = {}
    calls = [_own_calls(recording, apis)]
    known = np.unique(calls[0].pid)  # processes whose calls the recording has: reports tell nothing new of them
    calls += [theirs for joint in joints if (theirs := _calls_of(joint, apis, known)) is not None]
    calls = [table for table in calls if len(table.pid)]
    launches = _launches(recording, apis)
    rules = [Rule("nesting", table) for table in calls]
    rules += [Rule("window", table, options.kernel_window_ns) for table in calls]
    rules += [Rule("window", launches, options.gpu_window_ns)] if len(launches.pid) else []
    groups = recording.kernel_groups() if rules else pd.DataFrame()
    if not len(groups):
        return
    pids = sorted({int(p) for rule in rules for p in np.unique(rule.calls.pid) if p >= 0})
    work = KernelJoin(rules)
    totals = np.zeros(len(groups), np.int64)
    first, last = (1 << 62), 0
    for batch in recording.kernel_batches(pids):
        work.add(batch)
        totals += np.bincount(batch.group, minlength=len(groups))
        first, last = min(first, int(batch.ts_ns.min())), max(last, int(batch.ts_ns.max()))
    names = {number: api for api, number in apis.items()}
    left = work.events
    what = f"kernel allocations of {recording.name}"
    for counted in work.counted:
        sure, note = _confidence(counted, left, pids, (first, last))
        left -= counted.matched + counted.ambiguous
        partner = f"calls of {counted.rule.calls.name}"
        if counted.rule.calls is launches:
            partner = f"launches of {recording.name}"
        joined.outcomes.append(
            JoinOutcome(
                counted.rule.kind, what, partner, counted.matched, counted.ambiguous, 0, note,
                sure if counted.matched else None,
            )
        )  # fmt: skip
        if counted.rule.kind == "window" or not counted.rule.calls.own:  # what nests in own calls, chains have
            _call_links(links, counted, groups, totals, names, sure)
    if left:
        reason = "no call open, none near, no launch near"
        joined.outcomes.append(JoinOutcome("window", what, "calls and launches", 0, 0, left, (reason,)))


def _confidence(counted: Counted, left: int, pids: list[int], span: tuple[int, int]) -> tuple[float, tuple[str, ...]]:
    """Confidence of a rule's links, and what to say of it. ``left``: events that no stronger rule took."""
    rule, calls = counted.rule, counted.rule.calls
    if rule.kind == "nesting":
        return 1.0, ()
    spans = Intervals(calls.pid, calls.start_ns, calls.end_ns)
    covered = max((covered_share(spans, pid, *span, rule.window_ns) for pid in pids), default=0.0)
    reached = (counted.matched + counted.ambiguous) / max(1, left)
    note = (
        f"±{rule.window_ns / 1000:g} µs; {reached:.0%} of what is left lies near, chance alone explains {covered:.0%}"
    )
    return beyond_chance(reached, covered), (note,)


def _call_links(
    links: SiteLinks, counted: Counted, groups: pd.DataFrame, totals: Ints, names: dict[int, str], sure: float
) -> None:
    table = counted.table()
    group, api, count = (table[column].to_numpy(np.int64) for column in ("group", "api", "count"))
    share = count / np.maximum(totals[group], 1)
    keep = (share >= MIN_SHARE) & (sure > 0)
    rows = groups.iloc[group[keep]].reset_index(drop=True)
    rows["name"] = [names[number] for number in api[keep].tolist()]
    rows["count"], rows["bytes"], rows["confidence"] = count[keep], 0, sure * share[keep]
    links.add(rows, place="call", what="call", rule=counted.rule.kind)


def _codes(values: pd.Series, apis: dict[str, int]) -> np.ndarray:
    names, code = np.unique(values.to_numpy(str), return_inverse=True)
    return np.array([apis.setdefault(n, len(apis)) for n in names.tolist()] or [0], np.int64)[np.ravel(code)]


def _own_calls(recording: Evidence, apis: dict[str, int]) -> CallTable:
    calls = recording.table("calls")
    pid, tid, start, end = (calls[c].to_numpy(np.int64) for c in ("pid", "tid", "enter_ns", "exit_ns"))
    return CallTable(recording.name, pid, tid, start, end, _codes(calls["api"], apis), True)


def _calls_of(joint: Joint, apis: dict[str, int], known: Ints) -> CallTable | None:
    """The calls of a report in processes but those ``known``, where its clock is known well enough for a window."""
    calls, error = joint.report.table("calls"), joint.alignment.error_ns
    if not len(calls) or joint.alignment.refused or error is None or error > KERNEL_WINDOW_NS:
        return None
    pid, tid = joint.mapped(calls)
    start, end = (joint.on_recordings_clock(calls[c].to_numpy(np.int64)) for c in ("enter_ns", "exit_ns"))
    new = (pid >= 0) & ~np.isin(pid, known)
    return CallTable(
        joint.report.name, pid[new], tid[new], start[new], end[new], _codes(calls["api"][new], apis), False
    )


def _launches(recording: Evidence, apis: dict[str, int]) -> CallTable:
    rows = recording.table("launches")
    rows = rows[rows["parent_id"] == 0]
    pid, tid, at = (rows[c].to_numpy(np.int64) for c in ("pid", "tid", "ts_ns"))
    return CallTable(recording.name, pid, tid, at, at, _codes(rows["api"], apis), True)

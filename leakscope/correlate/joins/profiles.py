"""Profiled kernels (Nsight Compute) and the launches of a recording: by order, else by stack, else not at all."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd

from leakscope.correlate.joins import order, stack
from leakscope.correlate.joins.evidence import Evidence
from leakscope.correlate.joins.processes import Candidate, candidates
from leakscope.correlate.joins.ranges import domain_paths
from leakscope.model.manifest import Source
from leakscope.model.results import JoinOutcome
from nsight_parsers.launch_order import LaunchOrder

TRAFFIC = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def join_profiles(
    recording: Evidence, report: Evidence, stack_frames: int = stack.TOP_FRAMES
) -> tuple[pd.DataFrame, list[JoinOutcome]]:
    """Pairs of profile_id and launch_id with rule, confidence and ts_ns (the launch's), and what became of the rest.

    Pairs by stack join code, not single launches: their ts_ns is 0 and launch_id that of one launch of the group.
    """
    profiles = report.table("kernel_profiles")
    profiles = profiles.assign(grid=_tuples(profiles["grid"]), block=_tuples(profiles["block"]))
    launches = outer_launches(recording)
    pieces, reasons = [], []
    refused = 0
    for pid in np.unique(profiles["pid"].to_numpy(np.int64)).tolist():
        own = profiles[profiles["pid"] == pid]
        of_pid, why = _by_order(launch_order_of(report.source), launches, own, recording, pid)
        pieces.append(of_pid)
        if why:
            refused += len(own)
            reasons.append(f"PID {pid}: {why}" if pid else why)
    pairs = pd.concat(pieces) if pieces else order.NONE
    names = f"kernels of {report.name}", f"launches of {recording.name}"
    sure = float(pairs["confidence"].min()) if len(pairs) else None
    outcomes = [JoinOutcome("order", *names, len(pairs), 0, refused, tuple(reasons), sure)]
    times = launches.set_index("id")["ts_ns"]
    pairs = pairs.assign(rule="order", ts_ns=times.reindex(pairs["launch_id"]).to_numpy(np.int64))
    rest = profiles[~profiles["id"].isin(pairs["profile_id"])]
    if len(rest) and (rest["user_stack"] > 0).any():
        by_stack, outcome = _by_stack(recording, report, launches, rest, names, stack_frames)
        pairs, outcomes = pd.concat([pairs, by_stack]), [*outcomes, outcome]
    return pairs.reset_index(drop=True), outcomes


def launch_order_of(source: Source) -> LaunchOrder:
    """What the report's facts say of its order; refused where they say nothing."""
    told = source.facts.get("launch_order")
    if not isinstance(told, dict):
        return LaunchOrder("refused", "the source does not say which launches were profiled")
    known: dict[str, Any] = {f.name: told[f.name] for f in fields(LaunchOrder) if f.name in told}
    for name in ("nvtx_include", "nvtx_exclude", "cautions"):
        known[name] = tuple(known.get(name, ()))
    return LaunchOrder(**known)


def outer_launches(recording: Evidence) -> pd.DataFrame:
    """The launches that count, one a kernel: outermost and successful, with ranges and wall-clock time."""
    table = recording.table("launches")
    table = table[(table["parent_id"] == 0) & (table["result"] == 0)]
    inner = recording.table("launches")
    named = inner[(inner["parent_id"] > 0) & (inner["kernel"] != "")].drop_duplicates("parent_id")
    below = named.set_index("parent_id")["kernel"].reindex(table["id"]).fillna("").to_numpy()
    paths = domain_paths(recording.table("marks"), table["mark_id"].unique())
    anchors = recording.source.anchors
    ahead = anchors[0].realtime_ns - anchors[0].monotonic_ns if anchors else None
    return table.assign(
        kernel=np.where(table["kernel"] == "", below, table["kernel"]),
        grid=_tuples(table["grid"]),
        block=_tuples(table["block"]),
        ranges=pd.Series([paths.get(int(mark), ()) for mark in table["mark_id"]], table.index, dtype=object),
        utc_s=(table["ts_ns"] + ahead) / 1e9 if ahead is not None else np.nan,
    )


def _by_order(
    how: LaunchOrder, launches: pd.DataFrame, profiles: pd.DataFrame, recording: Evidence, pid: int
) -> tuple[pd.DataFrame, str]:
    """The pairs of one process of the report, tried on every life that its PID may mean; exactly one must fit."""
    if how.status == "refused":
        return order.NONE, how.reason
    lives = candidates(recording.table("processes"), pid) if pid else []
    if not lives:
        return order.NONE, "no process of the recording has this PID" if pid else "the report names no process"
    fitting, reasons = [], []
    for life in lives:
        own = _of_life(launches, life)
        result = order.pair_by_order(how, own, profiles, same_namespace=life.same_namespace)
        if result.refused:
            reasons.append(result.refused)
        elif len(result.pairs):
            fitting.append(result.pairs)
    if len(fitting) == 1:
        return fitting[0], ""
    if fitting:
        return order.NONE, f"{len(fitting)} lives of this PID fit equally well"
    return order.NONE, "; ".join(dict.fromkeys(reasons)) or "nothing was launched"


def _tuples(column: pd.Series) -> pd.Series:
    return pd.Series([tuple(values) for values in column], column.index, dtype=object)


def _of_life(launches: pd.DataFrame, life: Candidate) -> pd.DataFrame:
    inside = (launches["ts_ns"] >= life.start_ns) & (launches["ts_ns"] <= life.end_ns)
    return launches[(launches["pid"] == life.pid) & inside]


def _by_stack(
    recording: Evidence,
    report: Evidence,
    launches: pd.DataFrame,
    profiles: pd.DataFrame,
    names: tuple[str, str],
    stack_frames: int,
) -> tuple[pd.DataFrame, JoinOutcome]:
    """Groups of the same top frames (module and function) and the same kernel, where that is known."""
    sides = []
    for evidence, rows in ((report, profiles), (recording, launches)):
        hash_of = {
            s: stack.top_hash(frames, count=stack_frames) for s, frames in evidence.stacks(rows["user_stack"]).items()
        }
        sides.append({int(i): hash_of.get(int(s), 0) for i, s in zip(rows["id"], rows["user_stack"], strict=True)})
    groups = stack.hash_groups(*sides)
    name_of = launches.set_index("id")["kernel"].to_dict()
    known = profiles.set_index("id")
    found: list[tuple[int, int]] = []
    ambiguous = 0
    for _, left, right in groups.itertuples(index=False):
        for profile in left:
            kernel, mangled = str(known.at[profile, "kernel"]), str(known.at[profile, "mangled"])
            fits = [i for i in right if not name_of[i] or order.same_kernel(name_of[i], kernel, mangled)]
            if len({order.bare_name(name_of[i]) for i in fits}) == 1:
                found.append((profile, fits[0]))
            else:
                ambiguous += bool(fits)
    pairs = pd.DataFrame(found, columns=["profile_id", "launch_id"], dtype="int64")
    left_over = len(profiles) - len(pairs) - ambiguous
    reasons = (f"no launch has these {stack_frames} innermost frames: {left_over:,}",) if left_over else ()
    outcome = JoinOutcome("stack", *names, len(pairs), ambiguous, left_over, reasons, 0.7 if len(pairs) else None)
    return pairs.assign(confidence=0.7, rule="stack", ts_ns=0), outcome

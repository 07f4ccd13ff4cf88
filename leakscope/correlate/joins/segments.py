"""Segments of a snapshot that are older than its trace: device memory that both sides hold at one moment.

PyTorch's trace is a ring buffer, so of most segments the snapshot shows no allocation, only that they are there. At the
moment of the snapshot a segment that cudaMalloc gave and a live device allocation of the recording with its address and
size are one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from leakscope.correlate.joins.evidence import Evidence
from leakscope.correlate.joins.joint import Joint, owned
from leakscope.correlate.joins.timeline import Ints, combined
from leakscope.model.results import JoinOutcome, Row
from leakscope.model.words import KINDS_NOT_ADDED

NEVER = (1 << 63) - 1
NVML_NEAR_NS = 5_000_000_000
"""A reading of NVML further from the snapshot than this is not compared with it."""


def segments_of(report: Evidence) -> pd.DataFrame:
    """ts_ns, pid, device, segment_type, addr, size_bytes of the segments, and ``traced``: the trace has an allocation
    of the same address and size."""
    table = report.table("segments")
    traced = owned(report)
    known, asked = (_key(rows, "pid", "addr", "size_bytes") for rows in (traced, table))
    return table.assign(traced=np.isin(asked, known))


def driver_memory(report: Evidence) -> pd.DataFrame:
    """pid, addr, size_bytes, ts_ns of all memory of the driver that the report knows: traced, and older segments."""
    names = ["pid", "addr", "size_bytes", "ts_ns"]
    older = segments_of(report)
    older = older[~older["traced"]]
    return pd.concat([owned(report)[names], older[names]]) if len(older) else owned(report)[names]


class Held(NamedTuple):
    """``matched``: row of the recording's allocations for each segment, -1 for none. ``ambiguous``: which had several.
    ``live``: rows of allocations that were live then. ``at_ns``: the moment, None for the end of the recording."""

    matched: Ints
    ambiguous: np.ndarray
    live: Ints
    at_ns: int | None


def held_at_snapshot(joint: Joint, segments: pd.DataFrame, pid: int) -> Held:
    """Match the segments of one PID of the report with what its process held at the moment of the snapshot."""
    ours, life = joint.recording.table("allocations"), joint.lives[pid]
    at, slack = NEVER, 0
    moment = int(segments["ts_ns"].max())
    if moment and not joint.alignment.refused and joint.alignment.error_ns is not None:
        at, slack = moment + joint.alignment.offset_ns, joint.alignment.error_ns
    begin = ours["ts_ns"].to_numpy(np.int64)
    own = (ours["pid"] == life.pid) & (ours["layer"] == "gpu") & ~ours["kind"].isin(KINDS_NOT_ADDED)
    live = own.to_numpy() & (begin >= life.start_ns) & (begin <= min(at, NEVER - slack) + slack)
    live &= _ends(joint.recording, ours) >= min(at, life.end_ns) - slack
    rows = np.flatnonzero(live)
    keys, asked = _key(ours.iloc[rows], "addr", "size_bytes"), _key(segments, "addr", "size_bytes")
    order = np.argsort(keys, kind="stable")
    first, last = (np.searchsorted(keys[order], asked, side) for side in ("left", "right"))
    found = np.full(len(asked), -1, np.int64)
    one = last - first == 1
    found[one] = rows[order[first[one]]]
    return Held(found, last - first > 1, rows, None if at == NEVER else at)


def join_segments(joint: Joint) -> tuple[Ints, list[JoinOutcome], list[Row]]:
    """Rows of the recording's allocations that are older segments; what was matched; lines of the reconciliation."""
    segments = segments_of(joint.report)
    found: list[Ints] = []
    outcomes: list[JoinOutcome] = []
    rows: list[Row] = []
    for pid in sorted(segments["pid"].unique().tolist()):
        of_pid = segments[segments["pid"] == pid].reset_index(drop=True)
        older = ~of_pid["traced"].to_numpy()
        if pid not in joint.lives:
            why = joint.refused_pids.get(pid, "its process is unknown")
            outcomes += [_outcome(joint, 0, 0, int(older.sum()), [why])] if older.any() else []
            continue
        held = held_at_snapshot(joint, of_pid, pid)
        matched, ambiguous = older & (held.matched >= 0), older & held.ambiguous
        missed = of_pid[older & ~matched & ~ambiguous]
        if older.any():
            outcomes.append(_outcome(joint, matched.sum(), ambiguous.sum(), len(missed), _reasons(missed, held.at_ns)))
        found.append(held.matched[matched])
        rows += _reconciled(joint, of_pid, held, pid)
    return (np.concatenate(found) if found else np.empty(0, np.int64)), outcomes, rows


def _ends(recording: Evidence, ours: pd.DataFrame) -> Ints:
    """int64[n]: when each allocation was freed, NEVER for what was not."""
    frees = recording.table("frees")
    keys, own = _key(frees, "pid", "addr", "alloc_ts_ns"), _key(ours, "pid", "addr", "ts_ns")
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], own), max(len(keys) - 1, 0))
    if not len(keys):
        return np.full(len(own), NEVER, np.int64)
    at = order[place]
    return np.where(keys[at] == own, frees["ts_ns"].to_numpy(np.int64)[at], NEVER)


def _key(rows: pd.DataFrame, *names: str) -> Ints:
    return combined(*(rows[name].to_numpy() for name in names))


def _reasons(missed: pd.DataFrame, at_ns: int | None) -> list[str]:
    reasons = ["the time of the snapshot is unknown: taken as the end of the recording"] if at_ns is None else []
    mapped = int((missed["segment_type"] == "expandable").sum())
    if mapped:
        reasons.append(f"expandable segments, which are mapped and not allocated: {mapped:,}")
    if len(missed) > mapped:
        reasons.append(f"the recording holds no such memory then (it may have begun later): {len(missed) - mapped:,}")
    return reasons


def _outcome(joint: Joint, matched: int, ambiguous: int, refused: int, reasons: list[str]) -> JoinOutcome:
    return JoinOutcome(
        "identity", f"segments of {joint.report.name} older than its trace",
        f"live device memory of {joint.recording.name}", int(matched), int(ambiguous), refused, tuple(reasons),
        1.0 if matched else None,
    )  # fmt: skip


def _reconciled(joint: Joint, segments: pd.DataFrame, held: Held, pid: int) -> list[Row]:
    """Reserved by PyTorch, live in the recording and used by NVML's word, at the moment of the snapshot."""
    name, recording = joint.report.name, joint.recording.name
    sizes = joint.recording.table("allocations")["size_bytes"].to_numpy(np.int64)
    reserved = int(segments["size_bytes"].sum())
    common = int(sizes[np.unique(held.matched[held.matched >= 0])].sum())
    live = int(sizes[held.live].sum())
    others = "taken from the driver by others than PyTorch"
    if (segments["segment_type"] == "expandable").any():
        others = "its expandable segments, and what others than PyTorch took from the driver"
    when = "at the snapshot" if held.at_ns is not None else "at the end of the recording"
    rows = [
        Row(name, "reserved by PyTorch's allocator (its segments)", reserved, "bytes"),
        Row(name, f"of these live device memory of the recording {when}", common, "bytes"),
        Row(name, "unexplained", reserved - common, "bytes"),
        Row(recording, f"device memory live {when}", live, "bytes"),
        Row(name, "of these segments of PyTorch's allocator", common, "bytes"),
        Row(recording, "unexplained", live - common, "bytes", others),
    ]
    used = _nvml(joint.recording, joint.lives[pid].pid, held.at_ns)
    if used is not None:
        value, scope, apart_ns = used
        detail = f"read {apart_ns / 1e9:.1f} s from the snapshot; contexts and code count in it, too"
        rows += [
            Row("NVML", f"GPU memory used by {scope} {when}", value, "bytes", detail),
            Row(recording, f"device memory live {when}", live, "bytes"),
            Row("NVML", "unexplained", value - live, "bytes"),
        ]
    return rows


def _nvml(recording: Evidence, pid: int, at_ns: int | None) -> tuple[int, str, int] | None:
    """(bytes, whose, distance in ns) of the reading nearest to a moment: of the process, else of the only device."""
    if at_ns is None:
        return None
    for scope, counter, whose in (
        ("process", "gpu_process_used", "the process"),
        ("device", "gpu_used", "all processes of the device"),
    ):
        found = recording.con.execute(
            f"""
            SELECT arg_min(value, abs(ts_ns - $at)), min(abs(ts_ns - $at)), count(DISTINCT scope_id) FROM samples
            WHERE source_id = $source AND scope = '{scope}' AND counter = '{counter}'
                  AND value BETWEEN 0 AND 9e18 AND (scope = 'device' OR scope_id = $pid)
            """,
            {"at": at_ns, "source": recording.source.id, "pid": str(pid)},
        ).fetchall()[0]
        if found[2] == 1 and found[1] <= NVML_NEAR_NS:
            return int(found[0]), whose, int(found[1])
    return None

"""Rule 2, launch order: the k-th kernel launch of a process is the k-th action of its Nsight Compute report.

Which launches count follows from the command line stored in the report (``nsight_parsers.launch_order``). The order is
believed only when the counts agree and every pair agrees in kernel name, grid, block, thread and creation time; one
violation and all pairs of the process are dropped, because from there on every pair may be shifted. The action then
takes the launch's timestamp, which is eBPF's.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from leakscope.correlate.joins.timeline import Ints
from nsight_parsers.launch_order import LaunchOrder

QUARTER_HOUR_S = 900
CREATION_SLACK_S = 1.0
"""``created_s`` is in whole seconds."""
CHECKED_BY_NAME, CHECKED_BY_SHAPE, NOT_DISTINCT = 1.0, 0.95, 0.9
"""Confidence of a pair whose process launched several kernels that the names, or only the shapes, tell apart; and of
one where all launches look alike, so that only the counts speak for the order."""


class Ordered(NamedTuple):
    """``pairs``: profile_id, launch_id, confidence. ``refused``: why the profiles are not paired, '' where they are."""

    pairs: pd.DataFrame
    refused: str = ""


NONE = pd.DataFrame({"profile_id": [], "launch_id": [], "confidence": []}).astype(
    {"profile_id": "int64", "launch_id": "int64", "confidence": "float64"}
)


def pair_by_order(
    order: LaunchOrder, launches: pd.DataFrame, profiles: pd.DataFrame, *, same_namespace: bool = True
) -> Ordered:
    """Pair the launches and the profiles of one process.

    ``launches``, in the order of time, the outermost and successful ones: id, tid, kernel, grid, block (tuples),
    ranges ((domain, name) of the open NVTX ranges, outermost first; '' is the default domain), utc_s (float, NaN where
    unknown). ``profiles``, in the order of the report: id, tid, kernel, mangled, grid, block, api_call_id, created_s.
    ``same_namespace``: thread ids of both are of one PID namespace and must be equal.
    """
    if order.status == "refused":
        return Ordered(NONE, order.reason)
    ids = profiles["api_call_id"].to_numpy(np.int64)
    if (ids > 0).all() and (np.diff(ids) <= 0).any():
        return Ordered(NONE, "the API call ids of the actions do not rise")
    counted, why = counted_launches(order, launches)
    if why:
        return Ordered(NONE, why)
    wanted = len(counted) if order.limit is None else min(order.limit, len(counted))
    if wanted != len(profiles):
        return Ordered(NONE, f"{wanted:,} launches were recorded where the report has {len(profiles):,} actions")
    counted = counted.iloc[:wanted]
    wrong = violations(counted, profiles, same_namespace)
    if wrong:
        return Ordered(NONE, f"{'; '.join(wrong)}: from there on every pair may be shifted")
    named = bool((counted["kernel"] != "").all()) and counted["kernel"].nunique() > 1
    shaped = counted[["grid", "block"]].drop_duplicates().shape[0] > 1
    confidence = CHECKED_BY_NAME if named else CHECKED_BY_SHAPE if shaped else NOT_DISTINCT
    return Ordered(
        pd.DataFrame(
            {
                "profile_id": profiles["id"].to_numpy(np.int64),
                "launch_id": counted["id"].to_numpy(np.int64),
                "confidence": confidence,
            }
        )
    )


def counted_launches(order: LaunchOrder, launches: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The launches that ncu counted, and why they cannot be told ('' where they can)."""
    left = launches.iloc[order.skip_launches :]
    if order.kernel:
        if (left["kernel"] == "").any():
            return left, "only some kernels were profiled, and not every recorded launch has a kernel name"
        hit = _matching_kernels(order, left["kernel"])
        if hit is None:
            return left, "the kernel filter of the run is no expression that can be evaluated here"
        left = left[hit]
    if order.nvtx_include or order.nvtx_exclude:
        filters = [_range_of(text) for text in (*order.nvtx_include, *order.nvtx_exclude)]
        if None in filters:
            return left, "the NVTX filter of the run is more than the name of a push/pop range"
        include, exclude = set(filters[: len(order.nvtx_include)]), set(filters[len(order.nvtx_include) :])
        if not left["ranges"].map(len).any():
            return left, "only launches in NVTX ranges were profiled, and no range was recorded"
        inside = left["ranges"].map(lambda names: not include or bool(include & set(names)))
        left = left[inside & ~left["ranges"].map(lambda names: bool(exclude & set(names)))]
    return left.iloc[order.skip_matches :], ""


def violations(launches: pd.DataFrame, profiles: pd.DataFrame, same_namespace: bool) -> list[str]:
    """What contradicts the pairs of the rows at the same position, each with how many; [] where nothing does."""
    columns = (launches[c].tolist() for c in ("kernel", "grid", "block", "tid"))
    others = (profiles[c].tolist() for c in ("kernel", "mangled", "grid", "block", "tid"))
    wrong = {"kernels": 0, "grids or blocks": 0, "threads": 0}
    for (kernel, grid, block, tid), (name, mangled, grid2, block2, tid2) in zip(
        zip(*columns, strict=True), zip(*others, strict=True), strict=True
    ):
        wrong["kernels"] += bool(kernel and (name or mangled)) and not same_kernel(kernel, name, mangled)
        wrong["grids or blocks"] += any(a and b and tuple(a) != tuple(b) for a, b in ((grid, grid2), (block, block2)))
        wrong["threads"] += bool(same_namespace and tid and tid2 and tid != tid2)
    said = [f"{count:,} pairs differ in {what}" for what, count in wrong.items() if count]
    early = untimely(launches["utc_s"].to_numpy(np.float64), profiles["created_s"].to_numpy(np.int64))
    return [*said, *([f"{early:,} pairs lie outside the times of the report"] if early else [])]


def untimely(launch_s: np.ndarray, created_s: Ints) -> int:
    """Pairs whose launch does not lie between the creation of the result before it and its own.

    ``created_s`` is local time without a zone: any one zone (a multiple of a quarter hour) may explain all pairs. 0
    where times are unknown. ncu holds a launch back until the one before it was replayed, so the order is strict.
    """
    known = np.isfinite(launch_s) & (created_s > 0)
    if not known.any():
        return 0
    launched, created = launch_s[known], created_s[known].astype(np.float64)
    before = np.concatenate([[-np.inf], created[:-1]])
    fewest = len(created)
    # A result takes no longer than the time to the next launch allows, so the zone is near the smallest difference.
    guess = np.floor((created - launched).min() / QUARTER_HOUR_S) * QUARTER_HOUR_S
    for zone_s in (guess, guess + QUARTER_HOUR_S):
        late = launched > created - zone_s + CREATION_SLACK_S
        early = launched < before - zone_s - CREATION_SLACK_S
        fewest = min(fewest, int((late | early).sum()))
    return fewest


def same_kernel(recorded: str, name: str, mangled: str) -> bool:
    """Whether a recorded kernel name is that of a profile, by mangled, demangled or bare name."""
    return recorded in (name, mangled) or bare_name(recorded) in (bare_name(name), bare_name(mangled))


@lru_cache(maxsize=65_536)
def bare_name(name: str) -> str:
    """The function's own name: ``void ns::gemm<float>(float*)``, ``_ZN2ns4gemmIfEvPf`` and ``gemm`` give ``gemm``."""
    if name.startswith("_Z"):
        return _bare_mangled(name)
    depth, kept = 0, []
    for letter in name.replace("(anonymous namespace)", "_"):
        depth += letter == "<"
        if depth == 0:
            if letter == "(":
                break
            kept.append(letter)
        depth -= letter == ">" and depth > 0
    words = "".join(kept).split()
    return words[-1].rsplit("::", 1)[-1] if words else ""


_LENGTH = re.compile(r"(?:St|S[0-9A-Z]*_)?[LK]?(\d+)")


def _bare_mangled(name: str) -> str:
    """Itanium C++ ABI: ``_Z`` [N] (length identifier)+ …; the last identifier of the (nested) name."""
    nested, position, found = name.startswith("_ZN"), 3 if name.startswith("_ZN") else 2, ""
    while match := _LENGTH.match(name, position):
        start = match.end()
        found = name[start : start + int(match[1][:6])]
        position = start + int(match[1][:6])
        if not nested:
            break
    return found or name


def _matching_kernels(order: LaunchOrder, kernels: pd.Series) -> pd.Series | None:
    """Which kernels the filter of the run picks. Expressions come from a file: RE2 runs them in linear time."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = kernels.map(bare_name) if order.kernel_base == "function" else kernels
    if not order.kernel.startswith("regex:"):
        return names == order.kernel
    try:
        hit = pc.match_substring_regex(pa.array(names, pa.string()), order.kernel.removeprefix("regex:").strip("\"'"))
    except pa.ArrowInvalid:
        return None
    return pd.Series(hit.to_numpy(zero_copy_only=False), index=kernels.index)


def _range_of(text: str) -> tuple[str, str] | None:
    """``name/`` or ``domain@name/`` → (domain, name); None for the other forms of ``--nvtx-include``: start/end ranges,
    positions on the stack, several ranges, expressions."""
    match = re.fullmatch(r"(?:([^@/\[\]*,+]+)@)?([^@/\[\]*,+]+)/", text)
    return None if match is None or text.startswith("regex:") else (match[1] or "", match[2])

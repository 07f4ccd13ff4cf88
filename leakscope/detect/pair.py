"""Head against baseline: which sites keep more than before for the same work.

Sites are the same where their folded stacks are: frames by function and file, addresses and line numbers left out, so
that code may move. What the two runs did is compared by the allocations of the sites that both have: their median
ratio is the work of head for one unit of the baseline's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from leakscope.model.results import Culprit, Growth, Report, Site, Verdict

MIN_MORE_OBJECTS = 10
MIN_SIGMA = 4.0
"""Kept objects come as a Poisson process: head must exceed the baseline by so many standard deviations."""
MIN_SPREAD = 0.3
"""A regression is allocated over at least this share of the run: start-up that grew once is none."""
CHURN_RATIO = 1.2
"""Allocations for the same work that rise by this much while nothing more is kept."""
MIN_COMMON_OBJECTS = 20
Z95 = 1.96

_ADDRESS = re.compile(r"\+?0x[0-9a-f]+|:\d+(?=\)|$)")


@dataclass
class _Side:
    """One folded site of one run."""

    stack: tuple[str, ...]
    culprit: str = ""
    layer: str = ""
    slab_cache: str = ""
    kept_objects: int = 0
    kept_bytes: int = 0
    allocated_objects: int = 0
    allocated_bytes: int = 0
    first_ns: int = 0
    last_ns: int = 0
    ids: tuple[str, ...] = ()


def folded(site: Site) -> tuple[str, ...]:
    """What a site is in every build of the program: layer, kind and its stack without addresses, lines and repeats."""
    frames: list[str] = []
    for frame in site.stack:
        text = _ADDRESS.sub("", frame)
        if not frames or frames[-1] != text:
            frames.append(text)
    return (site.layer, site.kind, *frames)


def judge_pair(base: Report, head: Report, zero_ns: int = 1_000_000_000) -> tuple[Verdict, list[Verdict]]:
    """(the verdict, other regressions). ``zero_ns``: time zero of head.

    ``leak``/``regression`` where head keeps more for the same work; what leaks the same in both is no regression.
    ``not_leak``/``more_churn`` where head allocates more and keeps no more. ``inconclusive`` where the two runs share
    too little to compare.
    """
    was, now = _sides(base.sites), _sides(head.sites)
    if not now or not was:
        reason = ("one of the two runs has no allocations",)
        return Verdict("inconclusive", "missing_data", confidence=0.5, reasons=reason, missing=("allocations",)), []
    work, common = _work_ratio(was, now)
    if common < MIN_COMMON_OBJECTS:
        reason = ("the two runs share too few allocations to compare their work",)
        return Verdict(
            "inconclusive", "partial_data", confidence=0.5, reasons=reason, missing=("the same workload",)
        ), []
    start_ns = min(side.first_ns for side in now.values())
    end_ns = max(_end(head), max(side.last_ns for side in now.values()))
    more = [
        verdict
        for key, side in now.items()
        if (verdict := _regression(side, was.get(key), work, start_ns, end_ns, zero_ns)) is not None
    ]
    more = sorted(_by_culprit(more), key=lambda v: -(v.growth.bytes_per_s if v.growth else 0.0))
    if more:
        return more[0], more[1:]
    churn = [side for key, side in now.items() if _churns(side, was.get(key), work)]
    said = f"head did {work:.2f} times the work of the baseline"
    if churn:
        worst = max(churn, key=lambda side: side.allocated_bytes)
        reasons = (f"{worst.culprit or 'unknown code'} allocates more for the same work and frees it", said)
        return Verdict(
            "not_leak", "more_churn", worst.layer, 0.85, Culprit(worst.culprit, worst.stack), reasons=reasons
        ), []
    layer = next(iter({side.layer for side in now.values()}))
    return Verdict("not_leak", "cache_warmup", layer, 0.85, reasons=("no site keeps more for the same work", said)), []


def _sides(sites: Iterable[Site]) -> dict[tuple[str, ...], _Side]:
    found: dict[tuple[str, ...], _Side] = {}
    for site in sites:
        if not site.frees_visible:
            continue
        side = found.setdefault(folded(site), _Side(tuple(site.stack), site.culprit_frame, site.layer, site.slab_cache))
        side.kept_objects += site.live_objects
        side.kept_bytes += site.live_bytes
        side.allocated_objects += site.allocated_objects
        side.allocated_bytes += site.allocated_bytes
        side.first_ns = min(side.first_ns or site.first_ns, site.first_ns)
        side.last_ns = max(side.last_ns, site.last_ns)
        side.ids += (site.id,)
    return found


def _work_ratio(was: dict[tuple[str, ...], _Side], now: dict[tuple[str, ...], _Side]) -> tuple[float, int]:
    """(median ratio of allocations of common sites, weighted by them; how many there are)."""
    common = [key for key in now if key in was and was[key].allocated_objects]
    counts = np.array([was[key].allocated_objects for key in common], np.float64)
    ratios = np.array([now[key].allocated_objects / was[key].allocated_objects for key in common])
    if not len(common):
        return 1.0, 0
    order = np.argsort(ratios, kind="stable")
    middle = int(np.searchsorted(np.cumsum(counts[order]), counts.sum() / 2))
    return float(ratios[order][middle]) or 1.0, int(counts.sum())


def _end(report: Report) -> int:
    return max((site.last_ns for site in report.sites), default=0)


def _regression(
    side: _Side, before: _Side | None, work: float, start_ns: int, end_ns: int, zero_ns: int
) -> Verdict | None:
    expected = work * before.kept_objects if before else 0.0
    more = side.kept_objects - expected
    # The expectation is itself a count: its variance is scaled by the work twice.
    deviation = float(np.sqrt(max(expected + work * expected, 1.0)))
    if more < max(MIN_MORE_OBJECTS, MIN_SIGMA * deviation):
        return None
    if side.last_ns - side.first_ns < MIN_SPREAD * max(end_ns - start_ns, 1):
        return None
    kept = side.kept_bytes - (work * before.kept_bytes if before else 0.0)
    if kept <= 0:
        return None
    seconds = max((end_ns - side.first_ns) / 1e9, 1e-9)
    rate = kept / seconds
    spread = Z95 * rate / float(np.sqrt(more))
    new = before is None
    return Verdict(
        verdict="leak",
        kind="regression",
        layer=side.layer,
        confidence=float(np.clip(0.97 - 1.0 / np.sqrt(more), 0.6, 0.97)),
        culprit=Culprit(side.culprit, side.stack, side.slab_cache, counter="live_bytes"),
        growth=Growth("live_bytes", rate, max(0.0, rate - spread), rate + spread),
        leak_start_s=max(0.0, (side.first_ns - zero_ns) / 1e9),
        kept_bytes=int(kept),
        kept_objects=round(more),
        sites=side.ids,
        reasons=(
            "the stack is new in head"
            if new
            else f"head keeps {side.kept_objects:,}, the baseline's work gives {expected:,.0f}",
            f"{round(more):,} more objects ({int(kept):,} bytes) are kept for the same work",
        ),
    )


def _by_culprit(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Sites of one culprit together: their rates add up, their intervals in squares."""
    merged: dict[tuple[str, str], Verdict] = {}
    for verdict in verdicts:
        assert verdict.culprit is not None and verdict.growth is not None and verdict.leak_start_s is not None
        key = (verdict.layer, verdict.culprit.frame)
        other = merged.get(key)
        if other is None or other.growth is None or other.leak_start_s is None:
            merged[key] = verdict
            continue
        rate = other.growth.bytes_per_s + verdict.growth.bytes_per_s
        width = float(
            np.hypot(
                other.growth.ci_high - other.growth.bytes_per_s, verdict.growth.ci_high - verdict.growth.bytes_per_s
            )
        )
        merged[key] = replace(
            other,
            growth=Growth("live_bytes", rate, max(0.0, rate - width), rate + width),
            leak_start_s=min(other.leak_start_s, verdict.leak_start_s),
            kept_bytes=other.kept_bytes + verdict.kept_bytes,
            kept_objects=other.kept_objects + verdict.kept_objects,
            sites=other.sites + verdict.sites,
        )
    return list(merged.values())


def _churns(side: _Side, before: _Side | None, work: float) -> bool:
    expected = work * before.allocated_objects if before else 0.0
    return side.allocated_objects >= max(MIN_MORE_OBJECTS, CHURN_RATIO * expected)

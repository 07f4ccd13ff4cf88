"""Head against baseline: which sites keep more than before for the same work.

Sites are the same where their keys are (:mod:`leakscope.detect.profile`), so that code may move. What the two runs
did is compared by counts of work (:mod:`leakscope.detect.work`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leakscope.correlate.wrappers import DEFERRED_CACHES, RECLAIMABLE_CACHES
from leakscope.detect.counts import least_sigmas, most_by_chance, sigmas
from leakscope.detect.profile import Key, Known, Profile, Side, known_of, profile_of, sum_of
from leakscope.detect.work import Work, work_of
from leakscope.model.results import Culprit, Growth, Report, Verdict
from leakscope.model.runs import Run

MIN_MORE_OBJECTS = 10
MIN_SPREAD = 0.3
"""A regression is allocated over at least this share of the run: start-up that grew once is none."""
CHURN_RATIO = 1.2
"""Allocations for the same work that rise by this much while nothing more is kept."""
MIN_CHURN_SHARE = 0.05
"""…and make this share of all objects or bytes that head frees."""
ALL_KEPT = 1.1
"""Allocated by kept objects: up to here a site frees next to nothing."""
BRANCH_SHARE = 0.75
"""Of a scattered regression a branch of the call tree is followed while it carries this share."""
FASTER = 1.2
"""A leak that both runs show is a regression from this ratio on, if the intervals of the two rates are apart."""
CANNOT_TELL = frozenset({"unusable_capture", "unsupported_schema", "partial_data", "missing_data"})
Z95 = 1.96


@dataclass(frozen=True)
class Change:
    """One site in both runs. ``expected_*``: what the baseline's figures give for the work of head."""

    what: str  # new, grown, same, improved, vanished
    key: Key
    side: Side  # of head; of the baseline where it vanished
    kept_objects: int
    kept_bytes: int
    expected_objects: float
    expected_bytes: float
    sigmas: float  # by how many standard deviations head exceeds the baseline
    allowed_objects: float = 0.0  # from so many on it is more than chance

    @property
    def more_bytes(self) -> float:
        """Bytes that head keeps beyond the baseline for the same work."""
        return self.kept_bytes - self.expected_bytes


@dataclass(frozen=True)
class Comparison:
    """``verdict`` leads; ``others`` are further regressions; ``known``: leaks of head that the baseline has as well."""

    verdict: Verdict
    others: tuple[Verdict, ...]
    work: Work
    changes: tuple[Change, ...] = ()
    known: tuple[Verdict, ...] = ()


def judge_pair(base: Report, head: Report, zero_ns: int = 1_000_000_000) -> tuple[Verdict, list[Verdict]]:
    """(the verdict, other regressions) of two reports. ``zero_ns``: time zero of head where its runs are not known."""
    ours, theirs = profile_of(base), profile_of(head)
    if not head.runs:
        theirs.run = Run(zero_ns=zero_ns)
    found = compare(ours, theirs, [head.verdict, *head.findings], head.runs)
    return found.verdict, list(found.others)


def compare(
    base: Profile, head: Profile, own: Sequence[Verdict], runs: Sequence[Run] = (), unit: str | None = None
) -> Comparison:
    """Compare ``head`` with ``base``. ``own``: what head's evidence shows by itself, the leading verdict first.
    ``runs``: those of head, by ``Side.source``. ``unit``: of work, see :func:`leakscope.detect.work.work_of`.

    ``leak``/``regression`` where head keeps more for the same work; what leaks the same in both is no regression.
    ``not_leak``/``more_churn`` where head allocates more and keeps no more. ``inconclusive`` where the two runs share
    too little to compare, or head's evidence is of no use.
    """
    work = work_of(base, head, unit)
    changes: list[Change] = []
    regressions: list[Verdict] = []
    comparable = bool(base.sides and head.sides and work.known)
    if comparable:
        changes = _changes(base, head, work)
        regressions = _regressions(changes, head, own, runs, work)
    known, faster, new = _other_leaks(base, own, work)
    regressions = sorted([*regressions, *faster], key=lambda v: -(v.growth.bytes_per_s if v.growth else 0.0))
    # A leak of head alone that has no site in the comparison fails by itself.
    regressions += new
    if not comparable:
        regressions += [v for v in own if v.verdict == "leak" and v.sites]
    else:
        regressed = {site for verdict in regressions for site in verdict.sites}
        known += [v for v in own if v.verdict == "leak" and v.sites and not regressed & set(v.sites)]
    if regressions:
        return Comparison(regressions[0], tuple(regressions[1:]), work, tuple(changes), tuple(known))
    return Comparison(_no_regression(base, head, own, work, changes, known), (), work, tuple(changes), tuple(known))


def _changes(base: Profile, head: Profile, work: Work) -> list[Change]:
    """Every site of either run, those that gained most bytes first."""
    found = []
    keys = sorted(base.sides.keys() | head.sides.keys())
    least = least_sigmas(len(keys))
    for key in keys:
        was, now = base.sides.get(key), head.sides.get(key)
        expected = work.ratio * was.kept_objects if was else 0.0
        kept = now.kept_objects if now else 0
        by = sigmas(kept, expected, work.ratio)
        enough = abs(kept - expected) >= MIN_MORE_OBJECTS and abs(by) >= least
        if now is None or (was is not None and was.kept_objects and not kept):
            what = "vanished" if enough else "same"
        elif was is None:
            what = "new" if enough else "same"
        else:
            what = "same" if not enough else ("grown" if kept > expected else "improved")
        side = now or was
        assert side is not None
        found.append(
            Change(
                what,
                key,
                side,
                kept,
                now.kept_bytes if now else 0,
                expected,
                work.ratio * was.kept_bytes if was else 0.0,
                by,
                max(most_by_chance(expected, work.ratio, least), expected + MIN_MORE_OBJECTS),
            )
        )
    return sorted(found, key=lambda c: (-c.more_bytes, c.key))


def _regressions(
    changes: Sequence[Change], head: Profile, own: Sequence[Verdict], runs: Sequence[Run], work: Work
) -> list[Verdict]:
    grown = [change for change in changes if change.what in ("new", "grown") and _can_leak(change.side)]
    rising = [change for change in grown if _rises([change]) and _spread([change], head, runs)]
    by_culprit: dict[tuple[str, str], list[Change]] = {}
    for change in rising:
        by_culprit.setdefault((change.side.layer, change.side.culprit), []).append(change)
    verdicts = [_regression(found, found[0].side.culprit, head, own, runs, work) for found in by_culprit.values()]
    if not verdicts:
        verdicts = _scattered(changes, head, own, runs, work)
    return sorted(verdicts, key=lambda v: -(v.growth.bytes_per_s if v.growth else 0.0))


def _can_leak(side: Side) -> bool:
    """Not what has levelled off, nor what the kernel gives back by itself."""
    cache = side.slab_cache
    given_back = cache and (RECLAIMABLE_CACHES.fullmatch(cache) or DEFERRED_CACHES.fullmatch(cache))
    return not side.levelled_off and not given_back


def _rises(changes: Sequence[Change]) -> bool:
    """More bytes are kept, and the interval of head's own rate, where it is known, excludes zero."""
    rate = None
    for change in changes:
        rate = sum_of(rate, change.side.growth)
    return sum(c.more_bytes for c in changes) > 0 and (rate is None or rate.ci_low > 0)


def _spread(changes: Sequence[Change], head: Profile, runs: Sequence[Run]) -> bool:
    first = min(change.side.first_ns for change in changes)
    last = max(change.side.last_ns for change in changes)
    start_ns, end_ns, _ = _window(changes[0].side, head, runs)
    return last - first >= MIN_SPREAD * max(end_ns - start_ns, 1)


def _window(side: Side, head: Profile, runs: Sequence[Run]) -> tuple[int, int, int]:
    """(start, end, time zero) of the recording that a site is in: from its first allocation to the last."""
    run = runs[side.source] if side.source < len(runs) else head.run
    same = [other for other in head.sides.values() if other.source == side.source]
    start_ns = min(other.first_ns for other in same)
    end_ns = max(other.last_ns for other in same)
    return start_ns, max(end_ns, start_ns + 1), run.zero_ns


def _regression(
    changes: Sequence[Change],
    culprit: str,
    head: Profile,
    own: Sequence[Verdict],
    runs: Sequence[Run],
    work: Work,
    scattered: bool = False,
) -> Verdict:
    """Sites of one culprit together; the first keeps most."""
    side = changes[0].side
    more = sum(c.kept_objects - c.expected_objects for c in changes)
    kept = sum(c.more_bytes for c in changes)
    _, end_ns, zero_ns = _window(side, head, runs)
    first_ns = min(_start_ns(changes, own, zero_ns), end_ns - 1)
    rate = kept / max((end_ns - first_ns) / 1e9, 1e-9)
    spread = Z95 * rate / float(np.sqrt(max(more, 1.0)))
    per_unit = (work.unit, kept / work.head) if work.head and work.unit not in ("allocations", "seconds") else None
    now = sum(c.kept_objects for c in changes)
    expected = sum(c.expected_objects for c in changes)
    stacks = "the stack is" if len(changes) == 1 else f"{len(changes):,} stacks are"
    said = f"head keeps {now:,} objects, the baseline's work gives {expected:,.0f}"
    if all(change.what == "new" for change in changes):
        said = f"{stacks} new in head"
    elif scattered:
        said = f"{len(changes):,} stacks below it keep a little each; {said}"
    return Verdict(
        verdict="leak",
        kind="regression",
        layer=side.layer,
        confidence=float(np.clip(0.97 - 1.0 / np.sqrt(max(more, 1.0)), 0.6, 0.97)),
        culprit=Culprit(culprit, side.stack, side.slab_cache, counter="live_bytes"),
        growth=Growth("live_bytes", rate, max(0.0, rate - spread), rate + spread, per_unit),
        leak_start_s=max(0.0, (first_ns - zero_ns) / 1e9),
        kept_bytes=int(kept),
        kept_objects=round(more),
        sites=tuple(site for c in changes for site in c.side.ids),
        reasons=(
            said,
            f"{round(more):,} more objects ({int(kept):,} bytes) are kept for the same work: "
            f"{sigmas(now, expected, work.ratio):,.1f} standard deviations",
        ),
    )


def _start_ns(changes: Sequence[Change], own: Sequence[Verdict], zero_ns: int) -> int:
    """When the sites began to keep more: with their first allocation, or, where most of what they allocate is freed,
    when head's own verdict says."""
    first_ns = min(change.side.first_ns for change in changes)
    kept = sum(change.kept_objects for change in changes)
    if sum(change.side.allocated_objects for change in changes) <= ALL_KEPT * kept:
        return first_ns
    ids = {site for change in changes for site in change.side.ids}
    starts = [v.leak_start_s for v in own if v.verdict == "leak" and ids & set(v.sites) and v.leak_start_s is not None]
    return max(first_ns, zero_ns + round(min(starts) * 1e9)) if starts else first_ns


def _scattered(
    changes: Sequence[Change], head: Profile, own: Sequence[Verdict], runs: Sequence[Run], work: Work
) -> list[Verdict]:
    """A regression that no single stack shows: the tree of what is kept more is walked from its root while one branch
    carries nearly all of it; where it forks, the frame above is the culprit."""
    found = []
    for layer in sorted({change.side.layer for change in changes}):
        inside = [c for c in changes if c.side.layer == layer and _can_leak(c.side)]
        if not _certain(inside, len(changes), work):
            continue
        total = sum(max(0.0, c.more_bytes) for c in inside)
        depth = 0
        while True:
            branches: dict[str, float] = {}
            for change in inside:
                if depth < len(change.side.frames):
                    frame = change.side.frames[depth]
                    branches[frame] = branches.get(frame, 0.0) + max(0.0, change.more_bytes)
            best = max(sorted(branches), key=lambda frame: branches[frame], default="")
            if not best or branches[best] < BRANCH_SHARE * total:
                break
            inside = [c for c in inside if depth < len(c.side.frames) and c.side.frames[depth] == best]
            depth += 1
        rising = [c for c in inside if c.more_bytes > 0]
        if depth and _certain(inside, len(changes), work) and _rises(inside) and _spread(rising, head, runs):
            found.append(_regression(inside, inside[0].side.frames[depth - 1], head, own, runs, work, scattered=True))
    return found


def _certain(changes: Sequence[Change], sites: int, work: Work) -> bool:
    """Whether these sites together exceed the baseline beyond chance; ``sites``: of how many they were chosen."""
    kept = sum(c.kept_objects for c in changes)
    expected = sum(c.expected_objects for c in changes)
    return kept - expected >= MIN_MORE_OBJECTS and sigmas(kept, expected, work.ratio) >= least_sigmas(sites)


def _other_leaks(
    base: Profile, own: Sequence[Verdict], work: Work
) -> tuple[list[Verdict], list[Verdict], list[Verdict]]:
    """(known in the baseline, faster than there, new) among leaks that have no sites: counters, caches, snapshots."""
    before = {(leak.layer, leak.what): leak for leak in base.leaks}
    known, faster, new = [], [], []
    for verdict in own:
        if verdict.verdict != "leak" or verdict.sites:
            continue
        leak = known_of(verdict)
        was = before.get((leak.layer, leak.what))
        if was is None:
            new.append(replace(verdict, reasons=("the baseline does not have this leak", *verdict.reasons)))
        elif said := _grew_faster(was, leak, work):
            faster.append(replace(verdict, kind="regression", reasons=(said, *verdict.reasons)))
        else:
            known.append(verdict)
    return known, faster, new


def _grew_faster(was: Known, now: Known, work: Work) -> str:
    """Why a leak of both runs is a regression; '' where it is none. Rates are compared by unit of work if both say."""
    if was.growth is None or now.growth is None:
        return ""
    apart = now.growth.ci_low > was.growth.ci_high
    ours, theirs = was.growth.per_unit, now.growth.per_unit
    if ours and theirs and ours[0] == theirs[0]:
        ratio = theirs[1] / ours[1] if ours[1] > 0 else float("inf")
        width = (was.growth.ci_high / was.growth.bytes_per_s) if was.growth.bytes_per_s > 0 else 1.0
        low = (now.growth.ci_low / now.growth.bytes_per_s) if now.growth.bytes_per_s > 0 else 1.0
        apart = theirs[1] * low > ours[1] * width
        what = f"{theirs[1]:,.1f} bytes a unit of {theirs[0]}, in the baseline {ours[1]:,.1f}"
    else:
        ratio = now.growth.bytes_per_s / was.growth.bytes_per_s if was.growth.bytes_per_s > 0 else float("inf")
        what = f"{now.growth.bytes_per_s:,.0f} bytes/s, in the baseline {was.growth.bytes_per_s:,.0f}"
    return f"it grows faster: {what}" if apart and ratio >= FASTER else ""


def _no_regression(
    base: Profile,
    head: Profile,
    own: Sequence[Verdict],
    work: Work,
    changes: Sequence[Change],
    known: Sequence[Verdict],
) -> Verdict:
    lead = own[0] if own else Verdict("inconclusive", "missing_data")
    layer = next(iter(sorted({side.layer for side in head.sides.values()})), lead.layer)
    if lead.verdict == "inconclusive" and (lead.kind in CANNOT_TELL or not (lead.sites or changes)):
        return lead
    if bool(base.sides) != bool(head.sides):
        which = "the baseline" if head.sides else "head"
        return _cannot("missing_data", f"{which} has no allocations to compare", "allocations")
    if head.sides and not work.known:
        return _cannot(
            "partial_data", "the two runs share too few allocations to compare their work", "the same workload"
        )
    said = f"head did {work.ratio:.2f} times the work of the baseline ({work.unit})"
    reasons = tuple(
        f"{(v.culprit and (v.culprit.frame or v.culprit.counter)) or v.layer} leaks as in the baseline" for v in known
    )
    if not changes:
        if lead.verdict == "not_leak":
            return lead
        return Verdict("not_leak", "cache_warmup", lead.layer, 0.8, reasons=(*reasons, "nothing grows faster"))
    if (worst := _churning(base, head, work)) is not None:
        churned = f"{worst.culprit or 'unknown code'} allocates more for the same work and frees it"
        culprit = Culprit(worst.culprit, worst.stack)
        return Verdict("not_leak", "more_churn", worst.layer, 0.85, culprit, reasons=(churned, said, *reasons))
    none = "no site keeps more for the same work"
    return Verdict("not_leak", "cache_warmup", layer, 0.85, reasons=(none, said, *reasons))


def _cannot(kind: str, reason: str, missing: str) -> Verdict:
    return Verdict("inconclusive", kind, confidence=0.5, reasons=(reason,), missing=(missing,))


def _churning(base: Profile, head: Profile, work: Work) -> Side | None:
    """The site that frees most bytes of those that free more objects than the baseline's work gives, beyond chance and
    by a share of all that is freed, in objects or bytes, that is worth a word."""
    freed = {key: side.allocated_objects - side.kept_objects for key, side in head.sides.items()}
    size = {key: side.allocated_bytes - side.kept_bytes for key, side in head.sides.items()}
    objects, bytes_ = sum(freed.values()), sum(size.values())
    found = []
    for key, side in head.sides.items():
        was = base.sides.get(key)
        expected = work.ratio * (was.allocated_objects - was.kept_objects) if was else 0.0
        more = freed[key] - expected
        share = max(more / max(objects, 1), more / max(freed[key], 1) * size[key] / max(bytes_, 1))
        enough = share >= MIN_CHURN_SHARE and more >= max(MIN_MORE_OBJECTS, (CHURN_RATIO - 1) * expected)
        if enough and sigmas(freed[key], expected, work.ratio) >= least_sigmas(len(freed)):
            found.append(side)
    return max(found, key=lambda side: (size[side.key], side.key), default=None)

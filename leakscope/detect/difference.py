"""Two reports side by side: layers, sites and counters, with the keys and the rules of the gate."""

from __future__ import annotations

from leakscope.detect.pair import Change, compare
from leakscope.detect.profile import (
    COMPARED_ANYWAY,
    Profile,
    Side,
    fingerprint,
    profile_of,
    stable_frame,
    sum_of,
)
from leakscope.model.diff import CounterDiff, Diff, Holding, LayerDiff, SiteDiff
from leakscope.model.results import Report
from leakscope.model.runs import CounterCourse
from leakscope.model.words import LAYERS


def difference(a: Report | Profile, b: Report, unit: str | None = None) -> Diff:
    """B against A; reports were made with their runs. ``unit``: of work (:func:`leakscope.detect.work.work_of`).

    A profile is what a baseline file holds of a run: its layers are the sums of its sites, it has no rates and no
    counters. Raises BadInputError for a unit that one of them does not have.
    """
    ours, theirs = profile_of(a) if isinstance(a, Report) else a, profile_of(b)
    found = compare(ours, theirs, [b.verdict, *b.findings], b.runs, unit)
    work = found.work
    kinds = _frame_kinds(*(report for report in (a, b) if isinstance(report, Report)))
    # Where the comparison found too little in common it has no changes: the sites then stand as they are.
    sites = tuple(_site(change, ours, theirs, kinds) for change in found.changes) or _uncompared(ours, theirs, kinds)
    return Diff(
        found.verdict,
        found.others,
        work.unit,
        work.base,
        work.head,
        work.ratio,
        work.known,
        _layers(a, b, work.ratio if work.known else 1.0),
        sites,
        _counters(ours, theirs),
    )


def _frame_kinds(*reports: Report) -> dict[str, str]:
    """Kinds of the frames by which sites are found, of those that the reports have."""
    return {
        stable_frame(text): kind
        for report in reports
        for site in report.sites
        for text, kind in zip(site.stack, site.frame_kinds, strict=False)
    }


def _layers(a: Report | Profile, b: Report, ratio: float) -> tuple[LayerDiff, ...]:
    before, after = _by_layer(a) if isinstance(a, Report) else _of_sides(a), _by_layer(b)
    return tuple(
        LayerDiff(layer, was := before.get(layer, Holding()), after.get(layer, Holding()), ratio * was.live_bytes)
        for layer in LAYERS
        if layer in before or layer in after
    )


def _by_layer(report: Report) -> dict[str, Holding]:
    """Evidence of several captures together."""
    found: dict[str, Holding] = {}
    for total in report.layers:
        add = Holding(total.live_bytes, total.live_objects, total.allocated_bytes, total.growth)
        found[total.layer] = _sum(found.get(total.layer, Holding()), add)
    return found


def _of_sides(profile: Profile) -> dict[str, Holding]:
    found: dict[str, Holding] = {}
    for side in profile.sides.values():
        if side.kind not in COMPARED_ANYWAY:  # a segment of the pool has these bytes
            found[side.layer] = _sum(found.get(side.layer, Holding()), _holding(side))
    return found


def _sum(one: Holding, other: Holding) -> Holding:
    return Holding(
        one.live_bytes + other.live_bytes,
        one.live_objects + other.live_objects,
        one.allocated_bytes + other.allocated_bytes,
        sum_of(one.growth, other.growth),
    )


def _site(change: Change, a: Profile, b: Profile, kinds: dict[str, str]) -> SiteDiff:
    side = change.side
    return SiteDiff(
        change.what,
        side.layer,
        side.kind,
        side.culprit,
        side.slab_cache,
        side.stack,
        _holding(a.sides.get(change.key)),
        _holding(b.sides.get(change.key)),
        change.expected_bytes,
        fingerprint(change.key),
        tuple((frame, kinds.get(frame, "unknown")) for frame in side.frames),
    )


def _holding(side: Side | None) -> Holding:
    if side is None:
        return Holding()
    return Holding(side.kept_bytes, side.kept_objects, side.allocated_bytes, side.growth)


def _uncompared(a: Profile, b: Profile, kinds: dict[str, str]) -> tuple[SiteDiff, ...]:
    """Sites of runs that share too little: those of both are not called changed, as nothing says what is chance."""
    found = []
    for key in a.sides.keys() | b.sides.keys():
        was, now = a.sides.get(key), b.sides.get(key)
        what = "same" if was and now else ("new" if now else "vanished")
        kept = was.kept_bytes if was else 0
        found.append(_site(Change(what, key, now or was or Side(key, ()), 0, 0, 0.0, kept, 0.0), a, b, kinds))
    return tuple(sorted(found, key=lambda site: (-site.more_bytes, site.key)))


def _counters(a: Profile, b: Profile) -> tuple[CounterDiff, ...]:
    before = {course.name: course for course in a.run.counters}
    after = {course.name: course for course in b.run.counters}
    found = [_counter(name, before.get(name), after.get(name)) for name in before.keys() | after.keys()]
    return tuple(sorted(found, key=lambda c: (not c.apart, not c.in_bytes, -abs(c.more), c.name)))


def _counter(name: str, a: CounterCourse | None, b: CounterCourse | None) -> CounterDiff:
    apart = bool(a and b and a.rate and b.rate and (b.rate[0] > a.rate[2] or b.rate[2] < a.rate[0]))
    return CounterDiff(name, a, b, apart, bool((b or a or CounterCourse(name, 0, 0, 0, 0, None, False)).in_bytes))

"""Two reports side by side: layers, sites and counters, with the keys and the rules of the gate."""

from __future__ import annotations

from leakscope.detect.pair import Change, compare
from leakscope.detect.profile import Profile, Side, fingerprint, profile_of, sum_of
from leakscope.model.diff import CounterDiff, Diff, Holding, LayerDiff, SiteDiff
from leakscope.model.results import Report
from leakscope.model.runs import CounterCourse
from leakscope.model.words import LAYERS


def difference(a: Report, b: Report, unit: str | None = None) -> Diff:
    """B against A; both were made with their runs. ``unit``: of work (:func:`leakscope.detect.work.work_of`).

    Raises BadInputError for a unit that one of them does not have.
    """
    ours, theirs = profile_of(a), profile_of(b)
    found = compare(ours, theirs, [b.verdict, *b.findings], b.runs, unit)
    work = found.work
    # Where the comparison found too little in common it has no changes: the sites then stand as they are.
    sites = tuple(_site(change, ours, theirs) for change in found.changes) or _uncompared(ours, theirs)
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


def _layers(a: Report, b: Report, ratio: float) -> tuple[LayerDiff, ...]:
    before, after = _by_layer(a), _by_layer(b)
    return tuple(
        LayerDiff(layer, was := before.get(layer, Holding()), after.get(layer, Holding()), ratio * was.live_bytes)
        for layer in LAYERS
        if layer in before or layer in after
    )


def _by_layer(report: Report) -> dict[str, Holding]:
    """Evidence of several captures together."""
    found: dict[str, Holding] = {}
    for total in report.layers:
        one = found.get(total.layer, Holding())
        found[total.layer] = Holding(
            one.live_bytes + total.live_bytes,
            one.live_objects + total.live_objects,
            one.allocated_bytes + total.allocated_bytes,
            sum_of(one.growth, total.growth),
        )
    return found


def _site(change: Change, a: Profile, b: Profile) -> SiteDiff:
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
    )


def _holding(side: Side | None) -> Holding:
    if side is None:
        return Holding()
    return Holding(side.kept_bytes, side.kept_objects, side.allocated_bytes, side.growth)


def _uncompared(a: Profile, b: Profile) -> tuple[SiteDiff, ...]:
    """Sites of runs that share too little: those of both are not called changed, as nothing says what is chance."""
    found = []
    for key in a.sides.keys() | b.sides.keys():
        was, now = a.sides.get(key), b.sides.get(key)
        what = "same" if was and now else ("new" if now else "vanished")
        kept = was.kept_bytes if was else 0
        found.append(_site(Change(what, key, now or was or Side(key, ()), 0, 0, 0.0, kept, 0.0), a, b))
    return tuple(sorted(found, key=lambda site: (-site.more_bytes, site.key)))


def _counters(a: Profile, b: Profile) -> tuple[CounterDiff, ...]:
    before = {course.name: course for course in a.run.counters}
    after = {course.name: course for course in b.run.counters}
    found = [_counter(name, before.get(name), after.get(name)) for name in before.keys() | after.keys()]
    return tuple(sorted(found, key=lambda c: (not c.apart, not c.in_bytes, -abs(c.more), c.name)))


def _counter(name: str, a: CounterCourse | None, b: CounterCourse | None) -> CounterDiff:
    apart = bool(a and b and a.rate and b.rate and (b.rate[0] > a.rate[2] or b.rate[2] < a.rate[0]))
    return CounterDiff(name, a, b, apart, bool((b or a or CounterCourse(name, 0, 0, 0, 0, None, False)).in_bytes))

"""What the counters of a live recording add to the verdict of its events.

Events decide first: what they see kept needs no minimum time. Counters see what no probe can (memory that was reserved
early and touched late, allocators that were never traced), but they need time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from leakscope.detect.counters import held_by_allocator
from leakscope.detect.recorded import Subject
from leakscope.detect.recorded_lives import Recorded
from leakscope.detect.series.judge import MIN_SPAN_S, Judged, judge
from leakscope.model.results import Culprit, Report, Verdict

MAIN_SHARE = 0.75
"""A process that carries this share of the growth of all is named with it."""


@dataclass(frozen=True)
class OfSubject:
    """A subject and what its counters say."""

    subject: Subject
    judged: Judged


def judge_recorded(recorded: Recorded | None) -> list[OfSubject] | None:
    """Judge the counters of all recordings of a capture together; None when there are none, [] when the readings
    span less than MIN_SPAN_S."""
    if recorded is None:
        return None
    return judge_subjects(recorded.subjects) if recorded.span_s >= MIN_SPAN_S else []


def judge_subjects(found: Sequence[Subject]) -> list[OfSubject]:
    """Judge each subject; what is said of one is said with its name."""
    return [OfSubject(subject, judge(subject.counters)) for subject in found]


def with_recorded(
    report: Report, found: list[OfSubject] | None, layer: str | None, has_events: bool, has_heap: bool
) -> Report:
    """``report`` of the events of recordings, with what their counters say.

    :param has_heap: malloc was recorded, so that the events tell what is in use from what its allocator holds.
    """
    if found is None:
        return report
    verdicts = ranked(found) if found else [too_short()]
    verdicts = [v for v in verdicts if layer is None or v.layer in ("", layer)]
    if not verdicts:
        return report
    own = report.verdict
    if has_heap and own.verdict == "not_leak":
        verdicts = [held_by_allocator(v) if _held(v) else v for v in verdicts]
    leaks = [v for v in verdicts if v.verdict == "leak"]
    rest = [v for v in verdicts if v.verdict != "leak"]
    if own.verdict == "leak" and has_events:
        same = [v for v in leaks if v.layer == own.layer and v.kind == "retained_growth"]
        if same and same[0].growth:
            said = f"{same[0].growth.counter} rises as well, by {same[0].growth.bytes_per_s:,.0f} bytes a second"
            report.verdict = replace(own, reasons=(*own.reasons, said))
        report.findings += [v for v in leaks if v not in same[:1]] + _telling(rest)
        return report
    if leaks:
        first = leaks[0]
        missing = tuple(dict.fromkeys((*first.missing, *own.missing)))
        others = [own, *report.findings] if has_events else report.findings
        report.verdict, report.findings = replace(first, missing=missing), [*leaks[1:], *others, *_telling(rest)]
        return report
    if not has_events and found:
        report.verdict, report.findings = verdicts[0], [*verdicts[1:], *report.findings]
        return report
    report.findings += _telling(rest)
    return report


def _held(verdict: Verdict) -> bool:
    return verdict.verdict == "leak" and verdict.layer == "host" and verdict.kind == "retained_growth"


def _telling(verdicts: list[Verdict]) -> list[Verdict]:
    """Those that say more than that nothing grows."""
    return [v for v in verdicts if v.verdict != "not_leak" or v.culprit is not None]


def ranked(found: Sequence[OfSubject]) -> list[Verdict]:
    """All verdicts, those of the recorded processes together first; growth that is told twice is told once."""
    service = next((one for one in found if one.subject.kind == "service"), None)
    processes = [one for one in found if one.subject.kind == "process"]
    shared = [one for one in found if one.subject.kind not in ("service", "process")]
    leading: list[Verdict] = []
    told: set[str] = set()
    if service is not None:
        for verdict in (service.judged.verdict, *service.judged.findings):
            if verdict.verdict == "leak":
                told.add(verdict.kind)
            leading.append(_with_main_process(verdict, processes))
    others: list[Verdict] = []
    for one in processes:
        for verdict in (one.judged.verdict, *one.judged.findings):
            if verdict.verdict == "leak" and verdict.kind not in told:
                others.append(_named(verdict, one.subject))
    for one in shared:
        for verdict in (one.judged.verdict, *one.judged.findings):
            if verdict.verdict == "leak":
                others.append(_shared(verdict, one.subject) if one.subject.shared else _named(verdict, one.subject))
    order = ("leak", "inconclusive", "not_leak")
    if not leading:
        return others
    return [*sorted(leading[:1] + others, key=lambda v: order.index(v.verdict)), *leading[1:]]


def _with_main_process(verdict: Verdict, processes: Sequence[OfSubject]) -> Verdict:
    """The verdict on all, with the one process that carries its growth."""
    if verdict.verdict != "leak" or not verdict.growth or not verdict.culprit:
        return verdict
    for one in processes:
        for of_one in (one.judged.verdict, *one.judged.findings):
            growth = of_one.growth
            same = of_one.kind == verdict.kind and growth and growth.counter == verdict.growth.counter
            if same and growth and growth.bytes_per_s >= MAIN_SHARE * verdict.growth.bytes_per_s:
                return _named(verdict, one.subject)
    return verdict


def _named(verdict: Verdict, subject: Subject) -> Verdict:
    culprit = verdict.culprit or Culprit()
    said = (f"in {subject.name}", *verdict.reasons)
    return replace(verdict, culprit=replace(culprit, object=culprit.object or subject.name), reasons=said)


def _shared(verdict: Verdict, subject: Subject) -> Verdict:
    """Growth of what others have a part in: no verdict on the recorded processes."""
    return replace(
        verdict,
        verdict="inconclusive",
        kind="partial_data",
        confidence=0.5,
        reasons=(f"{subject.name} counts others too, not only what was recorded", *verdict.reasons),
        missing=(f"a recording of all that {subject.name} counts", *verdict.missing),
    )


def too_short() -> Verdict:
    """Of counters that were read for less than MIN_SPAN_S."""
    return Verdict(
        "inconclusive",
        "window_too_short",
        confidence=0.5,
        reasons=(f"counters were read for less than {MIN_SPAN_S:,.0f} s: they prove nothing beside the events",),
        missing=(f"counters over {MIN_SPAN_S:,.0f} s at least",),
    )

"""The outcome of a leak test in words: what grew, by how much an iteration, and the chain of calls down to it."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from typing import TYPE_CHECKING

from leakscope.testing.lines import Line
from leakscope.testing.outcome import Course, Outcome

if TYPE_CHECKING:
    from leakscope.model.results import Verdict

PLUMBING = ("/lib/python3", "<frozen")
MAX_LOSSES = 3


def text(outcome: Outcome) -> str:
    """The whole report, plain text; control characters of untrusted names are escaped."""
    from leakscope.report.text import printable

    return "\n".join(printable(line) for line in _lines(outcome))


def summary(outcome: Outcome) -> str:
    """The judgement in a line."""
    chosen = outcome.chosen
    how = f"over {chosen.repeat} iterations after {chosen.warmup} of warm-up"
    if outcome.verdict == "leak":
        return f"memory is left behind in every part of the run, {how}"
    if outcome.over_budget:
        return f"{outcome.total_bytes:,} bytes are left behind {how}, {chosen.max_growth_bytes:,} are allowed"
    if outcome.verdict == "inconclusive":
        return f"cannot be told {how}: events were lost"
    return f"no leak {how}"


def _lines(outcome: Outcome) -> Iterator[str]:
    yield f"leakscope: {summary(outcome)}"
    if not outcome.recorded:
        yield f"not recorded, so by counters of this process alone and without chains: {outcome.reason}"
    for finding in outcome.findings:
        yield from _finding(finding, outcome)
    for line in outcome.lines:
        yield from _line(line)
    for course in outcome.rising:
        yield f"{course.counter.layer}: {_course(course)} an iteration: {course.counter.says}"
    if outcome.over_budget and outcome.verdict != "leak":
        yield from _largest(outcome)
    elif outcome.total_bytes and not outcome.passed:
        grown = ", ".join(f"{layer} {size:,} bytes" for layer, size in outcome.grown_bytes.items() if size)
        yield f"left behind in all: {grown}" + ("; more than max_growth" if outcome.over_budget else "")
    if outcome.losses and outcome.verdict != "not_leak":
        rest = len(outcome.losses) - MAX_LOSSES
        yield "lost: " + "; ".join(outcome.losses[:MAX_LOSSES]) + (f"; {rest} more" if rest > 0 else "")


def _finding(finding: Verdict, outcome: Outcome) -> Iterator[str]:
    from leakscope.report.chain_text import chain_line

    frame = (finding.culprit and finding.culprit.frame) or "unknown code"
    count = max(1, outcome.chosen.repeat)
    each = finding.growth.per_unit[1] if finding.growth and finding.growth.per_unit else finding.kept_bytes / count
    objects = finding.kept_objects / count
    yield (
        f"{finding.layer}: {_number(each)} bytes in {_number(objects)} objects an iteration by {frame} ({finding.kind})"
    )
    chain = outcome.chains.get(finding.sites[0])
    if chain is not None:
        yield f"    {chain_line(chain, finding.culprit.frame if finding.culprit else '')}"
    if finding.verdict != "leak":
        yield f"    {'; '.join((*finding.reasons, *finding.missing))}"
    elif finding.culprit and len(finding.culprit.slab_caches) > 1:
        yield f"    slab caches: {', '.join(finding.culprit.slab_caches)}"


def _line(line: Line) -> Iterator[str]:
    own = [frame for frame in line.stack if not any(part in frame for part in PLUMBING)] or list(line.stack)
    yield (
        f"python: {_number(line.bytes_each)} bytes in {_number(line.blocks_each)} blocks an iteration, "
        f"allocated at {own[-1]} (tracemalloc)"
    )
    file, _, number = own[-1].rpartition(":")
    if number.isdigit() and (source := linecache.getline(file, int(number)).strip()):
        yield f"    {source}"


def _course(course: Course) -> str:
    return f"{course.each:+,.4g} {course.counter.unit}"


def _largest(outcome: Outcome) -> Iterator[str]:
    """Who keeps most of a growth that is no leak."""
    for layer, size in outcome.grown_bytes.items():
        if size:
            yield f"{layer}: {size:,} bytes in all"
    for site in outcome.sites:
        if site.growth and site.growth.per_unit:
            kept = site.growth.per_unit[1] * outcome.chosen.repeat
            yield f"    {_number(kept)} bytes by {site.culprit_frame or site.kind} ({site.slab_cache or site.kind})"


def _number(value: float) -> str:
    """A mean, without decimals where it has none."""
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-6 else f"{value:,.1f}"

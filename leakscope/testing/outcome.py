"""The judgement of one leak test: what the recording and the counters of this process say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakscope.testing.counters import COUNTERS, DESCRIPTORS, HEAP, MAPPED, RESIDENT, Counter
from leakscope.testing.settings import Settings, to_json

if TYPE_CHECKING:
    from leakscope.model.results import Chain, Report, Site, Verdict
    from leakscope.testing.lines import Line

REPEATER = str(Path(__file__).with_name("repeat.py"))
"""Frames down to this file's are those of the test runner."""
MAX_SITES = 5


@dataclass(frozen=True)
class Course:
    """A counter over the judged iterations: its mean growth by iteration, and whether it rises in every part."""

    counter: Counter
    first: int
    last: int
    each: float
    rises: bool

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "unit": self.counter.unit,
            "first": self.first,
            "last": self.last,
            "per_iteration": round(self.each, 3),
            "rises": self.rises,
        }


@dataclass
class Outcome:
    """``findings`` are leaks and what cannot be told, in the layers that were asked for; ``courses`` the counters.

    ``grown_bytes`` is what all judged iterations left behind by layer (of samplers alone: the growth of resident
    memory). ``lines``: Python lines that keep something in each iteration. ``recorded``: else ``reason`` says why not.
    """

    chosen: Settings
    recorded: bool
    reason: str = ""
    findings: list[Verdict] = field(default_factory=list)
    chains: dict[str, Chain] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    courses: list[Course] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    grown_bytes: dict[str, int] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)

    @property
    def leaks(self) -> list[Verdict]:
        """Findings that are leaks."""
        return [finding for finding in self.findings if finding.verdict == "leak"]

    @property
    def rising(self) -> list[Course]:
        """Counters that prove a leak by themselves."""
        return [course for course in self.courses if course.rises and _proves(course.counter, self)]

    @property
    def total_bytes(self) -> int:
        """What the judged iterations left behind in all."""
        return sum(self.grown_bytes.values())

    @property
    def over_budget(self) -> bool:
        """Whether that is more than was allowed."""
        budget = self.chosen.max_growth_bytes
        return budget is not None and self.total_bytes > budget

    @property
    def verdict(self) -> str:
        """leak, not_leak or inconclusive."""
        if self.leaks or self.rising:
            return "leak"
        return "inconclusive" if self.findings else "not_leak"

    @property
    def passed(self) -> bool:
        """Whether the test passes."""
        return self.verdict != "leak" and not self.over_budget

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "verdict": self.verdict,
            "passed": self.passed,
            "recorded": self.recorded,
            "not_recorded_because": self.reason or None,
            "settings": to_json(self.chosen),
            "grown_bytes": dict(self.grown_bytes),
            "over_budget": self.over_budget,
            "findings": [finding.to_json() for finding in self.findings],
            "chains": [chain.to_json() for chain in self.chains.values()],
            "python_lines": [line.to_json() for line in self.lines],
            "counters": {course.counter.name: course.to_json() for course in self.courses},
            "losses": self.losses,
        }


def _proves(counter: Counter, outcome: Outcome) -> bool:
    """Whether a counter counts: of what a recording sees byte by byte, the recording decides."""
    if not counter.proves or counter.layer not in outcome.chosen.layers:
        return False
    return not outcome.recorded or not (counter == MAPPED or (counter == HEAP and outcome.chosen.heap))


def courses_of(series: Mapping[str, Sequence[int]]) -> list[Course]:
    """The course of each counter by name; its first reading is from before the first judged iteration."""
    import numpy as np

    from leakscope.detect.growth import steadily_rises

    counters = [counter for counter in COUNTERS if counter.name in series]
    values = np.array([series[counter.name] for counter in counters], dtype=np.float64)
    return [
        Course(counter, int(row[0]), int(row[-1]), float(row[-1] - row[0]) / (len(row) - 1), bool(rises))
        for counter, row, rises in zip(counters, values, steadily_rises(values), strict=True)
    ]


def from_samplers(chosen: Settings, courses: Sequence[Course], reason: str) -> Outcome:
    """What the counters alone can say."""
    outcome = Outcome(chosen, recorded=False, reason=reason, courses=list(courses))
    resident = next((course for course in courses if course.counter == RESIDENT), None)
    if resident is not None and "host" in chosen.layers:
        outcome.grown_bytes["host"] = max(0, resident.last - resident.first)
    return outcome


def from_recording(
    chosen: Settings, courses: Sequence[Course], capture: Path, windows: Sequence[tuple[int, int]]
) -> Outcome:
    """Judge a capture by iterations. Raises LeakscopeError for one that cannot be read, duckdb.Error as attribute."""
    from leakscope.capture import Capture
    from leakscope.detect.attribution import Options, attribute
    from leakscope.detect.iterations import Iterations

    descriptors = any(course.rises for course in courses if course.counter == DESCRIPTORS)
    opened = Capture.open(capture)
    with opened.connect(memory_limit="2GiB") as con:
        report = attribute(con, opened.manifest, Options(iterations=Iterations(tuple(windows), descriptors)))
    return _of_report(chosen, courses, report, len(windows))


def _of_report(chosen: Settings, courses: Sequence[Course], report: Report, count: int) -> Outcome:
    findings = [
        finding for finding in (report.verdict, *report.findings)
        if finding.layer in chosen.layers and finding.sites and finding.verdict != "not_leak"
    ]  # fmt: skip
    named = {finding.sites[0] for finding in findings}
    grown = [s for s in report.sites if s.layer in chosen.layers and s.growth and s.growth.per_unit]
    grown.sort(key=lambda site: (-(site.growth.per_unit or ("", 0.0))[1] if site.growth else 0.0, site.id))
    return Outcome(
        chosen,
        recorded=True,
        findings=findings,
        chains={chain.site: _below_runner(chain) for chain in report.chains if chain.site in named},
        sites=grown[:MAX_SITES],
        courses=list(courses),
        grown_bytes={
            total.layer: round(total.growth.per_unit[1] * count)
            for total in report.layers
            if total.layer in chosen.layers and total.growth and total.growth.per_unit
        },
        losses=[f"{row.source}: {row.what} {row.value:,}" for row in report.losses if row.value],
    )


def _below_runner(chain: Chain) -> Chain:
    """The chain from the test function on."""
    own = [place for place, link in enumerate(chain.links) if link.what == "frame" and REPEATER in link.name]
    return replace(chain, links=chain.links[own[-1] + 1 :]) if own else chain

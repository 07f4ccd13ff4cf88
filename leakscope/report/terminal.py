"""The report on a terminal: the verdict in one sentence first, then what supports it, then what to do next.

Without a wish for more it fits one screen: the verdict, layers, the leading findings, losses and the next step always
stand there, everything else as far as there is room, and what has none is named. Everything that comes from a capture
is untrusted text and is printed with its control characters escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from leakscope.detect.sentence import sentence
from leakscope.model.results import Report, Verdict
from leakscope.quantities import counted
from leakscope.report.calibration import calibration_lines
from leakscope.report.cells import cut, short_frame, wrapped
from leakscope.report.terminal_evidence import (
    import_section,
    join_section,
    left_out,
    loss_lines,
    next_lines,
    open_lines,
    problem_lines,
    reconciliation_lines,
    store_section,
)
from leakscope.report.terminal_findings import STYLES, finding_lines, more_findings
from leakscope.report.terminal_sites import breakdown_lines, hidden_lines, layer_lines, site_lines

SCREEN_LINES = 40
LEADING = 3
"""Findings that a screen shows."""
BRIEF_LINES, LEAST_LINES = 9, 5
"""Lines of a finding that has to share a screen with others, and with much else."""
OTHER_SITES = 10
MAX_FINDINGS = 5
_WORDS = {"leak": "LEAK", "inconclusive": "INCONCLUSIVE", "not_leak": "NO LEAK"}
_HANGING = 3


@dataclass(frozen=True)
class Section:
    """Lines that belong together; ``name`` says what they are where there is no room for them, '' = always shown."""

    lines: Sequence[RenderableType]
    name: str = ""
    most: int = SCREEN_LINES  # lines, where even what is always shown is longer than a screen


def print_report(console: Console, report: Report, top: int | None = None) -> None:
    """Print ``report``: one screen, or with ``top`` all of it with as many findings and other sites.

    A report with a breakdown shows that, ``top`` groups of each layer, in place of findings.
    """
    width = console.width
    if report.breakdown is not None:
        sections = _broken_down(report, width, top)
    elif top is not None:
        sections = _sections(report, width, max(top, MAX_FINDINGS), top)
    else:
        sections = _one_screen(console, report)
    for number, section in enumerate(sections):
        if number:
            console.print()
        for line in section.lines:
            console.print(line, soft_wrap=isinstance(line, Text))


def _one_screen(console: Console, report: Report) -> list[Section]:
    """As much as has room, in order of weight: whole findings, else short ones, else lines of them; then the sections
    in their order."""
    width = console.width
    for whole, lines in ((True, SCREEN_LINES), (False, BRIEF_LINES), (False, LEAST_LINES)):
        sections = _sections(report, width, LEADING, OTHER_SITES, whole, lines, all_evidence=False)
        must = [section for section in sections if not section.name]
        if _height(console, must) < SCREEN_LINES:
            break
    else:
        sections = must = [_trimmed(section, width) for section in must]
    room = SCREEN_LINES - _height(console, must) - 1  # 1: the line that names what is left out
    chosen, left = [], []
    for section in sections:
        if section.name:
            needs = _height(console, [section]) + 1
            if needs > room:
                left.append(section.name)
                continue
            room -= needs
        chosen.append(section)
    if left:
        chosen[-1] = Section([*left_out(left, width), *chosen[-1].lines])
    return chosen


def _trimmed(section: Section, width: int) -> Section:
    if len(section.lines) <= section.most:
        return section
    cut_off = Text(cut(f"… {len(section.lines) - section.most + 1:,} more lines with --top 20", width), "dim")
    return Section([*section.lines[: section.most - 1], cut_off], section.name)


def _height(console: Console, sections: Sequence[Section]) -> int:
    """Lines of ``sections``, with an empty one between them."""
    lines = [line for section in sections for line in section.lines]
    return sum(1 if isinstance(line, Text) else len(console.render_lines(line)) for line in lines) + len(sections) - 1


def _sections(
    report: Report,
    width: int,
    findings: int,
    others: int,
    whole: bool = True,
    finding_most: int = 10**9,
    all_evidence: bool = True,
) -> list[Section]:
    """Everything in its order. ``findings``, ``others``: how many; ``whole``: findings with all that is known; each has
    at most ``finding_most`` lines; ``all_evidence``: losses one by one, and all that imported files say."""
    captures = capture_names(report)
    found = [verdict for verdict in (report.verdict, *report.findings) if verdict.culprit]
    named = {site for finding in found for site in (*finding.sites, *finding.consequences)}
    rest = [s for s in report.sites if s.id not in named and s.frees_visible and s.added and s.live_bytes]
    sections = [
        Section([*_verdict(report, width), *open_lines(report.verdict, width), *problem_lines(report, width)], most=6),
        Section(list(import_section(report, width, all_evidence)), "imported files"),
        Section(list(layer_lines(report.layers, width, captures)), most=6),
        *_findings(report, found, findings, width, captures, whole, finding_most),
        Section(list(store_section(report, width)), "stores"),
        Section(list(site_lines(rest, width, others)), "other sites"),
        Section(list(join_section(report, width)), "joins"),
        Section(list(hidden_lines([s for s in report.sites if not s.frees_visible], width)), "frees not visible"),
        Section(list(calibration_lines(report.calibration, width)), "calibration"),
        Section(list(reconciliation_lines(report.reconciliation, width)), "reconciliation"),
        Section(list(loss_lines(report.losses, width, all_evidence)), most=4),
        Section(list(next_lines(report, width))),
    ]
    return [section for section in sections if section.lines]


def _findings(
    report: Report,
    found: Sequence[Verdict],
    most: int,
    width: int,
    captures: Mapping[int, str],
    whole: bool,
    lines: int,
) -> list[Section]:
    """A section each, or one for all where they are not ``whole``."""
    shown = [
        _trimmed(Section(list(finding_lines(number, finding, report, width, captures, whole)), most=lines), width)
        for number, finding in enumerate(found[:most], 1)
    ]
    shown.append(Section(list(more_findings(found[most:], width))))
    return shown if whole else [Section([line for section in shown for line in section.lines])]


def _broken_down(report: Report, width: int, top: int | None) -> list[Section]:
    assert report.breakdown is not None
    captures = capture_names(report)
    how = {} if top is None else {"top": top}
    sections = [
        Section([*_verdict(report, width), *open_lines(report.verdict, width), *problem_lines(report, width)]),
        Section(list(layer_lines(report.layers, width, captures))),
        Section(list(breakdown_lines(report.breakdown, width, captures, **how))),
        Section(list(loss_lines(report.losses, width, whole=False))),
        Section(list(next_lines(report, width))),
    ]
    return [section for section in sections if section.lines]


def _verdict(report: Report, width: int) -> Iterator[Text]:
    verdict = report.verdict
    word = _WORDS[verdict.verdict]
    said = sentence(_with_short_frame(verdict))
    others = sum(f.verdict == "leak" for f in report.findings)
    if verdict.verdict == "leak" and others:
        said += f"; {counted(others, 'more leak')} below"
    for number, line in enumerate(wrapped(f"{word}  {said}", width - _HANGING)):
        text = Text(f"{' ' * _HANGING if number else ''}{line}", "bold")
        if not number:
            text.stylize(STYLES[verdict.verdict], 0, len(word))
        yield text


def _with_short_frame(verdict: Verdict) -> Verdict:
    if verdict.culprit is None or not verdict.culprit.frame:
        return verdict
    return replace(verdict, culprit=replace(verdict.culprit, frame=short_frame(verdict.culprit.frame)))


def capture_names(report: Report) -> dict[int, str]:
    """Number of a capture (LayerTotal.source) → what it is called; empty where there is but one."""
    captures = [Path(str(i.get("path", ""))).name for i in report.inputs if "limits" not in i]
    names = dict(enumerate([*captures, *(["imported files"] if len(captures) < len(report.inputs) else [])]))
    return names if len(names) > 1 else {}


def plain_lines(report: Report, width: int, top: int | None = None) -> Iterable[str]:
    """The report as lines of plain text ``width`` columns wide."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        print_report(console, report, top)
    return [line.rstrip() for line in captured.get().splitlines()]

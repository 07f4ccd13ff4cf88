"""One report of several: every capture is judged by itself, the worst verdict leads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from leakscope.model.results import VERDICTS, LayerTotal, Report, Verdict


def combine(reports: Sequence[Report]) -> Report:
    """Merge reports of different captures. Site ids get the number of their capture in front when there are
    several; layer totals stay apart, one row a capture and layer, as the captures may be of the same memory.
    """
    if len(reports) == 1:
        return reports[0]
    merged = Report(verdict=reports[0].verdict)
    verdicts: list[Verdict] = []
    unjudged: list[str] = []
    for number, report in enumerate(reports):
        prefix = f"{number}:"
        if report.judged:
            verdicts += [_prefixed(v, prefix) for v in (report.verdict, *report.findings)]
        else:
            unjudged += report.verdict.missing
        merged.chains += [replace(chain, site=prefix + chain.site) for chain in report.chains]
        merged.sites += [replace(site, id=prefix + site.id, source=number) for site in report.sites]
        merged.layers += [_named(layer, number) for layer in report.layers]
        merged.losses += [replace(row, source=f"{number}: {row.source}") for row in report.losses]
        merged.reconciliation += [replace(row, source=f"{number}: {row.source}") for row in report.reconciliation]
        merged.inputs += report.inputs
        merged.calibration += report.calibration
        merged.joins += report.joins
        merged.clocks += report.clocks
        merged.runs += report.runs
        merged.timelines += report.timelines
        merged.stores += report.stores
        merged.sites_total += report.sites_total
    verdicts.sort(key=lambda v: (VERDICTS.index(v.verdict), -(v.growth.bytes_per_s if v.growth else 0.0)))
    merged.verdict = replace(verdicts[0], missing=(*verdicts[0].missing, *unjudged))
    merged.findings = verdicts[1:]
    return merged


def _prefixed(verdict: Verdict, prefix: str) -> Verdict:
    return replace(
        verdict,
        sites=tuple(prefix + site for site in verdict.sites),
        consequences=tuple(prefix + site for site in verdict.consequences),
    )


def _named(layer: LayerTotal, number: int) -> LayerTotal:
    return replace(layer, source=number)

"""A report as a few metrics, for scrapers and collectors.

Labels are bounded: layers, words of the verdict, kinds of losses, and at most so many sites as are asked for, by their
stable ids. No address, no PID and no stack becomes a label.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from leakscope.model.results import VERDICTS, Report
from leakscope.report.text import printable

PREFIX = "leakscope"
MAX_LABEL = 200
_ADDRESS = re.compile(r"\+?0x[0-9a-f]+")


@dataclass(frozen=True)
class Metric:
    """A gauge, or a counter that only rises. ``name`` has dots; ``unit`` is of UCUM, as OpenTelemetry writes it; values
    by label values."""

    name: str
    unit: str  # By, By/s, {object}, s, 1
    help: str
    labels: tuple[str, ...]
    samples: tuple[tuple[tuple[str, ...], float], ...]
    counter: bool = False


def metrics(report: Report, names: Sequence[str], sites: int) -> list[Metric]:
    """The metrics of ``report``; ``names``: of the evidence; ``sites``: that get one each, most kept bytes first."""
    where = ("evidence", "layer")
    layers = [((_label(names[t.source]), t.layer), t) for t in report.layers]
    grown = [(key, t.growth) for key, t in layers if t.growth]
    found: dict[tuple[str, str, str], int] = {}
    for one in (report.verdict, *report.findings):
        key = (one.verdict, one.kind, one.layer)
        found[key] = found.get(key, 0) + 1
    lost: dict[tuple[str, str], int] = {}
    for row in report.losses:
        named = (_label(row.source), _label(row.what))
        lost[named] = lost.get(named, 0) + (row.value or 0)
    listed = [site for site in report.sites if site.live_bytes and site.frees_visible][:sites]
    of_site = [
        ((site.id, site.layer, site.kind, _label(_ADDRESS.sub("", site.culprit_frame))), site) for site in listed
    ]
    site_labels = ("site", "layer", "kind", "culprit")
    return [
        Metric(
            "verdict", "1", "1 for the verdict that leads, 0 for the others.", ("verdict",),
            tuple(((word,), float(word == report.verdict.verdict)) for word in VERDICTS),
        ),
        Metric(
            "verdict.confidence", "1", "Confidence of the verdict that leads, 0 to 1.", (),
            (((), report.verdict.confidence),),
        ),
        Metric(
            "findings", "1", "Verdicts, the leading one included.", ("verdict", "class", "layer"),
            tuple((key, float(count)) for key, count in sorted(found.items())),
        ),
        Metric(
            "layer.live", "By", "Allocated and not freed when the evidence ended.", where,
            tuple((key, float(t.live_bytes)) for key, t in layers),
        ),
        Metric(
            "layer.live", "{object}", "Objects allocated and not freed when the evidence ended.", where,
            tuple((key, float(t.live_objects)) for key, t in layers),
        ),
        Metric(
            "layer.allocated", "By", "Allocated during the evidence.", where,
            tuple((key, float(t.allocated_bytes)) for key, t in layers),
        ),
        Metric(
            "layer.growth", "By/s", "Mean growth of live bytes after the warm-up.", where,
            tuple((key, g.bytes_per_s) for key, g in grown),
        ),
        Metric(
            "layer.growth.low", "By/s", "Lower end of the 95 % interval of the growth.", where,
            tuple((key, g.ci_low) for key, g in grown),
        ),
        Metric(
            "layer.growth.high", "By/s", "Upper end of the 95 % interval of the growth.", where,
            tuple((key, g.ci_high) for key, g in grown),
        ),
        Metric(
            "site.live", "By", "Live bytes of the sites that keep most.", site_labels,
            tuple((key, float(s.live_bytes)) for key, s in of_site),
        ),
        Metric(
            "site.growth", "By/s", "Growth of the sites that keep most.", site_labels,
            tuple((key, s.growth.bytes_per_s) for key, s in of_site if s.growth),
        ),
        Metric(
            "losses", "1", "Evidence known to be missing.", ("source", "what"),
            tuple((key, float(count)) for key, count in sorted(lost.items())),
        ),
    ]  # fmt: skip


def _label(text: str) -> str:
    return printable(text)[:MAX_LABEL]

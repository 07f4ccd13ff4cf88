"""The verdict of one source of counters: leaks, then what cannot be told, then why what grew is no leak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leakscope.detect.series.benign import benign
from leakscope.detect.series.book import Book
from leakscope.detect.series.counters import HOST_TOTALS, Counter, layer_of
from leakscope.detect.series.found import Found
from leakscope.detect.series.leaks import RULES
from leakscope.detect.series.totals import TOTALS
from leakscope.detect.series.trend import Course, Trend
from leakscope.model.results import Culprit, Growth, Verdict

MIN_SPAN_S = 600.0
"""Counters read for less than ten minutes prove nothing: start-up takes as long."""
MATTERS_BYTES_S = 64 * 2**20 / 3600
MATTERS_SHARE_S = 0.5 / 86_400
"""A rate matters from 64 MiB an hour on, or from half the level in a day; a window must be able to exclude it."""
MAX_GAP_SHARE = 0.5
DECISIVE = (*HOST_TOTALS, "cgroup", "gpu_used")
MAX_COUNTERS = 4000


@dataclass(frozen=True)
class Judged:
    """``verdict`` leads, ``findings`` are the others, ranked; ``decided``: a rule of its own explains the verdict,
    beyond that everything is flat or has levelled off."""

    verdict: Verdict
    findings: tuple[Verdict, ...]
    decided: bool


def judge(counters: Sequence[Counter], book: Book | None = None) -> Judged:
    """Judge the counters of one source. The same counters give the same verdict. ``book``: of these counters, where
    one is at hand."""
    book = book or Book(counters[:MAX_COUNTERS])
    span = book.span_s()
    found: list[Found] = []
    explained: set[str] = set()
    for rule in (*RULES, *TOTALS):
        for finding in rule(book, explained):
            found.append(finding)
            explained |= finding.explains | {finding.counter, finding.growth}
    leaks = sorted((f for f in found if f.verdict == "leak"), key=lambda f: (f.general, -f.weight))
    unclear = [f for f in found if f.verdict == "inconclusive"]
    explanations = benign(book)
    specific = [f for f in explanations if not f.general]
    provable = smallest_provable(book)
    short = _too_short(book, span, provable)
    if leaks and span < MIN_SPAN_S:
        missing = (f"counters over {MIN_SPAN_S:,.0f} s at least; these are over {span:,.0f} s",)
        unclear += [_as_unclear(f, missing) for f in leaks]
        leaks = []
    ranked = [*leaks, *unclear]
    if not leaks and short and not specific and not unclear:
        ranked.append(short)
    if not ranked and (gap := _gaps(book)):
        ranked.append(gap)
    ranked += explanations
    if not ranked:
        ranked = [
            Found(
                "not_leak",
                "cache_warmup",
                "",
                "",
                _steady(book),
                book[_steady(book)],
                ("no counter rises for good",),
                general=True,
            )
        ]
    verdicts = [_verdict(book, f, provable) for f in ranked]
    return Judged(verdicts[0], tuple(verdicts[1:]), not ranked[0].general)


def smallest_provable(book: Book) -> float:
    """The least rate, in bytes a second, that would have shown in the counters that count, the worst of them."""
    rates = [book[n].smallest_rate for n in DECISIVE if n in book and book[n].course is not Course.SHORT]
    return max((r for r in rates if np.isfinite(r)), default=float("inf"))


def _too_short(book: Book, span: float, provable: float) -> Found | None:
    names = [n for n in DECISIVE if n in book]
    if not names:
        return None
    worst = max(names, key=lambda n: book[n].smallest_rate if np.isfinite(book[n].smallest_rate) else 0.0)
    level = abs(book[worst].level)
    hidden = provable > max(MATTERS_BYTES_S, MATTERS_SHARE_S * level)
    if span >= MIN_SPAN_S and not hidden:
        return None
    longer = (
        max(MIN_SPAN_S, span * (provable / max(MATTERS_BYTES_S, 1e-9)) ** (2 / 3))
        if np.isfinite(provable)
        else MIN_SPAN_S
    )
    return Found(
        "inconclusive",
        "window_too_short",
        "",
        "",
        worst,
        book[worst],
        (f"in {span:,.0f} s only growth of more than {provable:,.0f} bytes a second would have shown",),
        (f"about {longer:,.0f} s of counters, to exclude {MATTERS_BYTES_S * 3600 / 2**20:,.0f} MiB an hour",),
    )


def _gaps(book: Book) -> Found | None:
    name = _steady(book)
    counter = book.counters.get(name)
    if counter is None or len(counter.t_s) < 8:
        return Found(
            "inconclusive",
            "missing_data",
            "",
            "",
            name,
            book[name],
            ("too few readings to judge",),
            ("counters over time: resident memory, device memory",),
        )
    gaps = np.diff(counter.t_s)
    if gaps.max() > MAX_GAP_SHARE * (counter.t_s[-1] - counter.t_s[0]):
        return Found(
            "inconclusive",
            "missing_data",
            "",
            "",
            name,
            book[name],
            (f"no reading for {gaps.max():,.0f} s, more than half of the time",),
            ("the readings in between",),
        )
    return None


def _steady(book: Book) -> str:
    return next((n for n in DECISIVE if n in book), next(book.names(), ""))


def _as_unclear(found: Found, missing: tuple[str, ...]) -> Found:
    return Found(
        "inconclusive",
        "window_too_short",
        "",
        found.counter,
        found.growth,
        found.trend,
        found.reasons,
        missing,
        weight=found.weight,
    )


def _verdict(book: Book, found: Found, provable: float) -> Verdict:
    """In the words of a report."""
    trend = found.trend if found.growth in ("", found.counter) or found.verdict == "leak" else book.course(found.growth)
    growth = None
    if found.growth in book and book.counters[found.growth].in_bytes and trend.course is not Course.SHORT:
        growth = Growth(
            book.shown(found.growth),
            trend.rate,
            min(trend.low, trend.rate),
            max(trend.high, trend.rate),
            found.per_unit,
        )
    leak = found.verdict == "leak"
    culprit = None
    if found.counter or found.object or found.slab_cache:
        culprit = Culprit(
            counter=book.shown(found.counter),
            object=found.object,
            slab_cache=found.slab_cache,
            slab_caches=(found.slab_cache,) if found.slab_cache else (),
        )
    return Verdict(
        verdict=found.verdict,
        kind=found.kind,
        layer=found.layer or (layer_of(found.growth) if leak else ""),
        confidence=_confidence(found, trend),
        culprit=culprit,
        growth=growth,
        leak_start_s=max(0.0, trend.start_s) if leak else None,
        kept_bytes=int(max(0.0, trend.line_rise)) if leak and growth else 0,
        reasons=found.reasons,
        missing=found.missing,
        smallest_provable_bytes_per_s=provable if np.isfinite(provable) else None,
    )


def _confidence(found: Found, trend: Trend) -> float:
    """0.5 to 0.97: by how far the rate stands from its error, less for general findings."""
    if found.verdict == "inconclusive":
        return 0.5
    value = 0.8
    if found.verdict == "leak" and trend.rate > trend.low:
        value = 0.97 - 0.4 * min(1.0, (trend.rate - trend.low) / trend.rate)
    return float(np.clip(value - (0.1 if found.general else 0.0), 0.5, 0.97))

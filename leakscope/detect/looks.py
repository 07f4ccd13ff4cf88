"""Interim verdicts of a running recording: alpha spent over repeated looks, so that looking often raises no alarms.

A verdict that is asked for every hour has every hour a chance to be wrong. Two things keep the chance of a false
alarm over a whole horizon at what was asked for:

- **Spending.** :class:`Looks` hands every look its share of one alpha (Lan and DeMets 1983). The shares add up to alpha
  at the horizon; by the union bound the chance of any false alarm is below their sum however the looks depend on each
  other.
- **What may still be regular.** In the first days a daily wave, a slow start-up or a step can look like a line. A line
  counts by its odds against all of them together (:mod:`leakscope.detect.series.odds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from leakscope.detect.series.book import Book
from leakscope.detect.series.counters import Counter, layer_of
from leakscope.detect.series.fit import theil_sen
from leakscope.detect.series.judge import DECISIVE, MIN_SPAN_S, Judged, judge
from leakscope.detect.series.odds import Odds, odds
from leakscope.detect.series.trend import MIN_END_RATE, Z95, Trend
from leakscope.model.results import Culprit, Growth

HORIZON_S = 72 * 3600.0
TOTAL_ALPHA = 0.05
SPENDING_POWER = 1.0
"""Share of alpha spent at a share t of the horizon: t to this power (Kim and DeMets 1987)."""
SETTLED_S = 6 * 3600.0
UNSETTLED_FACTOR = 1.3
"""Before a start-up has settled (caches, pools and workers of a service are there within hours) this many times the
score is asked for: its shape is not yet known."""
UNTOLD = {"window_too_short": 1.0, "cache_warmup": 1.3}
"""Classes of what the verdict of the readings so far cannot explain by a rule of its own, and how many times the score
the odds need to say leak instead: it takes every curve in a short window for growth that levels off."""
UNTOLD_CONFIDENCE = 0.6
END_SHARE = 0.25


class Looks:
    """Shares of ``total_alpha`` for looks at any times; ``horizon_s``: the time over which it holds.

    After a horizon the next one begins with an alpha of its own: "at most 5 % in each 72 hours". Looks need not be
    planned, equally spaced or counted beforehand. ``spent`` restores what an earlier process had used up.
    """

    def __init__(self, total_alpha: float = TOTAL_ALPHA, horizon_s: float = HORIZON_S, spent: float = 0.0) -> None:
        if not 0 < total_alpha < 1 or horizon_s <= 0:
            raise ValueError("total_alpha must be between 0 and 1, horizon_s above 0")
        self.total_alpha = total_alpha
        self.horizon_s = horizon_s
        self.spent = spent
        """In all horizons so far."""

    def next(self, elapsed_s: float) -> float:
        """The alpha of a look ``elapsed_s`` after the start: what may be spent by then less what was. 0 at a time that
        an earlier look had reached."""
        whole, part = divmod(max(elapsed_s, 0.0) / self.horizon_s, 1.0)
        allowed = self.total_alpha * (whole + part**SPENDING_POWER)
        alpha = max(0.0, allowed - self.spent)
        # A pause of several horizons hands no look more than one horizon's alpha.
        self.spent = max(self.spent, allowed)
        return min(alpha, self.total_alpha)


@dataclass(frozen=True)
class Interim:
    """One look. ``judged``: the verdict of the readings so far, as if the recording ended; ``alarm``: it is a leak that
    is beyond chance, regular movement and start-up. ``score``: of the odds for a line; ``needed``: the score of this
    look's ``alpha``."""

    elapsed_s: float
    alpha: float
    judged: Judged
    alarm: bool
    score: float
    needed: float

    candidate_since_s: float | None
    """Since which look the score has been enough without a break; None: it is not now."""


def judge_interim(
    counters: Sequence[Counter], looks: Looks, elapsed_s: float, before: Interim | None = None
) -> Interim:
    """Judge the readings so far. ``before``: what the look before this one returned (None: there was none)."""
    alpha = looks.next(elapsed_s)
    needed = needed_score(alpha) * (UNSETTLED_FACTOR if elapsed_s < SETTLED_S else 1.0)
    book = Book(counters)
    judged = judge(counters, book)
    followed = _followed(book, judged)
    found = evidence(book[followed])
    enough = found.score >= needed
    factor = UNTOLD.get(judged.verdict.kind, float("inf"))
    if found.score >= factor * needed and book.span_s() >= MIN_SPAN_S and _goes_on(book[followed], found.rate):
        judged = _told(judged, book, followed, found)
    since = before.candidate_since_s if before is not None else None
    since = (elapsed_s if since is None else since) if enough else None
    alarm = enough and judged.verdict.verdict == "leak"
    return Interim(elapsed_s, alpha, judged, alarm, found.score, needed, since)


def _followed(book: Book, judged: Judged) -> str:
    """The counter whose evidence is asked for: the one that the verdict is about, else the first total."""
    if judged.verdict.growth is not None:
        for name, counter in book.counters.items():
            if counter.shown == judged.verdict.growth.counter:
                return name
    return next((name for name in DECISIVE if name in book), next(book.names(), ""))


def _goes_on(trend: Trend, rate: float) -> bool:
    """Whether the last part of the floor still rises by a share of ``rate``; growth that ended does not."""
    base = trend.floor
    if base is None:
        return False
    last = base.t_s >= base.t_s[-1] - END_SHARE * (base.t_s[-1] - base.t_s[0])
    return last.sum() >= 3 and theil_sen(base.t_s[last], base.value[last]) >= MIN_END_RATE * rate


def _told(judged: Judged, book: Book, name: str, found: Odds) -> Judged:
    """A verdict that could not be told from the window alone, told by the odds."""
    shown = book.shown(name)
    verdict = replace(
        judged.verdict,
        verdict="leak",
        kind="retained_growth",
        layer=layer_of(name),
        confidence=UNTOLD_CONFIDENCE,
        culprit=Culprit(counter=shown),
        growth=Growth(shown, found.rate, found.rate - Z95 * found.error, found.rate + Z95 * found.error),
        leak_start_s=max(0.0, found.start_s),
        kept_bytes=int(max(0.0, found.rate * (book[name].end_s - found.start_s))),
        reasons=(f"{shown} rises by more than a daily wave, a start-up and a step explain",),
        missing=(),
    )
    return replace(judged, verdict=verdict)


def needed_score(alpha: float) -> float:
    """The normal score whose upper tail is ``alpha``; infinite for 0."""
    return NormalDist().inv_cdf(1 - alpha) if alpha > 0 else float("inf")


def evidence(trend: Trend) -> Odds:
    """The odds that a counter's floor, with its daily wave, rises for good."""
    base = trend.floor
    if base is None:
        return Odds()
    value = base.value
    if base.diurnal:
        value = value + np.interp(base.t_s, base.level_t_s, base.raw_value - base.level_value)
    return odds(base.t_s, value, base.level)

"""Interim verdicts of a running recording: alpha spent over repeated looks, so that looking often raises no alarms.

A verdict that is asked for every hour has every hour a chance to be wrong. Three things keep the chance of a false
alarm over a whole horizon at what was asked for:

- **Spending.** :class:`Looks` hands every look its share of one alpha (Lan and DeMets 1983). The shares add up to alpha
  at the horizon; by the union bound the chance of any false alarm is below their sum however the looks depend on each
  other.
- **What may still be regular.** In the first days a daily wave or a slow start-up can look like a line. The slope is
  tested beside both of them, with the sizes that they usually have as priors (:func:`evidence`).
- **Confirmation.** A leak goes on. An alarm needs the evidence at most looks of a stretch of which the first look has
  seen nothing, and the verdict of a whole recording at the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from leakscope.detect.series.book import Book
from leakscope.detect.series.counters import Counter
from leakscope.detect.series.fit import autocorrelation, fit
from leakscope.detect.series.floors import DAY_S
from leakscope.detect.series.judge import DECISIVE, Judged, judge
from leakscope.detect.series.trend import Trend

FloatArray = npt.NDArray[np.float64]

HORIZON_S = 72 * 3600.0
TOTAL_ALPHA = 0.05
SPENDING_POWER = 1.0
"""Share of alpha spent at a share t of the horizon: t to this power (Kim and DeMets 1987)."""
CONFIRMING_LOOKS = 4
CONFIRMING_SHARE = 0.15
"""The evidence is asked for at so many of the last looks, or at those in this last share of the time if they are
more…"""
CONFIRMED_SHARE = 0.75
"""…and must stand at this share of them, this one included."""
WAVE_SHARE = 0.07
HALF_DAY_SHARE = 0.003
START_UP_SHARE = 0.2
"""Prior standard deviations of a wave of 24 hours and of 12, and of a start-up, as shares of the level: a daily swing
of 28 % is two of it."""
START_UP_S = 2 * 3600.0
"""Time constant of the start-up: caches, pools and workers of a service are there within hours."""
SETTLED_S = 3 * START_UP_S
UNSETTLED_FACTOR = 2.0
"""Before a start-up has settled (95 % of it) this many times the score is asked for: its shape is not yet known."""
MIN_POINTS = 8
MAX_HINGE = 0.8
LEAST_NOISE = 1e-6
"""Of the level: counters come in pages, so that a perfect fit is no certainty."""


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
    is beyond chance, regular movement and start-up, and was so at enough looks. ``score``: the slope over its standard
    error, beside those; ``needed``: the score of this look's ``alpha``; ``stood``: (seconds, whether the score was
    enough) of the looks that a later one may ask for."""

    elapsed_s: float
    alpha: float
    judged: Judged
    alarm: bool
    score: float
    needed: float
    stood: tuple[tuple[float, bool], ...]

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
    score = evidence(book[_followed(book, judged)])
    passed = (*(before.stood if before else ()), (elapsed_s, score >= needed))
    asked = max(CONFIRMING_LOOKS, sum(at > (1 - CONFIRMING_SHARE) * elapsed_s for at, _ in passed))
    passed = passed[-asked:]
    alarm = (
        judged.verdict.verdict == "leak"
        and passed[-1][1]
        and sum(enough for _, enough in passed) >= CONFIRMED_SHARE * asked
    )
    since = before.candidate_since_s if before is not None else None
    since = (elapsed_s if since is None else since) if score >= needed else None
    return Interim(elapsed_s, alpha, judged, alarm, score, needed, passed, since)


def _followed(book: Book, judged: Judged) -> str:
    """The counter whose evidence is asked for: the one that the verdict is about, else the first total."""
    if judged.verdict.growth is not None:
        for name, counter in book.counters.items():
            if counter.shown == judged.verdict.growth.counter:
                return name
    return next((name for name in DECISIVE if name in book), next(book.names(), ""))


def needed_score(alpha: float) -> float:
    """The normal score whose upper tail is ``alpha``; infinite for 0."""
    return NormalDist().inv_cdf(1 - alpha) if alpha > 0 else float("inf")


def evidence(trend: Trend) -> float:
    """The slope of a counter's floor over its standard error, beside a daily wave and a start-up that may be there; 0
    for a floor too short to say.

    Generalised least squares with first-order autocorrelated noise. The waves of 24 and 12 hours and the start-up have
    normal priors around nothing (ridge regression, Hoerl and Kennard 1970), the level and the line have none.
    """
    base = trend.floor
    if base is None or len(base.t_s) < MIN_POINTS or not np.ptp(base.value):
        return 0.0
    t, y = base.t_s - base.t_s[0], base.value - base.value[0]
    span = float(t[-1])
    hinge = min(fit(base.t_s, base.value).hinge, MAX_HINGE) * span
    angles = 2 * np.pi * t[:, None] * np.array([1.0, 2.0]) / DAY_S
    columns = [np.ones(len(t)), np.maximum(0.0, t - hinge) / span, *np.cos(angles).T, *np.sin(angles).T]
    design = np.stack([*columns, 1.0 - np.exp(-t / START_UP_S)], axis=1)
    level = max(abs(base.level), 1.0)
    spreads = level * np.array([WAVE_SHARE, HALF_DAY_SHARE, WAVE_SHARE, HALF_DAY_SHARE, START_UP_SHARE])
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    rest = y - design @ coefficients
    phi = autocorrelation(rest)
    shocks = rest[1:] - phi * rest[:-1]
    variance = float(shocks @ shocks) / max(1, len(t) - design.shape[1])
    variance = max(variance, (LEAST_NOISE * level) ** 2)
    white = design[1:] - phi * design[:-1]
    precision = white.T @ white / variance + np.diag(np.concatenate([np.zeros(2), spreads**-2.0]))
    covariance = np.linalg.pinv(precision)
    slope = float((covariance @ (white.T @ (y[1:] - phi * y[:-1])) / variance)[1])
    return slope / float(np.sqrt(max(covariance[1, 1], 1e-300)))

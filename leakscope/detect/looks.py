"""Interim verdicts of a running recording: alpha spent over repeated looks, so that looking often raises no alarms.

A verdict that is asked for every hour has every hour a chance to be wrong. Three things keep the chance of a false
alarm over a whole horizon at what was asked for:

- **Spending.** :class:`Looks` hands every look its share of one alpha (Lan and DeMets 1983). The shares add up to alpha
  at the horizon; by the union bound the chance of any false alarm is below their sum however the looks depend on each
  other.
- **What may still be regular.** In the first days a daily wave or a slow start-up can look like a line. The slope is
  tested beside both of them, with the sizes that they usually have as priors (:func:`evidence`).
- **Confirmation.** A leak goes on. An alarm needs the finding at every look over a stretch of readings that the first
  one had not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from leakscope.detect.series.book import Book
from leakscope.detect.series.counters import Counter
from leakscope.detect.series.fit import autocorrelation
from leakscope.detect.series.floors import DAY_S
from leakscope.detect.series.judge import Judged, judge
from leakscope.detect.series.trend import Trend

FloatArray = npt.NDArray[np.float64]

HORIZON_S = 72 * 3600.0
TOTAL_ALPHA = 0.05
SPENDING_POWER = 1.0
"""Share of alpha spent at a share t of the horizon: t to this power (Kim and DeMets 1987)."""
MIN_CONFIRMING_LOOKS = 3
CONFIRMING_SHARE = 0.2
"""A finding must have stood at so many looks in a row, and for this share of the time since the start."""
WAVE_SHARE = 0.08
"""Prior standard deviation of a daily wave's amplitude as a share of the level: a swing of 30 % is two of it."""
HALF_DAY_SHARE = WAVE_SHARE / 2
START_UP_SHARE = 0.3
START_UPS = (0.08, 0.2, 0.4)
"""Time constants of start-up as shares of the time so far, and the prior standard deviation of their sizes."""


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
    """One look. ``judged``: the verdict of the readings so far, as at the end of a recording; ``alarm``: it is a leak
    that is beyond chance, regular movement and start-up, and was so at enough looks; ``candidate_since_s``: since
    which look (None: not now); ``score`` of the slope and the ``needed`` one at this look's ``alpha``."""

    elapsed_s: float
    alpha: float
    judged: Judged
    alarm: bool
    candidate_since_s: float | None
    candidate_looks: int
    score: float
    needed: float


def judge_interim(
    counters: Sequence[Counter], looks: Looks, elapsed_s: float, before: Interim | None = None
) -> Interim:
    """Judge the readings so far. ``before``: what the look before this one returned (None: there was none)."""
    alpha = looks.next(elapsed_s)
    needed = needed_score(alpha)
    book = Book(counters)
    judged = judge(counters, book)
    score = 0.0
    if judged.verdict.verdict == "leak" and judged.verdict.growth is not None:
        names = {counter.shown: name for name, counter in book.counters.items()}
        score = evidence(book.course(names[judged.verdict.growth.counter]))
    if score < needed:
        return Interim(elapsed_s, alpha, judged, False, None, 0, score, needed)
    since, stood = elapsed_s, 1
    if before is not None and before.candidate_since_s is not None:
        since, stood = before.candidate_since_s, before.candidate_looks + 1
    alarm = stood >= MIN_CONFIRMING_LOOKS and elapsed_s - since >= CONFIRMING_SHARE * elapsed_s
    return Interim(elapsed_s, alpha, judged, alarm, since, stood, score, needed)


def needed_score(alpha: float) -> float:
    """The normal score whose upper tail is ``alpha``; infinite for 0."""
    return NormalDist().inv_cdf(1 - alpha) if alpha > 0 else float("inf")


def evidence(trend: Trend) -> float:
    """The slope of a rising counter over its standard error, beside a daily wave and a start-up that may be there.

    Generalised least squares with first-order autocorrelated noise; the waves of 24 and 12 hours and the start-ups have
    normal priors around nothing (ridge regression, Hoerl and Kennard 1970), the level and the line have none.
    """
    base = trend.floor
    if base is None or len(base.t_s) < 8:
        return 0.0
    t, y = base.t_s - base.t_s[0], base.value - base.value[0]
    span = float(t[-1])
    hinge = min(max(trend.start_s - float(base.t_s[0]), 0.0), 0.8 * span)
    angles = 2 * np.pi * t[:, None] * np.array([1.0, 2.0]) / DAY_S
    columns = [
        np.ones(len(t)),
        np.maximum(0.0, t - hinge) / span,
        *np.cos(angles).T,
        *np.sin(angles).T,
        *(1.0 - np.exp(-t / (share * span)) for share in START_UPS),
    ]
    design = np.stack(columns, axis=1)
    level = max(abs(base.level), 1.0)
    spreads = level * np.array([WAVE_SHARE, HALF_DAY_SHARE] * 2 + [START_UP_SHARE] * len(START_UPS))
    prior = np.concatenate([np.zeros(2), spreads**-2.0])
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    rest = y - design @ coefficients
    phi = autocorrelation(rest)
    freedom = max(1, len(t) - design.shape[1])
    whitened = rest[1:] - phi * rest[:-1]
    variance = max(float(whitened @ whitened) / freedom, (1e-6 * level) ** 2)
    white = design[1:] - phi * design[:-1]
    precision = white.T @ white / variance + np.diag(prior)
    covariance = np.linalg.pinv(precision)
    slope = float((covariance @ (white.T @ (y[1:] - phi * y[:-1])) / variance)[1])
    return slope / float(np.sqrt(max(covariance[1, 1], 1e-300)))

"""Odds that a floor rises for good, against all that it may do otherwise: a daily wave, a start-up, a step, noise.

The odds are a Bayes factor (Kass and Raftery 1995): how well the readings were foretold by courses with a line, over
how well by those without. Whatever else may be there (:class:`Priors`) is averaged over, not fitted, so a wave of
which half a day was seen can be told from a line as soon as it would have to be larger than waves are. Under the
priors the odds of a series without a line pass x at any of all looks with a chance of 1/x at most (Ville 1939).

All courses are linear with normal priors, so that each has its likelihood in closed form; a step at any reading is
entered by a rank-one update.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leakscope.detect.series.fit import autocorrelation
from leakscope.detect.series.floors import DAY_S

FloatArray = npt.NDArray[np.float64]

MIN_POINTS = 12
"""Fewer say nothing of noise."""
HOUR_S = 3600.0
NEGLIGIBLE = 25.0
"""Courses whose log likelihood is by so much below that of the best count for nothing."""


@dataclass(frozen=True)
class Priors:
    """What a counter without a leak does, and where lines begin; sizes are shares of its level, times hours.

    ``wave``: sizes of a daily wave, half its swing; ``start_up``: (size, standard deviation, chance) of what was not
    there yet at the first reading; ``ended``: growth from one share of the time to another; ``hinges``: (share of the
    time at which a line begins, chance): most leaks begin with the process; ``noise``: standard deviation, worth
    ``noise_points`` points of the floor.
    """

    wave: tuple[float, ...] = (0.04, 0.09, 0.14)
    wave_spread: float = 0.035
    no_wave: float = 0.01
    wave_chance: float = 0.4
    half_day: float = 0.003
    start_up: tuple[tuple[float, float, float], ...] = ((0.0, 0.02, 0.4), (0.2, 0.08, 0.3), (0.4, 0.08, 0.3))
    constants_h: tuple[float, ...] = (0.5, 1.5, 4.0)
    ended: tuple[tuple[float, float], ...] = ((0.0, 0.5), (0.0, 0.75), (0.3, 0.7), (0.6, 0.85))
    ended_chance: float = 0.2
    step: float = 0.1
    step_chance: float = 0.25
    rate_h: float = 0.03
    hinges: tuple[tuple[float, float], ...] = ((0.0, 0.6), (0.2, 0.1), (0.4, 0.1), (0.6, 0.1), (0.75, 0.1))
    noise: float = 0.01
    noise_points: float = 6.0


PRIORS = Priors()
PHASES = 8
BASE = 5
"""Columns that all courses have: the level, a wave of 24 hours (cosine, sine) and one of 12."""
FIRST_GUESS = (0.0, 1.25, 1.25, 12.5, 12.5, 0.5, 0.5, 0.5)
"""Weights that keep the sizes of :func:`_noise` small: level, waves, start-up, two lines."""


@dataclass(frozen=True)
class Odds:
    """``log``: natural logarithm of the odds for a line; ``rate``, ``error``: its slope a second and the standard
    deviation of that; ``start_s``: where it begins, the mean over courses; ``points``: of the floor, as
    many as are independent."""

    log: float = float("-inf")
    rate: float = 0.0
    error: float = 0.0
    start_s: float = 0.0
    points: float = 0.0

    @property
    def score(self) -> float:
        """The normal score of the line: by Schwarz's approximation (1978) 2 log odds are its square less log points."""
        return float(np.sqrt(max(0.0, 2 * self.log + np.log(max(self.points, 1.0)))))


def odds(t_s: FloatArray, value: FloatArray, level: float, priors: Priors = PRIORS) -> Odds:
    """Of the floor float64[K] with its daily wave; ``level`` is what shares are of. No odds below 12 points."""
    if len(t_s) < MIN_POINTS or not np.ptp(value):
        return Odds()
    level = max(abs(level), 1.0)
    t = (t_s - t_s[0]) / HOUR_S
    y = (value - value[0]) / level
    columns = _columns(t, priors)
    steps = (np.arange(len(t))[:, None] >= np.arange(1, len(t) + 1)).astype(np.float64)[:, ::-1]  # the first: none
    phi, variance = _noise(columns, steps, y, priors)
    deviation = float(np.sqrt(variance))
    columns, steps = _white(columns, phi) / deviation, _white(steps, phi) / deviation
    target = _white(y[:, None], phi)[:, 0] / deviation
    without, _ = _likelihoods(columns, steps, target, priors, hinge=None)
    lines = [_likelihoods(columns, steps, target, priors, hinge) for hinge in range(len(priors.hinges))]
    hinges, chances = np.array(priors.hinges).T
    likely = np.array([one for one, _ in lines]) + np.log(chances)
    log = float(np.logaddexp.reduce(likely) - without)
    weights = np.exp(likely - likely.max())
    weights /= weights.sum()
    rates = np.array([moments for _, moments in lines])
    rate = float(weights @ rates[:, 0])
    spread = float(weights @ (rates[:, 1] + rates[:, 0] ** 2)) - rate**2
    start = float(weights @ hinges) * float(t_s[-1] - t_s[0]) + float(t_s[0])
    per_second = level / HOUR_S
    # As many of the points as are independent under first-order autocorrelation.
    return Odds(
        log,
        rate * per_second,
        float(np.sqrt(max(spread, 0.0))) * per_second,
        start,
        max(1.0, len(t) * (1 - phi) / (1 + phi)),
    )


def _columns(t: FloatArray, priors: Priors) -> FloatArray:
    """float64[K, …]: level, waves, start-ups, growth that ended, lines."""
    angles = 2 * np.pi * t[:, None] * np.array([1.0, 2.0]) * HOUR_S / DAY_S
    waves = [part(angles[:, index]) for index in (0, 1) for part in (np.cos, np.sin)]
    start_ups = [1.0 - np.exp(-t / constant) for constant in priors.constants_h]
    ended = [np.clip((t / t[-1] - first) / (last - first), 0.0, 1.0) for first, last in priors.ended]
    lines = [np.maximum(0.0, t - hinge * t[-1]) for hinge, _ in priors.hinges]
    return np.stack([np.ones(len(t)), *waves, *start_ups, *ended, *lines], axis=1)


def _white(array: FloatArray, phi: float) -> FloatArray:
    """Rows less what first-order autocorrelation makes of the row before."""
    return np.concatenate([array[:1] * np.sqrt(1 - phi**2), array[1:] - phi * array[:-1]])


def _noise(columns: FloatArray, steps: FloatArray, y: FloatArray, priors: Priors) -> tuple[float, float]:
    """(autocorrelation, variance of the shocks) of what a course with all parts and the best step leaves."""
    lines = BASE + len(priors.constants_h) + len(priors.ended)
    picked = [*range(BASE), BASE + len(priors.constants_h) // 2, lines, lines + len(priors.hinges) // 2]
    design = np.vstack([columns[:, picked], np.diag(FIRST_GUESS)])
    padding = np.zeros((len(picked), steps.shape[1]))
    basis, _ = np.linalg.qr(design)
    rest = np.r_[y, padding[:, 0]]
    rest = rest - basis @ (basis.T @ rest)
    steps = np.vstack([steps, padding])
    own = steps - basis @ (basis.T @ steps)
    size = np.maximum((own**2).sum(axis=0), 1e-3)
    along = own.T @ rest
    best = int(np.argmax(along**2 / size))
    rest = (rest - own[:, best] * along[best] / size[best])[: len(y)]
    phi = autocorrelation(rest)
    shocks = rest[1:] - phi * rest[:-1]
    seen = len(shocks)
    square = float(shocks @ shocks) * seen / max(1, seen - len(picked) + 2)
    usual = priors.noise**2 * (1 - phi**2)
    return phi, (square + priors.noise_points * usual) / (seen + priors.noise_points)


def _waves(priors: Priors) -> list[tuple[FloatArray, float, FloatArray]]:
    """(float64[J, 2] sizes of cosine and sine, their standard deviation, float64[J] log chances) of no wave, of some.

    Sizes lie on circles, so that no phase is likelier than another and none is larger than waves are.
    """
    turns = 2 * np.pi * np.arange(PHASES) / PHASES
    circle = np.stack([np.cos(turns), np.sin(turns)], axis=1)
    sizes = np.array(priors.wave)
    centres = (sizes[:, None, None] * circle).reshape(-1, 2)
    chances = np.repeat(priors.wave_chance * sizes / sizes.sum() / PHASES, PHASES)
    none = (np.zeros((1, 2)), priors.no_wave, np.log([1 - priors.wave_chance]))
    return [none, (centres, priors.wave_spread, np.log(chances))]


def _likelihoods(
    columns: FloatArray, steps: FloatArray, target: FloatArray, priors: Priors, hinge: int | None
) -> tuple[float, tuple[float, float]]:
    """(log likelihood, (mean, variance) of the line's slope) of all courses with a line from ``hinge`` on (None:
    without one), but for what all of them have in common. Slopes are positive."""
    from scipy.special import log_ndtr

    constants, ended = len(priors.constants_h), len(priors.ended)
    shapes = np.arange(BASE, BASE + constants + ended)
    chances = np.r_[
        np.full(constants, (1 - priors.ended_chance) / constants), np.full(ended, priors.ended_chance / ended)
    ]
    members = np.column_stack([np.tile(np.arange(BASE), (len(shapes), 1)), shapes])
    if hinge is not None:
        members = np.column_stack([members, np.full(len(shapes), BASE + constants + ended + hinge)])
    gram = (columns.T @ columns)[members[:, :, None], members[:, None, :]]  # [M, d, d]
    with_target = (columns.T @ target)[members]  # [M, d]
    with_step = (columns.T @ steps)[members]  # [M, d, N]
    step_square, step_target = (steps**2).sum(axis=0), steps.T @ target
    places = steps.shape[1] - 1
    step_chances = np.log(np.r_[1 - priors.step_chance, np.full(places, priors.step_chance / places)])
    logs, slopes, variances = [], [], []
    for centres, spread, wave_chances in _waves(priors):
        for size, size_spread, size_chance in priors.start_up:
            means = np.zeros((len(centres), members.shape[1]))  # [J, d]
            means[:, 1:3], means[:, BASE] = centres, size
            spreads = np.array([1.0, spread, spread, priors.half_day, priors.half_day, size_spread, priors.rate_h])
            spreads = spreads[: members.shape[1]]
            precision = gram + np.diag(spreads**-2.0)
            covariance = np.linalg.inv(precision)
            off = with_target[:, None, :] - means @ gram  # of what the means leave, [M, J, d]
            found = off @ covariance
            misfit = ((means @ gram) * means).sum(axis=2) - 2 * with_target @ means.T
            log = 0.5 * ((found * off).sum(axis=2) - misfit - np.linalg.slogdet(precision)[1][:, None])
            log += np.log(chances)[:, None] + wave_chances + np.log(size_chance) - np.log(spreads).sum()
            # A step of any height at each place, beside all that: the same with one more column.
            solved = covariance @ with_step  # [M, d, N]
            own = step_square + priors.step**-2.0 - (with_step * solved).sum(axis=1)  # [M, N]
            rest = step_target - means @ with_step - found @ with_step  # [M, J, N]
            height = rest / own[:, None, :]
            rest *= height
            rest *= 0.5
            rest += log[:, :, None]
            rest += (step_chances - 0.5 * np.log(own * priors.step**2))[:, None, :]
            shape, centre, place = np.nonzero(rest > rest.max() - NEGLIGIBLE)
            log = rest[shape, centre, place]
            if hinge is not None:
                moved = solved[shape, -1, place]
                slope = found[shape, centre, -1] - height[shape, centre, place] * moved
                variance = covariance[shape, -1, -1] + moved**2 / own[shape, place]
                log = log + np.log(2.0) + log_ndtr(slope / np.sqrt(variance))
                slopes.append(slope)
                variances.append(variance)
            logs.append(log)
    every = np.concatenate(logs)
    top = float(every.max())
    weights = np.exp(every - top)
    total = float(weights.sum())
    if hinge is None:
        return top + float(np.log(total)), (0.0, 0.0)
    slope, variance = np.concatenate(slopes), np.concatenate(variances)
    mean = float(weights @ slope) / total
    return top + float(np.log(total)), (mean, float(weights @ (variance + slope**2)) / total - mean**2)

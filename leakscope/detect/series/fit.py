"""The course of a floor as a level, a start-up, one step and one line.

All combinations of the shapes below are fitted by least squares; the one with the least Bayesian information criterion
(Schwarz 1978) wins, where the number of readings is reduced by their autocorrelation. Two of them are kept apart: the
best with a line and the best without. By how much the first is better says how much the data speak for a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

EXPONENTIALS = (0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.14, 0.2, 0.28, 0.4)
"""Time constants of a start-up that saturates, as shares of the time."""
STOPS = tuple(np.arange(0.05, 0.9, 0.05))
"""Where a ramp may end."""
STEPS = tuple(np.arange(0.025, 0.98, 0.025))
HINGES = tuple(np.arange(0.0, 0.8, 0.025))
"""Where a line may begin; refined by :data:`REFINED` around the best."""
REFINED = np.arange(-0.02, 0.0201, 0.005)
SETTLED_CONSTANTS = 3.0
"""A start-up has settled after so many time constants: 95 % of it."""
MAX_PHI = 0.98
READINGS_A_PARAMETER = 4
"""Readings that each parameter of a course needs."""


@dataclass(frozen=True)
class Fit:
    """The winning course over times scaled to 0..1.

    ``slope`` and its standard ``error`` (widened by autocorrelation) are per whole time; ``hinge``: where the line
    begins; ``start_up``: exponential, ramp or ''; ``start_up_rise``, ``step_rise``: what they add; ``settled``: where
    they are over; ``noise``: standard deviation of what is left; ``gain``: criterion without a line minus with one.
    """

    slope: float
    error: float
    hinge: float
    start_up: str
    start_up_rise: float
    step_rise: float
    settled: float
    noise: float
    gain: float
    before_line: FloatArray  # start-up and step at the times of the floor


@dataclass(frozen=True)
class _Candidate:
    start_up: tuple[str, float]
    step: float  # < 0: none
    hinge: float  # < 0: no line


NOTHING = 1
"""Row of :func:`_shapes` that is zero throughout; row 0 is the level."""


@lru_cache(maxsize=1)
def _candidates() -> tuple[list[_Candidate], npt.NDArray[np.int64]]:
    """All combinations, and int64[n, 4]: the rows of :func:`_shapes` that each is made of."""
    none = ("", 0.0)
    exponentials = [("exponential", tau) for tau in EXPONENTIALS]
    ramps = [("ramp", stop) for stop in STOPS]
    found = [_Candidate(s, -1.0, h) for s, h in product([none, *exponentials, *ramps], (-1.0, *HINGES))]
    found += [_Candidate(s, at, h) for s, at, h in product([none, *exponentials], STEPS, (-1.0, 0.0))]
    row = {key: index + 2 for index, key in enumerate([*exponentials, *ramps, *STEPS])}
    lines = {hinge: len(row) + 2 + index for index, hinge in enumerate(HINGES)}
    members = [(0, row.get(c.start_up, NOTHING), row.get(c.step, NOTHING), lines.get(c.hinge, NOTHING)) for c in found]
    return found, np.array(members, np.int64)


def _shapes(u: FloatArray) -> FloatArray:
    """float64[shapes, K]: level, nothing, start-ups, steps, lines, in the order that :func:`_candidates` counts in."""
    rows = [np.ones(len(u)), np.zeros(len(u))]
    rows += [1.0 - np.exp(-u / tau) for tau in EXPONENTIALS]
    rows += [np.minimum(u, stop) / stop for stop in STOPS]
    rows += [(u >= at).astype(np.float64) for at in STEPS]
    rows += [np.maximum(0.0, u - hinge) for hinge in HINGES]
    return np.stack(rows)


def _columns(candidate: _Candidate, u: FloatArray) -> list[FloatArray]:
    """Level, start-up, step, line; zeros for what the candidate has not."""
    nothing = np.zeros(len(u))
    name, where = candidate.start_up
    start_up = nothing
    if name == "exponential":
        start_up = 1.0 - np.exp(-u / where)
    elif name == "ramp":
        start_up = np.minimum(u, where) / where
    step = (u >= candidate.step).astype(np.float64) if candidate.step >= 0 else nothing
    line = np.maximum(0.0, u - candidate.hinge) if candidate.hinge >= 0 else nothing
    return [np.ones(len(u)), start_up, step, line]


def fit(t_s: FloatArray, value: FloatArray) -> Fit:
    """The best course through the floor, float64[K] each; K at least 6."""
    u = (t_s - t_s[0]) / (t_s[-1] - t_s[0])
    count = len(u)
    scale = max(float(np.ptp(value)), 1e-12)
    y = (value - value[0]) / scale
    candidates, members = _candidates()
    # How many of the readings are independent is told by a smooth course that favours none of the shapes.
    smooth = np.stack([np.ones(count), u, u**2, u**3, np.sqrt(u), 1 - np.exp(-u / 0.05)], axis=1)
    phi = autocorrelation(_rest(smooth, y))
    effective = max(4.0, count * (1 - phi) / (1 + phi))
    # Each candidate is four of the same few shapes: all their products are gathered from one matrix.
    shapes = _shapes(u)
    products = shapes @ shapes.T
    with_y = shapes @ y
    gram = products[members[:, :, None], members[:, None, :]] + 1e-9 * np.eye(4)
    solved = np.linalg.solve(gram, with_y[members][:, :, None])[:, :, 0]
    squares = float(y @ y) - (solved * with_y[members]).sum(axis=1)
    mean_square = np.maximum(squares / count, 1e-10)
    parameters = np.array(
        [1 + 2 * bool(c.start_up[0]) + 2 * (c.step >= 0) + (c.hinge >= 0) + (c.hinge > 0) for c in candidates]
    )
    scores = effective * np.log(mean_square) + parameters * np.log(effective)
    scores[solved[:, 1] < 0] = np.inf
    scores[parameters > max(3, count // READINGS_A_PARAMETER)] = np.inf
    has_line = np.array([c.hinge >= 0 for c in candidates])
    without = int(np.argmin(np.where(has_line, np.inf, scores)))
    with_line = int(np.argmin(np.where(has_line, scores, np.inf)))
    gain = float(scores[without] - scores[with_line])
    best = candidates[with_line if gain > 0 else without]
    if best.hinge > 0:
        best = _refined(best, u, y)
    return _result(best, u, y, scale, gain)


def _refined(best: _Candidate, u: FloatArray, y: FloatArray) -> _Candidate:
    near = [_Candidate(best.start_up, best.step, float(h)) for h in best.hinge + REFINED if 0 <= h < 0.9]
    squares = [float((_rest(np.stack(_columns(c, u), axis=1), y) ** 2).sum()) for c in near]
    return near[int(np.argmin(squares))]


def _result(best: _Candidate, u: FloatArray, y: FloatArray, scale: float, gain: float) -> Fit:
    design = np.stack(_columns(best, u), axis=1)
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    rest = y - design @ coefficients
    slope = error = 0.0
    if best.hinge >= 0:
        phi = autocorrelation(rest)
        used = int((design != 0).any(axis=0).sum())
        variance = float(rest @ rest) / max(1, len(u) - used) * (1 + phi) / (1 - phi)
        slope = float(coefficients[3])
        error = float(np.sqrt(variance * np.linalg.pinv(design.T @ design)[3, 3]))
    name, where = best.start_up
    settled = max(best.step, {"exponential": SETTLED_CONSTANTS * where, "ramp": where}.get(name, 0.0))
    return Fit(
        slope * scale,
        error * scale,
        max(best.hinge, 0.0),
        name,
        float(coefficients[1]) * scale,
        float(coefficients[2]) * scale,
        float(np.clip(settled, 0.0, 1.0)),
        float(np.std(rest)) * scale,
        gain,
        design[:, 1:3] @ coefficients[1:3] * scale,
    )


def _rest(design: FloatArray, y: FloatArray) -> FloatArray:
    solution, *_ = np.linalg.lstsq(design, y, rcond=None)
    rest: FloatArray = y - design @ solution
    return rest


def autocorrelation(rest: FloatArray) -> float:
    """Of neighbours, with the bias of short series (Kendall 1954) taken off; 0 to :data:`MAX_PHI`."""
    square = float(rest @ rest)
    if square <= 0 or len(rest) < 4:
        return 0.0
    raw = float(rest[1:] @ rest[:-1]) / square
    return float(np.clip(raw + (1 + 3 * raw) / len(rest), 0.0, MAX_PHI))


def straight(t_s: FloatArray, value: FloatArray) -> tuple[float, float]:
    """(slope, its standard error widened by autocorrelation) of a straight line, per second."""
    if len(t_s) < 3:
        return 0.0, 0.0
    centred = t_s - t_s.mean()
    square = float(centred @ centred)
    slope = float(centred @ value) / square
    rest = value - value.mean() - slope * centred
    phi = autocorrelation(rest)
    variance = float(rest @ rest) / max(1, len(t_s) - 2) * (1 + phi) / (1 - phi)
    return slope, float(np.sqrt(variance / square))


def theil_sen(t_s: FloatArray, value: FloatArray) -> float:
    """Median slope between all pairs (Theil 1950, Sen 1968): a single step leaves it near zero."""
    first, second = np.triu_indices(len(t_s), k=1)
    return float(np.median((value[second] - value[first]) / (t_s[second] - t_s[first])))

"""What one counter does: flat, rising for good, levelled off, given back.

The floor is fitted by a level, at most one start-up shape (a saturating exponential, a ramp that stops, a step) and at
most one line that begins at a hinge; the combination with the least Bayesian information criterion (Schwarz 1978) wins,
with the number of readings reduced by their autocorrelation. A leak is the line: it must be there, be significant with
the autocorrelation taken into account, be large against level and noise, and go on to the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from leakscope.detect.series.floors import Floor, floor

FloatArray = npt.NDArray[np.float64]

MIN_READINGS = 8
MIN_EFFECT_SHARE = 0.01
"""A rise counts from this share of the level on…"""
MIN_EFFECT_NOISE = 3.0
"""…and from this many times what is left over when the course is fitted."""
MAX_FALL_SHARE = 0.04
"""A counter whose falls stay below this share of its rise rises only, if not evenly."""
MIN_RETURN_SHARE = 0.05
MIN_RETURN_NOISE = 8.0
"""Falls by less than this share of the level, or by fewer times the noise, are no memory given back."""
MIN_T = 4.0
"""The line's slope against its standard error: one-sided p of 3e-5, room for hourly looks over 72 hours."""
EARLY = 0.05
"""A line that begins in this first share of the time began with the first reading."""
FLAT_END = 0.2
"""Growth that stops for this last share of the time has levelled off, unless it paused as long before."""
PAUSE_FACTOR = 1.3
MIN_END_RATE = 0.25
"""The last part must rise by this share of the mean rate."""
EXPONENTIALS = (0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.14, 0.2, 0.28, 0.4)
"""Time constants of start-up, as shares of the time."""
HINGES = np.arange(0.0, 0.8, 0.025)
REFINED = np.arange(-0.02, 0.0201, 0.005)
STOPS = np.arange(0.05, 0.9, 0.05)
STEPS = np.arange(0.025, 0.98, 0.025)
MAX_PHI = 0.98


class Course(Enum):
    """What a counter does over the time it was read."""

    FLAT = "flat"
    RISING = "rising"
    PLATEAU = "levelled off"
    RETURNED = "rose and was given back"
    FALLING = "falling"
    SHORT = "too few readings"


@dataclass(frozen=True)
class Trend:
    """The course of one counter.

    ``rate`` per second with a 95 % interval; ``start_s``: where the rise begins; ``rise``: what the floor gained in
    all; ``line_rise``: what of it the line carries; ``smallest_rate``: the least that would have been called rising;
    ``cycles``: ended teeth; ``fall``: the deepest.
    """

    course: Course
    rate: float = 0.0
    low: float = 0.0
    high: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    rise: float = 0.0
    line_rise: float = 0.0
    settled_s: float = 0.0
    smallest_rate: float = float("inf")
    level: float = 0.0
    noise: float = 0.0
    cycles: int = 0
    fall: float = 0.0
    last_fall_s: float = 0.0
    concave: bool = False
    lives: int = 1
    floor: Floor | None = field(default=None, compare=False, repr=False)

    @property
    def rising(self) -> bool:
        return self.course is Course.RISING

    @property
    def grew(self) -> bool:
        return self.course in (Course.RISING, Course.PLATEAU, Course.RETURNED)


def trend(t_s: FloatArray, value: FloatArray) -> Trend:
    """The course of one life of a counter: float64[n] times (rising) and values."""
    if len(t_s) < MIN_READINGS or t_s[-1] <= t_s[0]:
        return Trend(Course.SHORT, level=float(np.median(value)) if len(value) else 0.0)
    base = floor(t_s, value)
    total = t_s[-1] - t_s[0]
    common = {
        "level": base.level, "cycles": len(base.cycles), "fall": max((c.fall for c in base.cycles), default=0.0),
        "last_fall_s": float(base.level_t_s[base.cycles[-1].trough]) if base.cycles else 0.0,
        "end_s": float(t_s[-1]), "floor": base,
    }  # fmt: skip
    if base.span == 0:
        if value.max() == value.min():
            return Trend(Course.FLAT, smallest_rate=_effect(base, 0.0) / total, **common)
    if len(base.value) < 6:
        return _of_troughs(base, total, common)
    fit = _fit(base.t_s, base.value)
    course, concave = _course(base, fit)
    # Since the last trough the counter may have risen for good where it rises beyond what it ever fell.
    span = base.t_s[-1] - base.t_s[0]
    scale = 1.0 / span
    start = float(base.t_s[0] + fit.hinge * span)
    if fit.hinge <= EARLY or (fit.shape == "exponential" and fit.hinge <= fit.settled):
        start = float(t_s[0])  # under a start-up the beginning of the line cannot be told
    rate, error = fit.slope * scale, fit.error * scale
    if course is Course.RISING and fit.shape != "exponential" and (plain := _departure(base)):
        start, rate = plain
        error = min(error, rate / MIN_T)
        if start <= t_s[0] + EARLY * total:
            start = float(t_s[0])
    noise = fit.noise
    if course is not Course.RISING:
        rate_all = _plain(base, fit.settled)
        return Trend(
            course, rate_all[0], rate_all[0] - 1.96 * rate_all[1], rate_all[0] + 1.96 * rate_all[1], float(t_s[0]),
            rise=float(base.value[-1] - base.value[0]), settled_s=fit.settled * span + float(base.t_s[0]),
            smallest_rate=max(MIN_T * rate_all[1], _effect(base, noise) / total), noise=noise, concave=concave, **common,
        )  # fmt: skip
    return Trend(
        course, rate, rate - 1.96 * error, rate + 1.96 * error, start, rise=float(base.value[-1] - base.value[0]),
        line_rise=rate * (t_s[-1] - start), smallest_rate=max(MIN_T * error, _effect(base, noise) / total), noise=noise,
        concave=concave, **common,
    )  # fmt: skip


@dataclass(frozen=True)
class _Fit:
    slope: float  # per whole span
    error: float
    hinge: float
    shape: str
    shape_rise: float
    settled: float
    noise: float
    phi: float
    residual: FloatArray
    gain: float  # BIC without a line minus with one


def _fit(t_s: FloatArray, value: FloatArray) -> _Fit:
    """The best course through the floor; times are scaled to 0..1."""
    u = (t_s - t_s[0]) / (t_s[-1] - t_s[0])
    shapes: list[tuple[str, float, FloatArray | None]] = [("none", 0.0, None)]
    shapes += [("exponential", tau, 1.0 - np.exp(-u / tau)) for tau in EXPONENTIALS]
    shapes += [("ramp", stop, np.minimum(u, stop) / stop) for stop in STOPS]
    shapes += [("step", at, (u >= at).astype(np.float64)) for at in STEPS]
    lines: list[tuple[float, FloatArray | None]] = [(-1.0, None)]
    lines += [(hinge, np.maximum(0.0, u - hinge)) for hinge in HINGES]
    count = len(u)
    scale = max(float(np.ptp(value)), 1e-12)
    y = (value - value[0]) / scale
    ones = np.ones(count)
    # How many of the readings are independent is told by a smooth course that favours none of the shapes.
    phi = _phi(_rest(np.stack([ones, u, u**2, u**3, np.sqrt(u), (1 - np.exp(-u / 0.05))], axis=1), y))
    effective = max(4.0, count * (1 - phi) / (1 + phi))
    zero = np.zeros(count)
    grid = [(i, j) for i in range(len(shapes)) for j in range(len(lines))]
    designs = np.stack(
        [
            np.stack(
                [ones, zero if shapes[i][2] is None else shapes[i][2], zero if lines[j][1] is None else lines[j][1]]
            )
            for i, j in grid
        ]
    )
    parameters = np.array([1 + 2 * (i > 0) + (0 if j == 0 else 1 if lines[j][0] == 0 else 2) for i, j in grid])
    gram = designs @ designs.transpose(0, 2, 1) + 1e-9 * np.eye(3)
    solved = np.linalg.solve(gram, (designs @ y)[:, :, None])[:, :, 0]
    rests = y - np.einsum("gc,gct->gt", solved, designs)
    mean_square = np.maximum((rests * rests).mean(axis=1), 1e-10)
    scores = effective * np.log(mean_square) + parameters * np.log(effective)
    scores[solved[:, 1] < 0] = np.inf
    with_line = np.array([j > 0 for _, j in grid])
    best_without = int(np.argmin(np.where(with_line, np.inf, scores)))
    best_with = int(np.argmin(np.where(with_line, scores, np.inf)))
    gain = float(scores[best_without] - scores[best_with])
    i, j = grid[best_with if gain > 0 else best_without]
    name, where, shape = shapes[i]
    hinge, line = lines[j]
    if line is not None and hinge > 0:
        near = [h for h in hinge + REFINED if 0 <= h < 0.9]
        tried = [_solve([ones, *([shape] if shape is not None else []), np.maximum(0.0, u - h)], y)[1] for h in near]
        hinge = float(near[int(np.argmin([r @ r for r in tried if r is not None]))])
        line = np.maximum(0.0, u - hinge)
    columns = [ones, *(c for c in (shape, line) if c is not None)]
    coefficients, rest = _solve(columns, y)
    assert rest is not None
    slope = error = 0.0
    phi = _phi(rest)
    if line is not None:
        slope = float(coefficients[-1])
        design = np.stack(columns, axis=1)
        variance = float(rest @ rest) / max(1, count - design.shape[1])
        inverse = np.linalg.pinv(design.T @ design)
        error = float(np.sqrt(variance * inverse[-1, -1] * (1 + phi) / (1 - phi)))
    settled = {"exponential": 3 * where, "ramp": where, "step": where}.get(name, 0.0)
    return _Fit(
        slope * scale, error * scale, max(hinge, 0.0), name, float(coefficients[1]) * scale if shape is not None else 0.0,
        min(1.0, settled), float(np.std(rest)) * scale, phi, rest * scale, gain,
    )  # fmt: skip


def _solve(columns: list[FloatArray], y: FloatArray) -> tuple[FloatArray, FloatArray | None]:
    design = np.stack(columns, axis=1)
    gram = design.T @ design
    try:
        coefficients = np.linalg.solve(gram + 1e-10 * np.eye(len(gram)), design.T @ y)
    except np.linalg.LinAlgError:
        return np.zeros(len(columns)), None
    return coefficients, y - design @ coefficients


def _rest(design: FloatArray, y: FloatArray) -> FloatArray:
    solution, *_ = np.linalg.lstsq(design, y, rcond=None)
    rest: FloatArray = y - design @ solution
    return rest


def _phi(rest: FloatArray) -> float:
    """Lag-one autocorrelation, with the bias of short series (Kendall 1954) taken off; 0..MAX_PHI."""
    square = float(rest @ rest)
    if square <= 0 or len(rest) < 4:
        return 0.0
    raw = float(rest[1:] @ rest[:-1]) / square
    return float(np.clip(raw + (1 + 3 * raw) / len(rest), 0.0, MAX_PHI))


def _course(base: Floor, fit: _Fit) -> tuple[Course, bool]:
    rise = float(base.value[-1] - base.value[0])
    effect = _effect(base, fit.noise)
    grown = max(fit.shape_rise, 0.0)
    line_rise = fit.slope * (1 - fit.hinge)
    if line_rise > 0 and line_rise >= effect and fit.slope >= MIN_T * fit.error and fit.gain > 0:
        if _goes_on(base, fit):
            return Course.RISING, False
        return Course.PLATEAU, False
    if line_rise < -effect and fit.slope <= -MIN_T * fit.error and grown < effect:
        return Course.FALLING, False
    highest = float(base.level_value.max() - base.level_value[: max(2, len(base.level_value) // 50)].mean())
    fall = max((c.fall for c in base.cycles), default=0.0)
    if fall >= 0.5 * highest and min(fall, highest) >= max(
        MIN_RETURN_SHARE * abs(base.level), MIN_RETURN_NOISE * base.noise
    ):
        return Course.RETURNED, False
    if grown >= effect or rise >= effect:
        return Course.PLATEAU, fit.shape == "exponential"
    return Course.FLAT, False


def _goes_on(base: Floor, fit: _Fit) -> bool:
    """Whether the floor still rises at the end: no flat end longer than earlier pauses, and no single step."""
    t, v = base.t_s, base.value
    span = t[-1] - t[0]
    from_hinge = t >= t[0] + fit.hinge * span
    t, v = t[from_hinge], v[from_hinge]
    if len(t) < 4:
        return False
    warm = fit.shape_rise if fit.shape == "exponential" else 0.0
    total = v[-1] - v[0] - warm * 0.0
    if total <= 0:
        return False
    # A pause: a stretch over which the floor gains less than a tenth of its mean rate.
    rate = total / (t[-1] - t[0])
    flat_end, longest = _pauses(t, v, rate, fit.noise)
    if flat_end >= FLAT_END * span and flat_end >= PAUSE_FACTOR * longest:
        return False
    slopes = _theil_sen(t, v)
    return slopes >= MIN_END_RATE * rate


def _pauses(t: FloatArray, v: FloatArray, rate: float, noise: float) -> tuple[float, float]:
    """(length of the flat end, the longest flat stretch before it), seconds.

    From each reading on, a stretch is flat as long as the floor stays below a fifth of the mean rate plus the noise.
    """
    later = np.minimum.accumulate(v[::-1])[::-1]
    flat_end = 0.0
    for index in range(len(t) - 1, -1, -1):
        if v[-1] - later[index] <= 0.2 * rate * (t[-1] - t[index]) + noise:
            flat_end = float(t[-1] - t[index])
    longest = 0.0
    end_index = int(np.searchsorted(t, t[-1] - flat_end, side="left"))
    index = 0
    while index < end_index:
        reach = index
        while reach + 1 <= end_index and v[reach + 1] - v[index] <= 0.2 * rate * (t[reach + 1] - t[index]) + noise:
            reach += 1
        longest = max(longest, float(t[reach] - t[index]))
        index = max(reach, index + 1)
    return flat_end, longest


def _departure(base: Floor) -> tuple[float, float] | None:
    """(when a counter that never falls left its first level, its mean rate from there to the end), where its falls are
    small against its rise; else None. Growth that comes and goes with the work has no single slope, but a beginning."""
    t, v = base.level_t_s, base.raw_value
    edge = max(2, len(v) // 60)
    first, last = float(np.median(v[:edge])), float(np.median(v[-edge:]))
    rise = last - first
    if rise <= 0 or base.cycles or float((np.maximum.accumulate(v) - v).max()) > MAX_FALL_SHARE * rise:
        return None
    level = first + MAX_FALL_SHARE * rise
    left = int(np.flatnonzero(v <= level)[-1])
    if left >= len(t) - 2:
        return None
    rate = (last - float(v[left])) / float(t[-1] - t[left])
    start = max(float(t[left]) - (float(v[left]) - first) / max(rate, 1e-12), float(t[0]))
    return start, (last - first) / float(t[-1] - start)


def _theil_sen(t: FloatArray, v: FloatArray) -> float:
    first, second = np.triu_indices(len(t), k=1)
    return float(np.median((v[second] - v[first]) / (t[second] - t[first])))


def _plain(base: Floor, settled: float) -> tuple[float, float]:
    """Slope and its standard error of a straight line through the floor after start-up, a quarter of it at least."""
    first = int(np.clip(settled, 0.25, 0.75) * len(base.t_s))
    t, v = base.t_s[first:], base.value[first:]
    if len(t) < 3:
        return 0.0, 0.0
    design = np.stack([np.ones(len(t)), t - t.mean()], axis=1)
    rest = _rest(design, v)
    slope = float((t - t.mean()) @ v / ((t - t.mean()) @ (t - t.mean())))
    phi = _phi(rest)
    variance = float(rest @ rest) / max(1, len(t) - 2) * (1 + phi) / (1 - phi)
    return slope, float(np.sqrt(variance / ((t - t.mean()) @ (t - t.mean()))))


def _effect(base: Floor, noise: float) -> float:
    return max(MIN_EFFECT_SHARE * abs(base.level), MIN_EFFECT_NOISE * noise)


def _of_troughs(base: Floor, total: float, common: dict[str, object]) -> Trend:
    """Few long cycles: their troughs alone say what is kept."""
    t, v = base.t_s, base.value
    effect = _effect(base, base.noise)
    rise = float(v[-1] - v[0])
    rate = float((v[-1] - v[min(1, len(v) - 1)]) / max(t[-1] - t[min(1, len(v) - 1)], 1e-9)) if len(v) > 2 else 0.0
    smallest = effect / total
    fall = float(common["fall"])  # type: ignore[arg-type]
    steady = (
        len(v) >= 4 and bool((np.diff(v) > 0).all()) and np.diff(v)[-2:].min() >= MIN_END_RATE * rise / (len(v) - 1)
    )
    if steady and rise >= max(effect, 0.1 * fall):
        slope = _theil_sen(t, v)
        return Trend(Course.RISING, slope, 0.5 * slope, 1.5 * slope, float(t[0]), rise=rise, line_rise=rise,
                     smallest_rate=smallest, noise=base.noise, **common)  # type: ignore[arg-type]  # fmt: skip
    large = fall >= max(MIN_RETURN_SHARE * abs(base.level), MIN_RETURN_NOISE * base.noise)
    return Trend(Course.RETURNED if large else Course.FLAT, rate, rate, rate, float(t[0]), rise=rise,
                 smallest_rate=smallest, noise=base.noise, **common)  # type: ignore[arg-type]  # fmt: skip

"""What one counter does: flat, rising for good, levelled off, given back.

A leak is the line of the fitted course (:mod:`leakscope.detect.series.fit`): it must be there, be significant with the
autocorrelation taken into account, be large against level and noise, and go on to the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from leakscope.detect.series.fit import Fit, fit, straight, theil_sen
from leakscope.detect.series.floors import Floor, floor

FloatArray = npt.NDArray[np.float64]

MIN_READINGS = 8
MIN_FLOOR = 6
"""Points that a floor needs for a course; fewer are troughs of long cycles."""
MIN_EFFECT_SHARE = 0.015
"""A rise counts from this share of the level on…"""
MIN_EFFECT_NOISE = 3.0
"""…and from this many times what is left over when the course is fitted."""
MIN_T = 4.0
"""The line's slope against its standard error: one-sided p of 3e-5, room for hourly looks over 72 hours."""
MIN_GAIN = 3.0
"""By how much a course with a line must be better than the best without (Kass and Raftery 1995: positive from 2 on)."""
MAX_FALL_SHARE = 0.04
"""A counter whose falls stay below this share of its rise rises only, if not evenly."""
MAX_BEFORE_LINE = 0.15
"""Start-up and step below this share of the rise say only that the growth is uneven."""
MIN_RETURN_SHARE = 0.05
MIN_RETURN_NOISE = 8.0
"""Falls by less than this share of the level, or by fewer times the noise, are no memory given back."""
UNDER_START_UP = 2.0
"""A line that begins within this many times the start-up's length may have begun under it."""
EARLY = 0.05
"""A line that begins in this first share of the time began with the first reading."""
MIN_EARLY_RATE = 0.35
"""A rise by this share of the line's rate before it began is its beginning."""
FLAT_END = 0.2
"""Growth that stops for this last share of the time has levelled off, unless it paused as long before."""
PAUSE_FACTOR = 1.3
PAUSE_RATE = 0.2
"""A pause gains less than this share of the mean rate."""
PARTS = 3
MIN_END_RATE = 0.25
"""All of the line, and the median of disjoint parts of it, must rise by this share of the mean rate (Theil-Sen): one
step lifts a single part."""
TROUGH_RISE = 0.1
"""Rising troughs of few long cycles count from this share of the deepest fall on."""
Z95 = 1.96


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
    ``cycles``: ended teeth; ``fall``: the deepest; ``lives``: of the process, each judged by itself.
    """

    course: Course
    rate: float = 0.0
    low: float = 0.0
    high: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    rise: float = 0.0
    line_rise: float = 0.0
    smallest_rate: float = float("inf")
    level: float = 0.0
    cycles: int = 0
    fall: float = 0.0
    lives: int = 1
    floor: Floor | None = field(default=None, compare=False, repr=False)

    @property
    def rising(self) -> bool:
        """Whether it rises for good."""
        return self.course is Course.RISING

    @property
    def grew(self) -> bool:
        """Whether it rose at all, even if it does not any more."""
        return self.course in (Course.RISING, Course.PLATEAU, Course.RETURNED)


def trend(t_s: FloatArray, value: FloatArray) -> Trend:
    """The course of one life of a counter: float64[n] times (rising) and values."""
    if len(t_s) < MIN_READINGS or t_s[-1] <= t_s[0]:
        return Trend(Course.SHORT, level=float(np.median(value)) if len(value) else 0.0)
    base = floor(t_s, value)
    total = float(t_s[-1] - t_s[0])
    known = Trend(
        Course.FLAT,
        start_s=float(t_s[0]),
        end_s=float(t_s[-1]),
        level=base.level,
        cycles=len(base.cycles),
        fall=max((c.fall for c in base.cycles), default=0.0),
        rise=float(base.value[-1] - base.value[0]),
        floor=base,
    )
    if base.span == 0 and value.max() == value.min():
        return replace(known, smallest_rate=_effect(base, 0.0) / total)
    if len(base.value) < MIN_FLOOR:
        return _of_troughs(base, total, known)
    fitted = fit(base.t_s, base.value)
    course = _course(base, fitted)
    if course is not Course.RISING:
        first = int(np.clip(fitted.settled, 0.25, 0.75) * len(base.t_s))
        rate, error = straight(base.t_s[first:], base.value[first:])
        return replace(
            known,
            course=course,
            rate=rate,
            low=rate - Z95 * error,
            high=rate + Z95 * error,
            smallest_rate=max(MIN_T * error, _effect(base, fitted.noise) / total),
        )
    return _rising(base, fitted, total, known)


def _rising(base: Floor, fitted: Fit, total: float, known: Trend) -> Trend:
    span = float(base.t_s[-1] - base.t_s[0])
    rate, error = fitted.slope / span, fitted.error / span
    start = float(base.t_s[0]) + fitted.hinge * span
    if fitted.start_up == "exponential" and fitted.hinge <= UNDER_START_UP * fitted.settled:
        start = known.start_s  # under a start-up the beginning of the line cannot be told
    elif (
        fitted.start_up != "exponential"
        and fitted.start_up_rise + fitted.step_rise <= MAX_BEFORE_LINE * known.rise
        and (departure := _departure(base))
    ):
        start, rate = departure
        error = min(error, rate / MIN_T)
    elif _rises_before(base, fitted, start, rate):
        start = known.start_s
    if start <= known.start_s + EARLY * total:
        start = known.start_s
    return replace(
        known,
        course=Course.RISING,
        rate=rate,
        low=rate - Z95 * error,
        high=rate + Z95 * error,
        start_s=start,
        line_rise=rate * (known.end_s - start),
        smallest_rate=max(MIN_T * error, _effect(base, fitted.noise) / total),
    )


def _rises_before(base: Floor, fitted: Fit, start: float, rate: float) -> bool:
    """Whether the floor rises before the line begins as well, if less evenly."""
    before = base.t_s < start
    if before.sum() < 4:
        return False
    start_up = fitted.before_line if fitted.start_up == "exponential" else 0.0
    return theil_sen(base.t_s[before], (base.value - start_up)[before]) >= MIN_EARLY_RATE * rate


def _course(base: Floor, fitted: Fit) -> Course:
    effect = _effect(base, fitted.noise)
    grown = max(fitted.start_up_rise, 0.0) + max(fitted.step_rise, 0.0)
    line_rise = fitted.slope * (1 - fitted.hinge)
    significant = fitted.gain > MIN_GAIN and abs(fitted.slope) >= MIN_T * fitted.error
    if line_rise >= effect and significant:
        return Course.RISING if _goes_on(base, fitted) else Course.PLATEAU
    if line_rise <= -effect and significant and grown < effect:
        return Course.FALLING
    level = base.level_value
    highest = float(level.max() - level[: max(2, len(level) // 50)].mean())
    fall = max((c.fall for c in base.cycles), default=0.0)
    if fall >= highest / 2 and min(fall, highest) >= _returned(base):
        return Course.RETURNED
    if max(grown, float(base.value[-1] - base.value[0])) >= effect:
        return Course.PLATEAU
    return Course.FLAT


def _returned(base: Floor) -> float:
    return max(MIN_RETURN_SHARE * abs(base.level), MIN_RETURN_NOISE * base.noise)


def _effect(base: Floor, noise: float) -> float:
    return max(MIN_EFFECT_SHARE * abs(base.level), MIN_EFFECT_NOISE * noise)


def _goes_on(base: Floor, fitted: Fit) -> bool:
    """Whether the line still rises at the end: no flat end longer than earlier pauses, and no single step."""
    span = float(base.t_s[-1] - base.t_s[0])
    inside = base.t_s >= base.t_s[0] + fitted.hinge * span
    t, v = base.t_s[inside], (base.value - fitted.before_line)[inside]
    if len(t) < min(2 * PARTS, len(base.t_s) // 2 + 1) or v[-1] <= v[0]:
        return False
    rate = float(v[-1] - v[0]) / float(t[-1] - t[0])
    flat_end, longest = _pauses(t, v, rate, fitted.noise)
    if flat_end >= FLAT_END * span and flat_end >= PAUSE_FACTOR * longest:
        return False
    parts = [part for part in np.array_split(np.arange(len(t)), PARTS) if len(part) >= 2]
    slopes = [theil_sen(t[part], v[part]) for part in parts]
    return min(theil_sen(t, v), float(np.median(slopes))) >= MIN_END_RATE * rate


def _pauses(t: FloatArray, v: FloatArray, rate: float, noise: float) -> tuple[float, float]:
    """(length of the flat end, the longest flat stretch before it), seconds.

    From each reading on, a stretch is flat as long as the floor stays below a share of the mean rate plus the noise.
    """
    later = np.minimum.accumulate(v[::-1])[::-1]
    flat = v[-1] - later <= PAUSE_RATE * rate * (t[-1] - t) + noise
    end = int(np.argmax(flat))
    longest, index = 0.0, 0
    while index < end:
        within = v[index : end + 1] - v[index] <= PAUSE_RATE * rate * (t[index : end + 1] - t[index]) + noise
        reach = index + (int(np.argmin(within)) - 1 if not within.all() else end - index)
        longest = max(longest, float(t[reach] - t[index]))
        index = max(reach, index + 1)
    return float(t[-1] - t[end]), longest


def _departure(base: Floor) -> tuple[float, float] | None:
    """(when a counter that never falls left its first level, its mean rate from there to the end), where its falls are
    small against its rise; else None. Growth that comes and goes with the work has no single slope, but a beginning."""
    t, v = base.level_t_s, base.raw_value
    edge = max(2, len(v) // 60)
    first, last = float(np.median(v[:edge])), float(np.median(v[-edge:]))
    rise = last - first
    if rise <= 0 or base.cycles or float((np.maximum.accumulate(v) - v).max()) > MAX_FALL_SHARE * rise:
        return None
    left = int(np.flatnonzero(v <= first + MAX_FALL_SHARE * rise)[-1])
    if left >= len(t) - 2:
        return None
    rate = (last - float(v[left])) / float(t[-1] - t[left])
    start = max(float(t[left]) - (float(v[left]) - first) / max(rate, 1e-12), float(t[0]))
    return start, rise / float(t[-1] - start)


def _of_troughs(base: Floor, total: float, known: Trend) -> Trend:
    """Few long cycles: their troughs alone say what is kept."""
    t, v = base.t_s, base.value
    effect = _effect(base, base.noise)
    steps = np.diff(v)
    known = replace(known, smallest_rate=effect / total)
    steady = len(v) >= 4 and bool((steps > 0).all()) and steps[-2:].min() >= MIN_END_RATE * steps.mean()
    if steady and known.rise >= max(effect, TROUGH_RISE * known.fall):
        slope = theil_sen(t, v)
        return replace(
            known,
            course=Course.RISING,
            rate=slope,
            low=0.5 * slope,
            high=1.5 * slope,
            start_s=float(t[0]),
            line_rise=known.rise,
        )
    rate = float(v[-1] - v[1]) / max(float(t[-1] - t[1]), 1e-9) if len(v) > 2 else 0.0
    course = Course.RETURNED if known.fall >= _returned(base) else Course.FLAT
    return replace(known, course=course, rate=rate, low=rate, high=rate)

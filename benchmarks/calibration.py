"""The tables of docs/calibration.md: what the z-rule and the robust form make of 72 hours with and without a leak.

``python -m benchmarks.calibration [SERIES]`` prints them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from leakscope.detect.calibration import Dimension, calibrate
from leakscope.detect.calibration.z_rule import WINDOW, z_scores
from leakscope.detect.series.counters import Counter
from leakscope.detect.series.judge import judge
from leakscope.model.calibration import Calibrated

FloatArray = npt.NDArray[np.float64]

MIB = 2.0**20
LEVEL = 6 * 1024 * MIB
HOURS, STEP_S = 72, 30.0
RATES_MIB_H = (0, 5, 48.6, 200, 1000)
NOISES = ((0.01, 0.0), (0.0005, 0.0), (0.01, 0.98))
"""Standard deviation as a share of the level, and first-order autocorrelation."""


def series(
    seed: int, rate_mib_h: float, noise: float, phi: float, hours: float = HOURS
) -> tuple[FloatArray, FloatArray]:
    """(times in s, resident bytes): a level of 6 GiB, noise, and growth from the first reading on."""
    rng = np.random.default_rng(seed)
    t = np.arange(0.0, hours * 3600, STEP_S)
    shocks = rng.normal(0.0, noise * LEVEL * np.sqrt(1 - phi**2), len(t))
    walk = np.array(list(accumulate(shocks, lambda before, shock: phi * before + shock)))
    return t, LEVEL + walk + rate_mib_h * MIB * t / 3600


@dataclass(frozen=True)
class Row:
    """What became of ``seeds`` series of one kind: medians, and how many the verdict calls a leak."""

    noise: float
    phi: float
    rate_mib_h: float
    alarms: float
    rebaselines: float
    swallowed_mib: float
    grown_mib: float
    deviation_before: float
    deviation_z: float
    first_divergence_h: float
    logged_mib: float
    leaks: int
    seeds: int


def row(rate_mib_h: float, noise: float, phi: float, seeds: int, hours: float = HOURS) -> Row:
    """One row of the table."""
    made: list[Calibrated] = []
    leaks = 0
    for seed in range(seeds):
        t, value = series(seed, rate_mib_h, noise, phi, hours)
        made.append(calibrate(Dimension("rss", t, value)))
        leaks += judge([Counter("rss", t, value, True)]).verdict.verdict == "leak"
    first = [one.divergences[0].t_s / 3600 for one in made if one.divergences]

    def median(values: list[float]) -> float:
        return float(np.median(values))

    return Row(
        noise,
        phi,
        rate_mib_h,
        median([one.z_alarms for one in made]),
        median([len(one.z_rebaselines) for one in made]),
        median([one.z_swallowed_bytes / MIB for one in made]),
        rate_mib_h * hours,
        median([one.before for one in made]),
        median([one.after_z for one in made]),
        median(first) if len(first) > seeds / 2 else float("nan"),
        median([one.diverged_bytes / MIB for one in made]),
        leaks,
        seeds,
    )


def ramp_scores(rates_mib_h: tuple[float, ...] = (1, 48.6, 1000, 1_000_000)) -> dict[float, float]:
    """The z of the last reading of a straight ramp, by its rate."""
    t = np.arange(WINDOW) * STEP_S
    return {rate: float(z_scores(LEVEL + rate * MIB * t / 3600)[-1]) for rate in rates_mib_h}


def main(seeds: int = 20) -> None:
    """Print both tables in Markdown."""
    print("| rate, MiB/h | z of the last reading of a straight ramp |\n|---|---|")
    for rate, score in ramp_scores().items():
        print(f"| {rate:,g} | {score:.4f} |")
    print()
    print(
        "| noise | leak, MiB/h | grown, MiB | z-rule: alarms | swallowed, MiB | deviation before → after "
        "| robust: first divergence | logged, MiB | verdict: leak |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for noise, phi in NOISES:
        for rate in RATES_MIB_H:
            one = row(rate, noise, phi, seeds)
            divergence = "none" if np.isnan(one.first_divergence_h) else f"{one.first_divergence_h:.1f} h"
            kind = f"{noise:.2%}" + (f", φ {phi}" if phi else "")
            print(
                f"| {kind} | {rate:g} | {one.grown_mib:,.0f} | {one.alarms:.0f} | {one.swallowed_mib:,.0f} "
                f"| {one.deviation_before:.2%} → {one.deviation_z:.2%} | {divergence} | {one.logged_mib:,.0f} "
                f"| {one.leaks} of {one.seeds} |",
                flush=True,
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))

"""Generated counters of 72 hours whose truth is known.

Every series has a level of 0.25 to 8 GiB, AR(1) noise of 1 to 5 % of it (phi 0 to 0.98), and some of: start-up that
saturates, a daily wave of 10 to 30 %, a saw-tooth of 5 to 20 %, one step, restarts, missing stretches. Half of them
leak 5 to 100 MiB/h from a random start on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from leakscope.detect.series.counters import Counter

FloatArray = npt.NDArray[np.float64]
MIB_H = 2**20 / 3600
HOURS = 72
STEP_S = 30.0


@dataclass(frozen=True)
class Made:
    """One generated series and its truth; ``rate`` in bytes a second, 0 for none."""

    t_s: FloatArray
    value: FloatArray
    rate: float
    start_s: float
    traits: tuple[str, ...]
    process_start_s: FloatArray

    def until(self, end_s: float) -> Made:
        """What has been read before ``end_s``."""
        early = self.t_s < end_s
        return replace(self, t_s=self.t_s[early], value=self.value[early], process_start_s=self.process_start_s[early])

    def counters(self) -> list[Counter]:
        """As counters of a process."""
        made = [Counter("rss", self.t_s, self.value, True)]
        if np.ptp(self.process_start_s):
            made.append(Counter("proc_start_s", self.t_s, self.process_start_s, False))
        return made


def autoregressive(rng: np.random.Generator, count: int, phi: float, deviation: float) -> FloatArray:
    """AR(1) noise of the given standard deviation."""
    shocks = rng.normal(0.0, deviation * np.sqrt(1 - phi**2), count)
    shocks[0] = rng.normal(0.0, deviation)
    return np.array(list(accumulate(shocks, lambda before, shock: phi * before + shock)))


def make(
    seed: int,
    leaking: bool | None = None,
    hours: float = HOURS,
    step_s: float = STEP_S,
    rate: float | None = None,
) -> Made:
    """The series of one seed; every second one leaks where ``leaking`` is not given, at ``rate`` where that is."""
    rng = np.random.default_rng(seed)
    leaking = bool(seed % 2) if leaking is None else leaking
    t = np.arange(0.0, hours * 3600, step_s)
    total = t[-1]
    level = 2**30 * float(np.exp(rng.uniform(np.log(0.25), np.log(8))))
    phi = float(rng.choice([0.0, 0.5, 0.9, 0.98]))
    traits = [f"phi {phi}"]
    value = np.full(len(t), level) + autoregressive(rng, len(t), phi, level * rng.uniform(0.01, 0.05))
    if rng.random() < 0.6:
        traits.append("start-up")
        value -= level * rng.uniform(0.1, 0.5) * np.exp(-t / (total * rng.uniform(0.005, 0.06)))
    if rng.random() < 0.4:
        traits.append("day")
        value += level * rng.uniform(0.1, 0.3) / 2 * np.sin(2 * np.pi * t / 86_400 + rng.uniform(0, 6.28))
    if rng.random() < 0.4:
        traits.append("saw-tooth")
        period = rng.uniform(600, 14_400)
        value += level * rng.uniform(0.05, 0.2) * ((t / period + rng.random()) % 1.0)
    if rng.random() < 0.25:
        traits.append("step")
        value += level * rng.uniform(0.05, 0.2) * (t >= rng.uniform(0.1, 0.9) * total)
    start = 0.0
    drawn = rng.uniform(5, 100) * MIB_H if leaking else 0.0
    rate = drawn if rate is None or not leaking else rate
    if leaking:
        start = float(rng.choice([0.0, rng.uniform(0, 0.5) * total]))
        traits.append(f"leak {rate / MIB_H:.0f} MiB/h from {start / 3600:.0f} h")
    process_start = np.zeros(len(t))
    kept = rate * np.maximum(0.0, t - start)
    if rng.random() < 0.2:
        traits.append("restarts")
        for at in np.sort(rng.uniform(0.2, 0.8, rng.integers(1, 3))) * total:
            process_start[t >= at] = at
        for at in np.unique(process_start[process_start > 0]):
            kept[t >= at] -= kept[np.searchsorted(t, at)]
    value = value + kept
    known = np.ones(len(t), bool)
    if rng.random() < 0.3:
        traits.append("gaps")
        for _ in range(rng.integers(1, 4)):
            at = rng.uniform(0.05, 0.9) * total
            known &= ~((t >= at) & (t < at + rng.uniform(0.01, 0.08) * total))
    known &= rng.random(len(t)) > 0.01
    return Made(t[known], np.maximum(value, 0.0)[known], rate, start, tuple(traits), process_start[known])

"""How good verdicts of counters are: our engine and other rules on the same generated series, as a Markdown table.

Usage: python tools/eval_series.py [--seed N] [--series N] [--looks N]
``--series``: series judged whole (half leak); ``--looks``: series for hourly looks, clean ones and ones that leak
48.6 MiB/h, each. Seeds are drawn anew each time unless one is given, and printed.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from leakscope.detect.looks import Interim, Looks, judge_interim
from leakscope.detect.series.judge import judge
from tests.rivals import RIVALS, Rule
from tests.series import HOURS, MIB_H, Made, make

RATES = ((5, 20), (20, 50), (50, 100))
KNOWN_RATE = 48.6 * MIB_H
"""Of a public report: 6.0 to 6.57 GiB in 12 hours."""
OURS = "leakscope"


@dataclass
class Score:
    """Of one rule: calls right and wrong, by rate; alarms at looks."""

    called: int = 0
    right: int = 0
    clean_called: int = 0
    clean: int = 0
    by_rate: dict[tuple[int, int], list[bool]] = field(default_factory=lambda: {rates: [] for rates in RATES})
    clean_alarms: list[bool] = field(default_factory=list)
    delays_h: list[float] = field(default_factory=list)

    def count(self, made: Made, said: bool) -> None:
        """One series judged whole."""
        self.called += said
        self.right += said and made.rate > 0
        self.clean += made.rate == 0
        self.clean_called += said and made.rate == 0
        for low, high in RATES:
            if made.rate and low <= made.rate / MIB_H < high:
                self.by_rate[low, high].append(said)

    def row(self, name: str) -> str:
        """Of the Markdown table; a delay beyond the end is '–'."""
        recalls = [f"{np.mean(found):.2f}" if found else "" for found in self.by_rate.values()]
        delay = float(np.median(self.delays_h)) if self.delays_h else float("inf")
        cells = [
            name,
            f"{self.right / self.called:.3f}" if self.called else "–",
            *recalls,
            f"{self.clean_called / max(self.clean, 1):.1%}",
            f"{np.mean(self.clean_alarms):.1%}" if self.clean_alarms else "",
            f"{delay:.1f} h" if np.isfinite(delay) else "–",
        ]
        return f"| {' | '.join(cells)} |"


def ours(made: Made) -> bool:
    return judge(made.counters()).verdict.verdict == "leak"


def first_alarm_h(made: Made) -> tuple[float | None, dict[str, float | None]]:
    """Hour of our first alarm after the leak began, and of each rival's; None for none."""
    looks, before = Looks(), None
    found: float | None = None
    rivals: dict[str, float | None] = dict.fromkeys(RIVALS)
    for hour in range(1, HOURS + 1):
        part = made.until(hour * 3600.0)
        if len(part.t_s) < 20:
            continue
        if found is None:
            before = judge_interim(part.counters(), looks, hour * 3600.0, before)
            found = _alarm(before, hour, made)
        for name, rule in RIVALS.items():
            if rivals[name] is None and hour >= made.start_s / 3600 and rule(part.t_s, part.value):
                rivals[name] = hour
    return found, rivals


def _alarm(look: Interim, hour: int, made: Made) -> float | None:
    return float(hour) if look.alarm and hour >= made.start_s / 3600 else None


def evaluate(seed: int, series: int, looks: int, say: Callable[[str], None] = print) -> dict[str, Score]:
    """Judge ``series`` series whole and ``looks`` clean and leaking ones hour by hour; the table goes to ``say``."""
    rules: dict[str, Callable[[Made], bool]] = {OURS: ours, **{name: _whole(rule) for name, rule in RIVALS.items()}}
    scores = {name: Score() for name in rules}
    spent = 0.0
    for number in range(seed, seed + series):
        made = make(number)
        for name, rule in rules.items():
            began = time.process_time()
            scores[name].count(made, rule(made))
            spent += time.process_time() - began if name == OURS else 0.0
    for number in range(seed + series, seed + series + looks):
        own, rivals = first_alarm_h(make(number, leaking=False))
        for name, hour in {OURS: own, **rivals}.items():
            scores[name].clean_alarms.append(hour is not None)
        leak = make(number, leaking=True, rate=KNOWN_RATE)
        own, rivals = first_alarm_h(leak)
        for name, hour in {OURS: own, **rivals}.items():
            scores[name].delays_h.append(float("inf") if hour is None else hour - leak.start_s / 3600)
    names = [f"recall {low}–{high} MiB/h" for low, high in RATES]
    heads = ["rule", "precision", *names, "clean called", "clean alarms, hourly", "48.6 MiB/h after"]
    say(f"seeds {seed}–{seed + series + looks - 1}; {spent / max(series, 1) * 1000:.1f} ms a series")
    say(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name, score in scores.items():
        say(score.row(name))
    return scores


def _whole(rule: Rule) -> Callable[[Made], bool]:
    return lambda made: rule(made.t_s, made.value)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9))
    parser.add_argument("--series", type=int, default=400)
    parser.add_argument("--looks", type=int, default=100)
    options = parser.parse_args()
    evaluate(options.seed, options.series, options.looks)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

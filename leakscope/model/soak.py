"""What a soak tells while it runs and at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leakscope.model.forecast import Forecast
from leakscope.model.live import LiveReading
from leakscope.model.results import Verdict


@dataclass(frozen=True)
class Look:
    """One interim verdict: of the readings up to ``elapsed_s``, at the ``alpha`` that this look may spend.

    ``alarm``: a leak beyond chance and regular movement; ``candidate_since_s``: since which look it stands.
    """

    elapsed_s: float
    alpha: float
    verdict: Verdict
    alarm: bool
    candidate_since_s: float | None
    score: float
    needed: float
    forecast: Forecast | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "elapsed_s": round(self.elapsed_s, 1),
            "alpha": round(self.alpha, 6),
            "alarm": self.alarm,
            "candidate_since_s": None if self.candidate_since_s is None else round(self.candidate_since_s, 1),
            "score": round(self.score, 3),
            "needed": None if self.needed == float("inf") else round(self.needed, 3),
            "verdict": self.verdict.verdict,
            "class": self.verdict.kind,
            "growth": self.verdict.growth.to_json() if self.verdict.growth else None,
            "forecast": self.forecast.to_json() if self.forecast else None,
        }


@dataclass(frozen=True)
class Happening:
    """Something that the report and the screen tell with its time: a restart, a gap, a new recorder."""

    elapsed_s: float
    what: str  # target, gap, recorder, alarm, withdrawn, culprit, note
    text: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"elapsed_s": round(self.elapsed_s, 1), "what": self.what, "text": self.text}


@dataclass(frozen=True)
class CounterState:
    """One line of the screen: the latest value, the change over the last hour, and the course so far in few points."""

    name: str
    value: float
    in_bytes: bool
    last_hour: float | None
    course: tuple[float, ...]


@dataclass(frozen=True)
class SoakState:
    """What the screen shows."""

    target: str
    output: str
    elapsed_s: float
    duration_s: float
    counters: tuple[CounterState, ...] = ()
    processes: int = 0
    generations: int = 1
    looks: int = 0
    look: Look | None = None
    next_look_s: float | None = None
    forecast: Forecast | None = None
    happenings: tuple[Happening, ...] = ()
    lost: int = 0
    scale: float | None = None  # of a replay
    live: LiveReading | None = None  # of the recording under way
    paused: bool = False
    keys: bool = False  # whether q and p are read


@dataclass
class SoakSummary:
    """How a soak went, beside the report of its evidence."""

    target: str
    elapsed_s: float
    ended_by: str  # duration, quit, signal, target, end (of a replay)
    sources: int
    generations: int
    looks: list[Look] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    forecast: Forecast | None = None
    total_alpha: float = 0.0
    look_every_s: float = 0.0

    @property
    def first_alarm(self) -> Look | None:
        """The first look that alarmed."""
        return next((look for look in self.looks if look.alarm), None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types: the key ``soak`` of the report."""
        first = self.first_alarm
        return {
            "target": self.target,
            "elapsed_s": round(self.elapsed_s, 1),
            "ended_by": self.ended_by,
            "sources": self.sources,
            "generations": self.generations,
            "total_alpha": self.total_alpha,
            "look_every_s": self.look_every_s,
            "first_alarm_s": None if first is None else round(first.elapsed_s, 1),
            "looks": [look.to_json() for look in self.looks],
            "happenings": [one.to_json() for one in self.happenings],
            "forecast": self.forecast.to_json() if self.forecast else None,
        }

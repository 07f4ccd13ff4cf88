"""Result types of the gate: what ``leakscope check`` decided, in the shape that every rendering of it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RULES = ("leak", "regression", "budget", "evidence")
"""What a check is about: a leak that the evidence shows by itself, a site against the baseline, a budget, whether the
evidence can tell at all."""
OUTCOMES = ("fail", "inconclusive", "suppressed", "known", "pass")
"""``known``: a leak that the baseline has as well, or that a budget of its own allows."""
RESULTS = ("fail", "inconclusive", "pass")


@dataclass(frozen=True)
class Measured:
    """One figure of a check: with its 95 % interval where it has one, and with what is allowed where that is said."""

    name: str  # growth, or the limit of a budget
    value: float
    low: float
    high: float
    allowed: float | None
    unit: str
    outcome: str

    @property
    def exact(self) -> bool:
        """Whether the figure has no interval."""
        return self.low == self.high

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "measured": _rounded(self.value),
            "low": _rounded(self.low),
            "high": _rounded(self.high),
            "allowed": _rounded(self.allowed),
            "unit": self.unit,
            "outcome": self.outcome,
        }


@dataclass(frozen=True)
class Check:
    """One thing that was checked. ``key`` names it in every run of the same program."""

    rule: str
    outcome: str
    name: str
    message: str
    key: str
    kind: str = ""  # class of the verdict
    layer: str = ""
    frame: str = ""  # the culprit
    stack: tuple[str, ...] = ()  # outermost first
    counter: str = ""
    measured: float | None = None
    limit: float | None = None
    unit: str = ""  # of both: bytes, objects, bytes/s, bytes per NAME
    sites: tuple[str, ...] = ()
    reason: str = ""  # of a suppression
    chain: str = ""  # the culprit's chain, on one line
    measures: tuple[Measured, ...] = ()  # all of its figures; ``measured`` is the one that decides

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "rule": self.rule,
            "outcome": self.outcome,
            "name": self.name,
            "message": self.message,
            "key": self.key,
            "class": self.kind or None,
            "layer": self.layer or None,
            "frame": self.frame or None,
            "stack": list(self.stack),
            "counter": self.counter or None,
            "measured": _rounded(self.measured),
            "limit": _rounded(self.limit),
            "unit": self.unit or None,
            "measures": [one.to_json() for one in self.measures],
            "sites": list(self.sites),
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class SiteChange:
    """One site in head and baseline. ``expected_*``: the baseline's figures for the work that head did;
    ``allowed_objects``: how many may be kept before it is more than chance."""

    what: str  # new, grown, improved, vanished
    layer: str
    kind: str
    frames: tuple[str, ...]
    kept_objects: int
    kept_bytes: int
    expected_objects: float
    expected_bytes: float
    key: str
    allowed_objects: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "change": self.what,
            "layer": self.layer,
            "kind": self.kind,
            "frames": list(self.frames),
            "kept_objects": self.kept_objects,
            "kept_bytes": self.kept_bytes,
            "expected_objects": _rounded(self.expected_objects),
            "expected_bytes": _rounded(self.expected_bytes),
            "allowed_objects": _rounded(self.allowed_objects),
            "key": self.key,
        }


@dataclass(frozen=True)
class Difference:
    """Head against baseline. ``changes``: sites that differ beyond chance, those that gained most bytes first."""

    baseline: str
    unit: str  # of the work
    base_work: float
    head_work: float
    ratio: float
    changes: tuple[SiteChange, ...]
    unchanged: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        work = {"unit": self.unit, "base": _rounded(self.base_work), "head": _rounded(self.head_work)}
        return {
            "baseline": self.baseline,
            "work": work | {"ratio": round(self.ratio, 6)},
            "changes": [change.to_json() for change in self.changes],
            "unchanged": self.unchanged,
        }


@dataclass(frozen=True)
class Suppressed:
    """One suppression and what it hides: sites that keep something, and findings without sites."""

    pattern: str
    reason: str
    where: str  # file:line
    sites: int = 0
    findings: int = 0
    bytes: int = 0
    objects: int = 0

    @property
    def used(self) -> bool:
        """Whether it matched anything."""
        return bool(self.sites or self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "pattern": self.pattern,
            "reason": self.reason,
            "where": self.where,
            "used": self.used,
            "sites": self.sites,
            "findings": self.findings,
            "bytes": self.bytes,
            "objects": self.objects,
        }


@dataclass(frozen=True)
class Gate:
    """The decision. ``exit_code`` is 0, 1 or 3; ``result`` one of :data:`RESULTS`."""

    result: str
    exit_code: int
    checks: tuple[Check, ...]
    difference: Difference | None = None
    suppressions: tuple[Suppressed, ...] = ()
    allow_inconclusive: bool = False
    notes: tuple[str, ...] = ()

    def of(self, *outcomes: str) -> list[Check]:
        """The checks with one of these outcomes, in their order."""
        return [check for check in self.checks if check.outcome in outcomes]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types: the key ``gate`` of ``check --json``."""
        return {
            "result": self.result,
            "exit_code": self.exit_code,
            "allow_inconclusive": self.allow_inconclusive,
            "counts": {outcome: len(self.of(outcome)) for outcome in OUTCOMES},
            "checks": [check.to_json() for check in self.checks],
            "difference": self.difference.to_json() if self.difference else None,
            "suppressions": [one.to_json() for one in self.suppressions],
            "notes": list(self.notes),
        }


def _rounded(value: float | None) -> float | int | None:
    if value is None:
        return None
    rounded = round(value, 3)
    return int(rounded) if rounded == int(rounded) else rounded

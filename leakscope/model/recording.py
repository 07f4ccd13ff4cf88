"""What a recording tells while it runs and at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Loss:
    """One row of `losses`."""

    probe: str
    what: str
    count: int
    detail: str = ""


@dataclass
class Progress:
    """What the status line shows."""

    elapsed_s: float
    events: int
    events_per_s: float
    live_bytes: dict[str, int]
    dropped: int
    ring_fill: float


@dataclass
class Summary:
    """What a recording ended with. `ended_by`: target, duration, signal, or error."""

    output: Path
    ended_by: str
    seconds: float
    rows: dict[str, int]
    live_bytes: dict[str, int]
    losses: list[Loss]
    exit_status: int | None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

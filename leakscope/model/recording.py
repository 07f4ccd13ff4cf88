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
class Summary:
    """What a recording ended with. `ended_by`: target, duration, quit, signal, or error."""

    output: Path
    ended_by: str
    seconds: float
    rows: dict[str, int]
    live_bytes: dict[str, int]
    losses: list[Loss]
    exit_status: int | None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

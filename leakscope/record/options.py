"""What a recording is asked to do, and what it tells while it runs and at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from leakscope.record.losses import Loss


@dataclass
class RecordOptions:
    """Options of `leakscope record`; times in seconds, sizes in bytes."""

    output: Path
    pids: list[int] = field(default_factory=list)
    cgroup: Path | None = None
    command: list[str] = field(default_factory=list)
    duration_s: float | None = None
    force: bool = False
    stacks: str = "sampled"
    launches: bool = False
    malloc: bool = False
    libraries: list[Path] = field(default_factory=list)
    interval_s: float = 1.0
    flush_s: float = 1.0
    ring_bytes: int = 64 << 20
    live_entries: int = 1 << 20
    loader: str = "auto"

    @property
    def everyone(self) -> bool:
        """Whether the whole host is recorded."""
        return not (self.pids or self.cgroup or self.command)


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

"""What a recording is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class RecordOptions:
    """Options of `leakscope record`; times in seconds, sizes in bytes."""

    output: Path
    pids: list[int] = field(default_factory=list)
    cgroup: Path | None = None
    command: list[str] = field(default_factory=list)
    duration_s: float | None = None
    force: bool = False
    mode: str = "stream"
    stacks: str = "sampled"
    min_size: int = 0
    sample_bytes: int = 0
    unwind: str = "gpu"
    launches: bool = False
    launch_args: int = 16  # words of a launch's parameters that are read, with `launches`
    malloc: bool = False
    libraries: list[Path] = field(default_factory=list)
    interval_s: float = 1.0
    flush_s: float = 1.0
    ring_bytes: int = 64 << 20
    live_entries: int = 1 << 20
    loader: str = "auto"
    nvtx: bool = True
    resume: bool = False  # go on with a capture that exists: this recording is one more source of it
    steady: bool = False  # a census is read out each interval, however long the recording
    follow: bool = False  # go on when the targets end: a process like them is a new life of theirs

    @property
    def everyone(self) -> bool:
        """Whether the whole host is recorded."""
        return not (self.pids or self.cgroup or self.command)

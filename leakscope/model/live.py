"""What a recording tells while it runs: the figures of a live view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from leakscope.model.forecast import Forecast
from leakscope.model.recording import Loss


class LiveFrame(NamedTuple):
    """A frame as the recorder knows it so far: lines of native frames are looked up when the recording ends."""

    function: str
    file: str
    line: int
    module: str
    offset: int
    kind: str  # python, native, kernel


Stack = tuple[LiveFrame, ...]
"""Outermost first."""


@dataclass(frozen=True)
class GrowingSite:
    """A site that keeps more than before.

    ``kept_bytes``: live now of what was allocated since the recording began; ``growth_bytes``: the part of it that came
    in the last ``window_s``. ``sampled``: estimated from stacks or objects that were sampled. ``frame`` is the frame to
    blame ('' where it is not known yet), ``range`` the NVTX range of its latest allocation.
    """

    key: int
    layer: str
    kind: str
    api: str
    slab_cache: str
    user: Stack
    python: Stack
    kernel: Stack
    kept_bytes: int
    growth_bytes: int
    window_s: float
    sampled: bool = False
    range: str = ""
    frame: str = ""

    @property
    def bytes_per_s(self) -> float:
        """Growth over the window."""
        return self.growth_bytes / self.window_s if self.window_s > 0 else 0.0


@dataclass(frozen=True)
class LiveReading:
    """What a recording says of itself at one moment. ``live_bytes``: by layer, allocated since it began, live now."""

    elapsed_s: float
    events: int
    live_bytes: dict[str, int]
    sites: tuple[GrowingSite, ...]
    losses: tuple[Loss, ...]
    ring_fill: float
    disk_bytes: int


@dataclass(frozen=True)
class Track:
    """One counter over time: its latest value, the change over the last ``window_s`` (None: not known), the course so
    far in few points."""

    name: str
    value: float
    change: float | None
    window_s: float
    course: tuple[float, ...]
    in_bytes: bool = True


@dataclass(frozen=True)
class LiveState:
    """What the live view of a recording shows."""

    target: str
    output: str
    reading: LiveReading
    events_per_s: float
    tracks: tuple[Track, ...] = ()
    duration_s: float | None = None
    forecast: Forecast | None = None
    paused: bool = False
    keys: bool = False  # whether q and p are read

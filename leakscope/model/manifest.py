"""The manifest of a capture: what was recorded, how, and how far it can be trusted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from leakscope.model.tables import SCHEMA_VERSION


@dataclass
class ClockAnchor:
    """One reading of three clocks back to back, all in nanoseconds."""

    realtime_ns: int
    monotonic_ns: int
    boottime_ns: int


@dataclass
class Source:
    """One recording or imported file inside a capture.

    ``clock`` is ``monotonic``, ``utc``, ``relative`` or ``none``. ``start_ns``/``end_ns`` bound the evidence on
    that clock. ``facts`` holds host, GPU and importer facts; ``limits`` says in words what the source cannot say.
    """

    id: int
    kind: str  # recording, memleak_text, nsys, ncu_rep, …
    name: str
    clock: str
    host: str = ""
    boot_id: str = ""
    time_zone: str = ""
    start_ns: int = 0
    end_ns: int = 0
    anchors: list[ClockAnchor] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    exit_status: int | None = None  # of the recorded command; negative = killed by that signal
    scope: dict[str, Any] = field(default_factory=dict)
    probes: list[str] = field(default_factory=list)
    loader: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)


@dataclass
class Part:
    """One Parquet part: path relative to the capture, rows, and the SHA-256 of its bytes."""

    table: str
    path: str
    rows: int
    sha256: str


@dataclass
class Manifest:
    """The content of ``manifest.json``. ``complete`` is false until the recorder or importer finished."""

    schema_version: int = SCHEMA_VERSION
    tool_version: str = ""
    complete: bool = False
    incomplete_reason: str = ""
    sources: list[Source] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        """Build a manifest from parsed JSON; unknown keys are ignored, missing required ones raise KeyError."""
        sources = [
            Source(**{**_known(Source, s), "anchors": [ClockAnchor(**a) for a in s.get("anchors", [])]})
            for s in data["sources"]
        ]
        parts = [Part(**_known(Part, p)) for p in data.get("parts", [])]
        return cls(**{**_known(cls, data), "sources": sources, "parts": parts})


def _known(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k in cls.__dataclass_fields__}  # type: ignore[attr-defined]

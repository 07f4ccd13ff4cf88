"""What looking up names and lines of native frames gives."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MissingSymbols:
    """A module whose frames still lack names or lines, and why. `build_id` is '' for a file that has none."""

    module: str
    build_id: str
    frames: int
    unnamed: int
    reason: str


@dataclass
class Symbolized:
    """Counts of native frames before and after; `inlined` frames came into being, and are not among `frames`.

    `unnamed` have no function, `without_line` no line (the unnamed ones included). `problems` are lines for people;
    `changed` tells whether the tables have to be written anew.
    """

    frames: int = 0
    unnamed_before: int = 0
    unnamed_after: int = 0
    without_line_before: int = 0
    without_line_after: int = 0
    inlined: int = 0
    missing: list[MissingSymbols] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    changed: bool = False

"""What a benchmark returns: tables for people, figures for programs, and bars."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
"""The checkout: working directory of everything that is run."""


@dataclass(frozen=True)
class Options:
    """How much to run. ``quick`` is the smallest size that still runs every line; its figures mean nothing."""

    rounds: int = 5
    quick: bool = False
    full: bool = False  # 100 million events for attribute as well: 10 minutes and 6 GB of disk
    scale: float = 1.0  # factor on the number of operations of a storm


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of the rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of one or more values."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))

    def text(self, digits: int = 2) -> str:
        """``1.52 (1.49-1.60)``."""
        return f"{self.median:.{digits}f} ({self.lowest:.{digits}f}-{self.highest:.{digits}f})"


@dataclass(frozen=True)
class Bar:
    """A promise and the median that was measured for it."""

    what: str
    measured: float
    limit: float
    at_least: bool = False  # the measured figure must not be below the limit; otherwise not above
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the promise holds in this run."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True)
class Table:
    """Cells are text; the first column names the row."""

    title: str
    headers: list[str]
    rows: list[list[str]]


@dataclass
class Result:
    """One benchmark's outcome. ``figures`` are the numbers behind the tables, as plain JSON types."""

    name: str
    title: str
    tables: list[Table] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "title": self.title,
            "figures": self.figures,
            "bars": [bar.to_json() for bar in self.bars],
            "notes": self.notes,
        }

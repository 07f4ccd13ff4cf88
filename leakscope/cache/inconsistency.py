"""What a consistency check finds, whatever it looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Inconsistency:
    """One finding. ``sides`` are the parties that disagree and what each did, in the order of their names."""

    kind: str
    where: str
    what: str
    sides: dict[str, str] = field(default_factory=dict)
    count: int = 1
    """How many such places there are; ``where`` is the first."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return dict(vars(self))


@dataclass(frozen=True)
class Checked:
    """What one check looked at and found. ``facts``: what was counted, in words → number."""

    check: str
    inputs: tuple[str, ...]
    facts: dict[str, int]
    found: tuple[Inconsistency, ...] = ()
    limits: tuple[str, ...] = ()
    """What the inputs cannot tell."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        found = [one.to_json() for one in self.found]
        return {**vars(self), "inputs": list(self.inputs), "found": found, "limits": list(self.limits)}

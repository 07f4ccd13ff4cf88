"""The console of verbs that print reports."""

from __future__ import annotations

from rich.console import Console


class ReportConsole(Console):
    """Nothing is highlighted but what a reporter marks, and a reader that goes away is an error like any other: rich
    would exit with 1, which means a leak here."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        """Raises the BrokenPipeError that rich caught."""
        raise

"""The console of verbs that print reports."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from rich.console import Console

PIPE_WIDTH = 200
"""Columns where nothing says how many there are: what goes through a pipe is read by grep before it is by people."""


class ReportConsole(Console):
    """Nothing is highlighted but what a reporter marks, and a reader that goes away is an error like any other: rich
    would exit with 1, which means a leak here."""

    def __init__(self) -> None:
        super().__init__(highlight=False)
        with suppress(AttributeError):  # where text cannot be written as UTF-8 a ? stands for what is missing
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        if not self.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
            self.width = PIPE_WIDTH

    def on_broken_pipe(self) -> None:
        """Raises the BrokenPipeError that rich caught."""
        raise

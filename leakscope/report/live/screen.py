"""A part of a terminal that is drawn again and again, below what was written so far."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live

Drawing = Callable[[int, int, bool], RenderableType]
"""(columns, lines, whether only ASCII can be shown) → what to show."""


class Screen:
    """Draws on ``stream``; :meth:`close` leaves no trace. Lines written through ``console`` go above it."""

    def __init__(self, stream: TextIO) -> None:
        self.console = Console(file=stream, highlight=False)
        self._live: Live | None = None
        self._size = (0, 0)

    def show(self, draw: Drawing) -> None:
        """Draw anew. After a change of the terminal's size all that is visible is cleared: lines may have wrapped."""
        size = self._dimensions()
        if self._live is not None and size != self._size:
            self.close()
            self.console.clear()
        self._size = self.console.size = size
        if self._live is None:
            self._live = Live(
                console=self.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False,
                vertical_overflow="crop",
            )  # fmt: skip
            self._live.start()
        columns, lines = size
        # The last line is the cursor's.
        self._live.update(draw(columns, max(1, lines - 1), self.console.options.ascii_only), refresh=True)

    def close(self) -> None:
        """Take it away again and show the cursor."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def forget(self) -> None:
        """Leave it as it stands: the terminal is somebody else's. What is shown next begins anew."""
        if self._live is not None:
            self._live, self.console = None, Console(file=self.console.file, highlight=False)

    def _dimensions(self) -> tuple[int, int]:
        try:
            columns, lines = os.get_terminal_size(self.console.file.fileno())
        except (OSError, ValueError):
            columns, lines = 0, 0
        if columns and lines:
            return columns, lines
        default = Console(file=self.console.file).size  # what COLUMNS and LINES say, else 80 x 25
        return columns or default.width, lines or default.height

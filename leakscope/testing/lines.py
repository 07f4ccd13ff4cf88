"""Which Python lines keep memory in each iteration: asked of tracemalloc once a counter has shown that something does.

Small objects of Python live in arenas that it maps a mebibyte at a time, so no probe sees them one by one. Tracing
costs two to four times the time, so the verdict is made without it, and these iterations only name the lines.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any

ITERATIONS = 3
WARM_UP = 1
FRAMES = 12
MAX_LINES = 5
_OWN = (tracemalloc.__file__, __file__)


@dataclass(frozen=True)
class Line:
    """What is kept of the allocations of one stack, by iteration. ``stack``: ``file:line``, outermost first."""

    stack: tuple[str, ...]
    bytes_each: float
    blocks_each: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "stack": list(self.stack),
            "bytes_per_iteration": self.bytes_each,
            "blocks_per_iteration": self.blocks_each,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Line:
        """Back from :meth:`to_json`."""
        return cls(tuple(value["stack"]), value["bytes_per_iteration"], value["blocks_per_iteration"])


class Tracing:
    """Traces from :meth:`begin` on. Where the test traces by itself, that is left alone and nothing is said."""

    def __init__(self) -> None:
        self._ours = not tracemalloc.is_tracing()
        self._before: tracemalloc.Snapshot | None = None
        if self._ours:
            tracemalloc.start(FRAMES)

    def begin(self) -> None:
        """The iterations that count begin."""
        if self._ours:
            self._before = _snapshot()

    def end(self, iterations: int) -> list[Line]:
        """The lines that keep at least one block for each of the iterations, most bytes first."""
        if not self._ours or self._before is None:
            return []
        changes = _snapshot().compare_to(self._before, "traceback")
        self.close()
        lines = [
            Line(
                tuple(f"{frame.filename}:{frame.lineno}" for frame in change.traceback),
                change.size_diff / iterations,
                change.count_diff / iterations,
            )
            for change in changes
            if change.count_diff >= iterations and change.size_diff > 0
        ]
        return sorted(lines, key=lambda line: (-line.bytes_each, line.stack))[:MAX_LINES]

    def close(self) -> None:
        """End the tracing; safe to call twice."""
        if self._ours and tracemalloc.is_tracing():
            tracemalloc.stop()


def _snapshot() -> tracemalloc.Snapshot:
    return tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, own, all_frames=True) for own in _OWN])

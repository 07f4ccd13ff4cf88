"""Stacks and frames of a report with ids of their own: equal ones are stored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa


MAX_FRAMES = 1024
"""Deeper stacks come from recursion or from damaged files."""


class Frame(NamedTuple):
    """A frame as the table ``frames`` holds it; ``offset`` is the absolute program counter where nothing better is
    known, ``kind`` is python, native or kernel."""

    function: str
    file: str = ""
    line: int = 0
    module: str = ""
    build_id: str = ""
    offset: int = 0
    kind: str = "native"


class StackInterner:
    """Gives stacks and frames ids from 1 in the order of their first use; 0 means no stack."""

    def __init__(self) -> None:
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self.cut = 0  # stacks deeper than MAX_FRAMES

    def add(self, frames: Sequence[Frame]) -> int:
        """The id of the stack of ``frames``, outermost first; 0 for none."""
        return self.add_ids([self.frame_id(frame) for frame in frames])

    def frame_id(self, frame: Frame) -> int:
        """The id of a frame, for stacks that are made of many equal ones."""
        return self._frames.setdefault(frame, len(self._frames) + 1)

    def add_ids(self, frames: Sequence[int]) -> int:
        """The id of the stack of frames given by their ids, outermost first; 0 for none.

        Of a deeper stack than MAX_FRAMES, the innermost ones are kept: those that name who allocates.
        """
        if not frames:
            return 0
        if len(frames) > MAX_FRAMES:
            self.cut += 1
            frames = frames[-MAX_FRAMES:]
        return self._stacks.setdefault(tuple(frames), len(self._stacks) + 1)

    def tables(self) -> dict[str, pa.Table]:
        """The tables ``stacks`` and ``frames``; neither where no stack was added."""
        if not self._stacks:
            return {}
        import pyarrow as pa

        from leakscope.model.tables import FRAMES, STACKS

        columns = zip(*self._frames, strict=True)
        frames = dict(zip(Frame._fields, map(list, columns), strict=True))
        return {
            "stacks": pa.table({"id": list(self._stacks.values()), "frames": list(map(list, self._stacks))}, STACKS),
            "frames": pa.table({"id": list(self._frames.values()), **frames}, FRAMES),
        }

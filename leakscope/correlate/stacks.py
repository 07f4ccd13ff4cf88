"""Stacks of a capture as frames with names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import duckdb


class Frame(NamedTuple):
    """One frame; texts are '' and numbers 0 where unknown. ``kind`` is python, native, inlined or
    kernel."""

    function: str
    file: str = ""
    line: int = 0
    module: str = ""
    offset: int = 0
    kind: str = "native"

    @property
    def inlined(self) -> bool:
        """Whether this function has no code of its own here: the compiler put it into the frame before."""
        return self.kind == "inlined"

    @property
    def text(self) -> str:
        """``function (file:line)``, ``function``, ``module+0xoffset`` or ``[unknown]``."""
        if self.function:
            if not self.file:
                return self.function
            return f"{self.function} ({self.file}:{self.line})" if self.line else f"{self.function} ({self.file})"
        name = self.module.rsplit("/", 1)[-1]
        return f"{name}+{self.offset:#x}" if name else (f"{self.offset:#x}" if self.offset else "[unknown]")


class Stacks:
    """The stacks with the given ids; unknown ids and 0 are empty stacks."""

    def __init__(self, con: duckdb.DuckDBPyConnection, ids: Iterable[int]) -> None:
        """Read the stacks ``ids`` and their frames from the views ``stacks`` and ``frames``."""
        import pandas as pd

        con.register("wanted", pd.DataFrame({"id": sorted({int(i) for i in ids} - {0})}, dtype="int32"))
        rows = con.execute("SELECT id, frames FROM stacks JOIN wanted USING (id)").fetchall()
        self._frames_of: dict[int, list[int]] = {stack: list(frames or []) for stack, frames in rows}
        needed = sorted({frame for frames in self._frames_of.values() for frame in frames})
        con.register("wanted", pd.DataFrame({"id": needed}, dtype="int32"))
        self._frames = {
            row[0]: Frame(row[1] or "", row[2] or "", row[3] or 0, row[4] or "", row[5] or 0, row[6] or "native")
            for row in con.execute(
                'SELECT id, function, file, line, module, "offset", kind FROM frames JOIN wanted USING (id)'
            ).fetchall()
        }
        con.unregister("wanted")

    def __getitem__(self, stack: int) -> list[Frame]:
        """The frames of ``stack``, outermost first."""
        unknown = Frame("")
        return [self._frames.get(frame, unknown) for frame in self._frames_of.get(int(stack), [])]

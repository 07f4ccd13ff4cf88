"""Where a handle was made: the caller's Python stack, cheap to take and formatted only when somebody reads it."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import NamedTuple

PACKAGE = __file__.rpartition("/")[0] + "/"
"""Frames of files below are the kit's own and are left out."""
MAX_NAMES = 20_000

_names: dict[tuple[int, int], tuple[CodeType, str]] = {}


class Stack(NamedTuple):
    """(code object, line) of each frame, outermost first."""

    frames: tuple[tuple[CodeType, int], ...]

    def text(self, innermost: int = 0) -> str:
        """``function (file:line)`` joined by ``;``, outermost first: the form of leakscope's event files. Of the
        ``innermost`` frames alone where that is not 0."""
        return ";".join(_name(code, line) for code, line in self.frames[-innermost:])


def calling_stack(depth: int) -> Stack:
    """The innermost ``depth`` frames of the calling thread that are not the kit's own."""
    frames: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < depth:
        code = frame.f_code
        if frames or not code.co_filename.startswith(PACKAGE):
            frames.append((code, frame.f_lineno or 0))
        frame = frame.f_back
    return Stack(tuple(reversed(frames)))


def _name(code: CodeType, line: int) -> str:
    known = _names.get((id(code), line))
    if known is not None:
        return known[1]
    file = code.co_filename.replace(";", ",").replace("(", "[").replace(")", "]")
    name = f"{code.co_qualname.replace(';', ',')} ({file}:{line})"
    if len(_names) >= MAX_NAMES:
        _names.clear()
    _names[id(code), line] = (code, name)  # the code object is kept so that its id is not used again
    return name

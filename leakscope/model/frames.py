"""Frames as text: ``function (file:line)``, ``function (file)``, ``function`` or ``module+0xoffset``."""

from __future__ import annotations

import re

_FRAME = re.compile(r"(?P<function>.+?)(?: \((?P<file>[^()]+?)(?::(?P<line>\d{1,9}))?\))?")


def parsed_frame(text: str) -> tuple[str, str, int]:
    """(function, file, line) of a frame's text; '' and 0 where it has none."""
    match = _FRAME.fullmatch(text)
    if match is None:
        return text, "", 0
    return match["function"], match["file"] or "", int(match["line"] or 0)

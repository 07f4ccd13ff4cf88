"""The files that a process has mapped, as /proc/PID/maps lists them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ (\S+) ([0-9a-f]+) \S+ \S+ +(/.*)$", re.MULTILINE)


class MappedFile(NamedTuple):
    """One mapping of a file; `path` as the process sees it, addresses and offsets in bytes."""

    path: str
    start: int
    file_offset: int
    executable: bool


def mapped_files(pid: int) -> list[MappedFile]:
    """All mappings of files of a process, in the order of their addresses; none where it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    except OSError:
        return []
    return [
        MappedFile(path, int(start, 16), int(offset, 16), "x" in permissions)
        for start, permissions, offset, path in _LINE.findall(text)
    ]

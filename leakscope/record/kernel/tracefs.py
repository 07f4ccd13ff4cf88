"""Tracepoints as tracefs describes them."""

from __future__ import annotations

import re
from pathlib import Path

from leakscope.errors import NotCapableError

_FIELD = re.compile(r"field:.*?(\w+)(?:\[\w*\])?;\s*offset:(\d+);\s*size:(\d+);")


def tracefs() -> Path:
    """The mounted tracefs; raises NotCapableError with the command that mounts it."""
    for place in (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing")):
        if (place / "events").is_dir():
            return place
    raise NotCapableError(
        "tracefs is not mounted, so tracepoints cannot be found; run: mount -t tracefs tracefs /sys/kernel/tracing"
    )


def tracepoint_id(category: str, name: str) -> int | None:
    """The id of a tracepoint for perf_event_open, or None where this kernel lacks it."""
    path = tracefs() / "events" / category / name / "id"
    return int(path.read_text()) if path.exists() else None


def field_offsets(category: str, name: str) -> dict[str, int]:
    """Offset in bytes of each field of a tracepoint's record; empty where this kernel lacks it."""
    path = tracefs() / "events" / category / name / "format"
    if not path.exists():
        return {}
    return {field: int(offset) for field, offset, _ in _FIELD.findall(path.read_text())}

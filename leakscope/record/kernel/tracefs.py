"""Tracepoints as tracefs describes them."""

from __future__ import annotations

from pathlib import Path

from leakscope.errors import NotCapableError


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

"""What can be done here of a policy of stack dumps."""

from __future__ import annotations

from collections.abc import Callable

from leakscope.record.unwind.libdw import LibdwUnavailableError, libdw


def unwind_policy(wanted: str, note: Callable[[str], None]) -> str:
    """What can be done here of a policy (none, gpu or all); `note` is told why it is less."""
    if wanted != "none":
        try:
            libdw()
        except LibdwUnavailableError as error:
            note(f"native stacks are those of frame pointers alone: {error} (install libdw1)")
            return "none"
    return wanted

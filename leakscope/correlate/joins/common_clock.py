"""One clock for several sources, by what they say of themselves: for drawing them side by side, not for joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leakscope.correlate.joins.clocks import align
from leakscope.model.manifest import Source


@dataclass(frozen=True)
class Placed:
    """``offset_ns`` is added to times of the source; None where it cannot be placed. ``note``: how, or why not."""

    offset_ns: int | None
    note: str = ""


def common_clock(sources: Sequence[Source]) -> list[Placed]:
    """Where each source stands on the clock of the first recording, or of the first source that has times.

    Sources in UTC stand beside each other without a recording, too.
    """
    timed = [source for source in sources if source.clock != "none"]
    reference = next((s for s in timed if s.clock == "monotonic"), timed[0] if timed else None)
    return [_placed(source, reference) for source in sources]


def _placed(source: Source, reference: Source | None) -> Placed:
    if reference is None or source.clock == "none":
        return Placed(None, f"{source.name}: its rows have no times")
    if source is reference:
        return Placed(0)
    if source.clock == reference.clock == "utc":
        return Placed(0, f"{source.name}: on UTC, as {reference.name}")
    found = align(reference, source)
    if found.refused:
        return Placed(None, f"{source.name}: {found.refused}")
    error = "its error is not known" if found.error_ns is None else f"within {found.error_ns / 1e6:g} ms"
    return Placed(found.offset_ns, f"{source.name}: {found.how}, {error}")

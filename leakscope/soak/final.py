"""What a capture of recordings says of its own making: sources, gaps, the axis of time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from leakscope.capture import Capture
from leakscope.detect.attribution import Options
from leakscope.detect.combine import combine
from leakscope.detect.recorded import Life, Readings
from leakscope.detect.recorded_lives import recorded_lives, recorded_readings, zeros_ns
from leakscope.detect.together import attribute_together
from leakscope.errors import BadInputError
from leakscope.model.manifest import Source
from leakscope.model.results import Report
from leakscope.model.soak import Happening

MIN_GAP_S = 1.0


def recordings_of(capture: Capture) -> list[Source]:
    """The recordings of a capture, in their order."""
    return [source for source in capture.manifest.sources if source.kind == "recording"]


def readings_and_lives(capture: Capture, memory: str = "1GiB") -> tuple[Readings, list[Life]]:
    """All samples and processes of the recordings of a capture, on one axis. Raises BadInputError for damaged data."""
    import duckdb

    sources = recordings_of(capture)
    try:
        with capture.connect(memory_limit=memory) as con:
            return recorded_readings(con, sources), recorded_lives(con, sources)
    except duckdb.Error as error:
        raise BadInputError(f"{capture.path}: cannot be read: {str(error).splitlines()[0]}") from None


def gaps(capture: Capture) -> list[Happening]:
    """The stretches between recordings of which nothing is known."""
    return [
        Happening(
            ended,
            "gap",
            f"nothing was recorded for {began - ended:,.0f} s{'; the recorder before it was killed' if killed else ''}",
        )
        for ended, began, killed in gap_spans(capture)
    ]


def gap_spans(capture: Capture) -> list[tuple[float, float, bool]]:
    """(from, to, the recorder before it was killed) of the stretches between recordings, in seconds since the first
    began."""
    sources = recordings_of(capture)
    zeros = zeros_ns(sources)
    with capture.connect(memory_limit="1GiB") as con:
        last = dict(con.execute("SELECT source_id, max(ts_ns) FROM samples GROUP BY source_id").fetchall())
    found = []
    for before, after in pairwise(sources):
        ended_ns = before.end_ns or max(last.get(before.id, 0), before.start_ns)
        ended, began = (ended_ns - zeros[before.id]) / 1e9, (after.start_ns - zeros[after.id]) / 1e9
        if began - ended >= MIN_GAP_S:
            found.append((ended, began, not before.end_ns))
    return found


def final_report(
    path: Path,
    limit_bytes: float | None,
    inputs: list[dict[str, Any]] | None = None,
    memory: str = "2GiB",
    timelines: bool = False,
) -> Report:
    """The report of a capture, as `leakscope attribute --limit` gives it. ``inputs``: what the capture was made of,
    where that is not itself; ``timelines``: also what memory did over time. Raises BadInputError."""
    import duckdb

    capture = Capture.open(path)
    options = Options(limit_bytes=limit_bytes, timelines=timelines)
    try:
        with capture.connect(memory_limit=memory) as con:
            (report,) = attribute_together([(con, capture.manifest)], options)
    except duckdb.Error as error:
        raise BadInputError(f"{path}: cannot be attributed: {str(error).splitlines()[0]}") from None
    report.inputs = inputs or [
        {
            "path": str(path),
            "kind": "capture",
            "complete": capture.manifest.complete,
            "mem_events": capture.rows("mem_events"),
            "command": next((s.command for s in capture.manifest.sources if s.command), []),
            "problems": capture.problems,
        }
    ]
    return combine([report])

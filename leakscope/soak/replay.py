"""Running a soak on readings that were recorded or generated before: days in seconds, by the same code."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leakscope.capture import Capture
from leakscope.capture.reader import scratch_directory
from leakscope.detect.counters import COUNTER_KINDS, counters_of
from leakscope.detect.recorded import Life, Readings
from leakscope.errors import BadInputError
from leakscope.ingest import Options as ImportOptions
from leakscope.ingest import import_files, kind_of
from leakscope.model.soak import SoakState, SoakSummary
from leakscope.soak.final import gaps, readings_and_lives, recordings_of
from leakscope.soak.watch import Watch

REFRESH_S = 0.2


def open_evidence(path: Path, output: Path | None = None) -> tuple[Capture, list[dict[str, Any]] | None]:
    """(the capture to replay, inputs of its report). It is `path` itself, or made of a table of counters: in `output`,
    or (None) for this once; the inputs are that file then. Raises BadInputError, OutputIncompleteError."""
    if not path.exists():
        raise BadInputError(f"--replay {path}: no such file or capture")
    if kind_of(path) is None:
        return Capture.open(path), None
    target = output or Path(scratch_directory()) / f"replayed-{secrets.token_hex(4)}.lscope"
    imported = import_files([path], target, ImportOptions())
    return Capture.open(target), [file.to_json() | {"mem_events": 0} for file in imported]


def evidence_of(capture: Capture) -> tuple[Readings, list[Life]]:
    """Readings and processes of a capture: of its recordings, else of its first table of counters."""
    if recordings_of(capture):
        readings, lives = readings_and_lives(capture)
        if readings.series:
            return readings, lives
    for source in capture.manifest.sources:
        if source.kind in COUNTER_KINDS and source.clock != "none":
            with capture.connect(memory_limit="1GiB") as con:
                counters = counters_of(con, source)
            declared = frozenset(counter.name for counter in counters if counter.in_bytes)
            series = {("service", "", counter.name): (counter.t_s, counter.value) for counter in counters}
            return Readings(series, declared), []
    raise BadInputError(f"{capture.path}: no counters over time in it to replay")


class Replay:
    """Replays a capture through a watch."""

    def __init__(self, capture: Capture, watch: Watch, on_state: Callable[[SoakState], None]) -> None:
        """:param on_state: called with how things stand, as a live soak would."""
        self._watch = watch
        self._on_state = on_state
        self._quit = False
        self._capture = capture
        readings, lives = evidence_of(capture)
        watch.load(readings, lives)
        self.end_s = max((float(t[-1]) for t, _ in readings.series.values()), default=0.0)
        if recordings_of(capture):
            for gap in gaps(capture):
                watch.tell(gap.elapsed_s, gap.what, gap.text)

    def stop(self) -> None:
        """End it here."""
        self._quit = True

    def run(self) -> SoakSummary:
        """Until the last reading, at the plan's scale; as fast as it goes where that is None or 0. Ctrl-C ends it."""
        scale, began, now, ended_by = self._watch.plan.scale, time.monotonic(), 0.0, "end"
        try:
            while now < self.end_s and not self._quit:
                now = min(
                    self.end_s, (time.monotonic() - began) * scale if scale else now + self._watch.plan.look_every_s
                )
                self._watch.advance(now)
                self._on_state(self._watch.state(now))
                if scale and now < self.end_s:
                    time.sleep(REFRESH_S)
            ended_by = "quit" if self._quit else ended_by
        except KeyboardInterrupt:
            ended_by = "signal"
        return summary_of(self._watch, now, ended_by, max(1, len(recordings_of(self._capture))))


def summary_of(watch: Watch, elapsed_s: float, ended_by: str, sources: int) -> SoakSummary:
    """How it went."""
    history = watch.history()
    return SoakSummary(
        watch.plan.target,
        elapsed_s,
        ended_by,
        sources,
        1 + sum(one.what == "target" for one in history),
        list(watch.looks),
        history,
        watch.forecast(),
        watch.plan.total_alpha,
        watch.plan.look_every_s,
    )

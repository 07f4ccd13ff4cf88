"""Running a test body again and again: warm-up, judged iterations, and the outcome."""

from __future__ import annotations

import gc
import logging
import sys
import time
from array import array
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from leakscope.testing import lines
from leakscope.testing.counters import PYTHON_BLOCKS, Counters
from leakscope.testing.judge import Judge
from leakscope.testing.recorder import NotRecording, Recording
from leakscope.testing.settings import Settings


class LeakTest:
    """One leak test: run the body once for each item of :meth:`iterations`; then :attr:`outcome` has the judgement.

    After each iteration Python's garbage is collected, and log records that the test runner keeps are dropped: what
    only waits for a collection is no leak.
    """

    def __init__(self, chosen: Settings, *, record: bool = True, reason: str = "", keep: Path | None = None) -> None:
        """:param record: whether to try; :param reason: why not; :param keep: where the capture stays."""
        self._chosen = chosen
        self._record = record
        self._reason = reason
        self._keep = keep
        self.outcome: dict[str, Any] = {}
        """The outcome as JSON with its ``text`` (leakscope.testing.judge), once the iterations are over."""
        self.number = 0
        """Iterations begun, those of the warm-up included."""
        self.refused = ""
        """Why no recording could be made although it was tried."""

    def iterations(self) -> Generator[None, None, None]:
        """Yield once for each time that the body is to run. Close the generator when the body fails.

        Raises LeakscopeError when there can be no judgement.
        """
        with ExitStack() as stack:
            judge = Judge(self._record)  # before the recording: what is started later is recorded as well
            stack.callback(judge.close)
            recording = self._start(stack)
            warmup, total = self._chosen.warmup, self._chosen.warmup + self._chosen.repeat
            began, ended = array("q", bytes(8 * total)), array("q", bytes(8 * total))
            counters = Counters(self._chosen.repeat + 1, "gpu" in self._chosen.layers)
            _forget()
            for number in range(total):
                if number == warmup:
                    counters.read()
                self.number = number + 1
                began[number] = time.monotonic_ns()
                yield
                ended[number] = time.monotonic_ns()
                _forget()
                if number >= warmup:
                    counters.read()
            capture = self._finish(recording)
            series = {counter.name: counters.series(counter) for counter in counters.kinds}
            found: list[lines.Line] = []
            if PYTHON_BLOCKS.name in judge.rising(series):
                tracing = lines.Tracing()
                stack.callback(tracing.close)
                for number in range(lines.WARM_UP + lines.ITERATIONS):
                    if number == lines.WARM_UP:
                        tracing.begin()
                    self.number += 1
                    yield
                    _forget()
                found = tracing.end(lines.ITERATIONS)
            self.outcome = judge.outcome(
                self._chosen,
                series,
                [line.to_json() for line in found],
                reason=self._reason,
                capture=capture,
                windows=list(zip(began[warmup:], ended[warmup:], strict=True)),
            )

    def _start(self, stack: ExitStack) -> Recording | None:
        if not self._record:
            return None
        try:
            recording = Recording(self._chosen, self._keep)
        except NotRecording as error:
            self.refused = self._reason = str(error)
            return None
        stack.callback(recording.close)
        return recording

    def _finish(self, recording: Recording | None) -> Path | None:
        """Where the capture is, if there is one."""
        if recording is None:
            return None
        try:
            recording.finish()
        except NotRecording as error:
            self._reason = str(error)
            return None
        return recording.path


_clear_lookups = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
"""CPython's cache of attribute look-ups keeps up to 4,096 names alive, also those that C code made for one look-up."""


def _forget() -> None:
    """Drop what only waits: garbage in cycles, names of look-ups, and the log records that a test runner gathers.

    CPython's own hunt for reference leaks does the same between its runs (test.libregrtest.refleak).
    """
    for handler in logging.getLogger().handlers:
        if type(handler).__name__ == "LogCaptureHandler" and hasattr(handler, "clear"):
            handler.clear()
    _clear_lookups()
    gc.collect()

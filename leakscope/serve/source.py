"""What is read: sources, their metrics, and the thread that reads one again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from leakscope.errors import LeakscopeError
from leakscope.report.export.metrics import Metric

EVIDENCE = "evidence"
MAX_COST_SHARE = 0.1
"""A source is read no more of the time than this."""
LEAST_PATIENCE_S = 60.0
PATIENCE = 5.0
"""A source that has not been read for so many of its intervals is no longer shown."""


class Source(Protocol):
    """One thing to read. ``name`` is the label `evidence`, ``kind`` a word for it."""

    name: str
    kind: str
    every_s: float

    def read(self, now_s: float) -> list[Metric]:
        """Its metrics, each with the label `evidence` first. ``now_s``: of a clock that never goes back.

        Raises LeakscopeError where it cannot be read.
        """

    def close(self) -> None:
        """Give back what it holds."""


def gauge(
    name: str, unit: str, help: str, values: Iterable[tuple[tuple[str, ...], float | None]], *labels: str
) -> Metric:
    """A gauge of one source; values that are None are left out. The first label is `evidence`."""
    return Metric(name, unit, help, (EVIDENCE, *labels), tuple((key, v) for key, v in values if v is not None))


def count(name: str, help: str, values: Iterable[tuple[tuple[str, ...], float | None]], *labels: str) -> Metric:
    """As :func:`gauge`, of a counter."""
    return replace(gauge(name, "1", help, values, *labels), counter=True)


def of_evidence(metrics: Iterable[Metric], name: str) -> list[Metric]:
    """``metrics`` of a report, each with the label `evidence`."""
    found = []
    for metric in metrics:
        if EVIDENCE not in metric.labels:
            samples = tuple(((name, *key), value) for key, value in metric.samples)
            metric = replace(metric, labels=(EVIDENCE, *metric.labels), samples=samples)
        found.append(metric)
    return found


@dataclass(frozen=True)
class Health:
    """How reading a source goes. Times are Unix seconds, 0: never."""

    up: bool = False
    failures: int = 0
    last_read_s: float = 0.0
    took_s: float = 0.0
    error: str = ""

    @property
    def tried(self) -> bool:
        """Whether it was read, or failed to be."""
        return bool(self.last_read_s or self.failures)


class Polled:
    """Reads a source each interval in a thread of its own; :meth:`state` never waits for it."""

    def __init__(self, source: Source, on_change: Callable[[str], None] = lambda line: None) -> None:
        """:param on_change: told, a line, when the source cannot be read any more, and when it can again."""
        self.source = source
        self._on_change = on_change
        self._lock = threading.Lock()
        self._metrics: list[Metric] = []
        self._health = Health()
        self._fresh_until = 0.0  # monotonic
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"read-{source.kind}", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no other reading."""
        self._ended.set()

    def join(self, patience_s: float) -> bool:
        """Wait for a reading under way, for so long; whether it is over."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, patience_s))
        return not self._thread.is_alive()

    def state(self) -> tuple[list[Metric], Health]:
        """The metrics of the last reading, none where it failed or is too old; and how reading goes."""
        with self._lock:
            if time.monotonic() > self._fresh_until:
                return [], replace(self._health, up=False)
            return (self._metrics, self._health) if self._health.up else ([], self._health)

    def read(self) -> None:
        """Read once, now."""
        began = time.monotonic()
        try:
            metrics, error = self.source.read(began), ""
        except LeakscopeError as raised:
            metrics, error = [], str(raised)
        except Exception as raised:  # the others must go on; a bug is told like any failure
            metrics, error = [], f"{self.source.name}: {type(raised).__name__}: {raised}"
        took = time.monotonic() - began
        with self._lock:
            before = self._health
            self._metrics = metrics
            self._health = Health(
                not error,
                before.failures + bool(error),
                before.last_read_s if error else time.time(),
                took,
                error,
            )
            patience = max(LEAST_PATIENCE_S, PATIENCE * self.source.every_s, PATIENCE * took / MAX_COST_SHARE)
            self._fresh_until = time.monotonic() + patience
        if self._ended.is_set():
            return
        if error and (before.up or not before.failures):
            self._on_change(error)
        elif before.failures and not before.up and not error:
            self._on_change(f"{self.source.name}: can be read again")

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self.read()
                if self._ended.wait(max(self.source.every_s, self._health.took_s / MAX_COST_SHARE)):
                    break
        finally:
            self.source.close()

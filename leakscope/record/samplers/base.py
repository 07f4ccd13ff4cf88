"""What every sampler is, and the filter that keeps rows of unchanging counters out of the capture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol


class Reading(NamedTuple):
    """One value of one counter: ``scope`` is one of words.SCOPES, ``scope_id`` names the thing in that
    scope.
    """

    scope: str
    scope_id: str
    counter: str
    value: float


class TimedReading(NamedTuple):
    """A reading and its time, in nanoseconds of the recording's clock."""

    ts_ns: int
    reading: Reading


class Sampler(Protocol):
    """A source of readings.

    ``sample`` never raises for a thing that vanished between listing and reading (a process that exits is
    normal). What it could not read for another reason it counts in ``errors``, a text that says what failed.
    ``sparse`` samplers have many counters that seldom change; their rows pass through :class:`ChangeFilter`.
    """

    name: str
    sparse: bool
    errors: Counter[str]

    def sample(self, ts_ns: int) -> Iterable[Reading]:
        """Read every counter now; ``ts_ns`` is the time that the rows will carry."""

    def facts(self) -> dict[str, Any]:
        """What the source is, for the manifest (plain JSON types)."""


class ChangeFilter:
    """Drop readings that repeat, without loss.

    A reading passes when it is the first of its counter, when it differs from the one before, or when the
    next one differs (then the unchanged one is emitted late, with its own time). So each row that was left
    out lies between two equal ones: joining the rows with straight lines gives back exactly what was read. A
    host has about 230 slab caches and 50 meminfo lines; on a quiet one a few dozen change in a second.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str, str], tuple[int, float]] = {}  # newest reading, emitted or not
        self._held: set[tuple[str, str, str]] = set()  # counters whose newest reading was not emitted

    def pass_changed(self, ts_ns: int, readings: Iterable[Reading], *, everything: bool) -> Iterator[TimedReading]:
        """The rows to emit for the readings of one moment; ``everything`` emits unchanged ones too."""
        for reading in readings:
            key = (reading.scope, reading.scope_id, reading.counter)
            before = self._last.get(key)
            self._last[key] = (ts_ns, reading.value)
            if before is not None and before[1] == reading.value and not everything:
                self._held.add(key)
                continue
            if key in self._held:
                self._held.discard(key)
                if before is not None and before[1] != reading.value:
                    yield TimedReading(before[0], Reading(*key, before[1]))
            yield TimedReading(ts_ns, reading)


def describe_error(error: Exception, what: str) -> str:
    """``what: reason`` without the parts of an OSError that differ from one PID to the next."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return f"{what}: {reason}"

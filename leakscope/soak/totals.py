"""Sums over the recorded processes as readings come, and their restarts: memory does not grow with processes that came
and went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leakscope.detect.recorded import NOT_SUMMED, SAME_START_S, START_ERROR_S, SUMMED_AS, Life

Row = tuple[str, str, str, float]
"""(scope, scope_id, counter, value)."""


class Totals:
    """Each process counts with its last reading of a counter, as long as it is read."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, float]] = {}

    def __len__(self) -> int:
        """Processes in the last reading."""
        return len(self._held)

    def add(self, rows: Iterable[Row]) -> dict[str, float]:
        """One reading of the samplers: the sums by counter, and the number of processes; {} where none was read."""
        read: dict[str, dict[str, float]] = {}
        for scope, scope_id, counter, value in rows:
            if scope == "process" and not counter.endswith(NOT_SUMMED):
                read.setdefault(scope_id, {})[counter] = value
        self._held = {pid: {**self._held.get(pid, {}), **of} for pid, of in read.items()}
        sums: dict[str, float] = {}
        for of in self._held.values():
            for counter, value in of.items():
                name = SUMMED_AS.get(counter, counter)
                sums[name] = sums.get(name, 0.0) + value
        return sums | {"num_processes": float(len(read))} if read else {}


class Restarts:
    """The first process of a soak, and each root that began when all before it had ended."""

    def __init__(self) -> None:
        self.begun: list[Life] = []
        self._alive: list[Life] = []
        self._known: list[Life] = []
        self._until = float("-inf")
        self._resumed = False  # nothing was heard of the processes of earlier recordings so far

    def load(self, begun: Sequence[Life], roots: Sequence[Life]) -> None:
        """Take what earlier recordings saw."""
        self.begun = list(begun)
        self._known = list(roots)
        self._alive = [life for life in roots if life.end_s == float("inf")]
        self._until = max((life.end_s for life in roots if life.end_s != float("inf")), default=float("-inf"))
        self._resumed = True

    def add(self, lives: Iterable[Life]) -> None:
        """All processes of the recording as they are now."""
        roots = sorted((life for life in lives if life.root), key=lambda life: life.start_s)
        fresh = [life for life in roots if not any(_same(life, known) for known in self._known)]
        ended = [life for life in roots if life.end_s != float("inf")]
        self._alive = [life for life in self._alive if not any(_same(life, one) for one in ended)]
        if self._resumed and roots:  # who is not there any more ended while nobody looked
            self._alive = [life for life in self._alive if any(_same(life, one) for one in roots)]
            self._resumed = False
        for life in fresh:
            before = [one for one in ended if one not in fresh or one.start_s < life.start_s]
            until = max([self._until, *(one.end_s for one in before)])
            if not self.begun or (not self._alive and life.start_s + START_ERROR_S >= until):
                self.begun.append(life)
            if life.end_s == float("inf"):
                self._alive.append(life)
        self._until = max([self._until, *(life.end_s for life in ended)])
        self._known = [*roots, *(life for life in self._alive if life not in roots)]

    def end(self, elapsed_s: float) -> None:
        """The recording ended: of whom nothing more is read, nothing more is known."""
        if self._alive:
            self._until, self._alive = max(self._until, elapsed_s), []


def _same(one: Life, other: Life) -> bool:
    return one.pid == other.pid and abs(one.start_s - other.start_s) < SAME_START_S

"""The processes of a recording: who belongs to it, whose child, alive from when to when."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Process:
    """One life of a PID; times in CLOCK_MONOTONIC nanoseconds, 0 = unknown start or still alive."""

    pid: int
    parent_pid: int = 0
    namespace_pid: int = 0
    start_ns: int = 0
    exit_ns: int = 0
    name: str = ""
    role: str = "other"


def process_exists(pid: int) -> bool:
    """Whether a process (thread group) of this PID lives.

    One that ended and only waits for its parent to take note of it (a zombie) does not; one whose first thread
    ended before the others does.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    ended = status.get("State", "")[:1] in ("Z", "X") and status.get("Threads") in ("0", "1")
    return status.get("Tgid") == str(pid) and not ended


class Processes:
    """Follows processes through side-band events. With `everyone` all processes of the host belong to it."""

    def __init__(self, everyone: bool) -> None:
        self.everyone = everyone
        self._lives: list[Process] = []
        self._current: dict[int, Process] = {}

    def seed(self, pid: int, role: str) -> None:
        """Add a process that exists now, with what /proc says of it."""
        process = Process(pid, role=role, namespace_pid=pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            fields = stat[stat.rindex(")") + 2 :].split()
            process.name = stat[stat.index("(") + 1 : stat.rindex(")")]
            process.parent_pid = int(fields[1])
            process.start_ns = int(fields[19]) * 1_000_000_000 // _TICKS
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("NSpid:"):
                    process.namespace_pid = int(line.split()[-1])
        except (OSError, ValueError):
            pass  # it ended meanwhile: the PID and the role are what is known
        self._add(process)

    def _add(self, process: Process) -> None:
        self._lives.append(process)
        self._current[process.pid] = process

    def belongs(self, pid: int) -> bool:
        """Whether a PID is part of the recording."""
        return self.everyone or pid in self._current

    def forked(self, parent: int, child: int, ts_ns: int) -> None:
        """A member (or anyone, host-wide) forked."""
        if self.belongs(parent):
            inherited = self._current.get(parent)
            role = "child" if inherited and inherited.role in ("root", "child") else "other"
            self._add(Process(child, parent, child, ts_ns, 0, inherited.name if inherited else "", role))

    def named(self, pid: int, name: str) -> None:
        """A process took a name (exec or prctl)."""
        if pid in self._current:
            self._current[pid].name = name

    def ended(self, pid: int, ts_ns: int) -> None:
        """The exit of a process began."""
        process = self._current.get(pid)
        if process and not process.exit_ns:
            process.exit_ns = ts_ns

    def life(self, pid: int) -> Process | None:
        """What is known of the latest process of a PID."""
        return self._current.get(pid)

    def forget(self, pids: set[int]) -> None:
        """Drop ended processes: nothing that is recorded names them."""
        self._lives = [p for p in self._lives if p.pid not in pids or not p.exit_ns]
        self._current = {pid: p for pid, p in self._current.items() if pid not in pids or not p.exit_ns}

    def lives(self) -> list[Process]:
        """All members, those that ended too, as they are now."""
        return [replace(process) for process in list(self._lives)]

    def alive(self) -> list[int]:
        """PIDs of members that have not ended."""
        return [pid for pid, process in list(self._current.items()) if not process.exit_ns]

    def table(self, source_id: int, seen: Iterable[int]) -> pa.Table:
        """`processes` rows of the members, host-wide only of those in `seen` (PIDs with events)."""
        import pyarrow as pa

        from leakscope.model.tables import PROCESSES

        wanted = set(seen)
        for pid in wanted - self._current.keys():
            self.seed(pid, "other")
        rows = [
            {"source_id": source_id, **vars(process)}
            for process in self._lives
            if process.role != "other" or process.pid in wanted
        ]
        return pa.Table.from_pylist(rows, schema=PROCESSES)

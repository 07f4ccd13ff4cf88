"""Which process of a recording a PID of another source means.

PIDs are of a PID namespace, and they recur. A PID of another source is a process of the recording with that PID, or
one with that PID inside its namespace (``namespace_pid``); several lives of one PID are told apart by time where the
source has any, else every life is a candidate and its events decide.
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd


class Candidate(NamedTuple):
    """A life of a process in the recording. ``same_namespace``: its PID there is the PID that was asked for."""

    pid: int
    start_ns: int
    end_ns: int  # exit, or the largest time where it was alive at the end
    same_namespace: bool


FOREVER = (1 << 63) - 1


def candidates(
    processes: pd.DataFrame, pid: int, from_ns: int | None = None, until_ns: int | None = None
) -> list[Candidate]:
    """The lives that ``pid`` may mean, those of the recording's own namespace first, then by start.

    ``processes``: pid, namespace_pid, start_ns, exit_ns of the recording. With ``from_ns`` and ``until_ns``, the
    evidence of the other source on the recording's clock, lives that do not overlap it are left out. Inner PIDs are
    looked at only where no process of the recording's namespace fits.
    """
    for column, same in (("pid", True), ("namespace_pid", False)):
        rows = processes[processes[column] == pid]
        if not same:
            rows = rows[rows["pid"] != pid]
        found = []
        for own, start, end in rows[["pid", "start_ns", "exit_ns"]].itertuples(index=False):
            life = Candidate(int(own), int(start), int(end) if end > 0 else FOREVER, same)
            outside = (
                from_ns is not None and until_ns is not None and (until_ns < life.start_ns or life.end_ns < from_ns)
            )
            if not outside:
                found.append(life)
        if found:
            return sorted(set(found), key=lambda life: (life.start_ns, life.pid))
    return []

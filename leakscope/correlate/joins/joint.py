"""What is known of a pair of sources, a recording and a report, and columns of both that rules compare."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.joins.clocks import NO_START, Alignment
from leakscope.correlate.joins.evidence import Evidence
from leakscope.correlate.joins.fingerprint import Agreed
from leakscope.correlate.joins.identity import Allocations
from leakscope.correlate.joins.processes import Candidate
from leakscope.correlate.joins.timeline import Ints
from leakscope.model.results import JoinOutcome


@dataclass
class Sequences:
    """What API sequences gave for a PID of the report: ``told`` and ``refused`` say in words what they decided and what
    they could not, of ``calls`` calls."""

    calls: int = 0
    agreed: Agreed | None = None
    told: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass
class Joint:
    """What is known of a pair of sources. ``lives``: PID of the report → life in the recording (0: it names none).
    ``threads``: PID of the report → its thread of another PID namespace → the thread in the recording."""

    recording: Evidence
    report: Evidence
    alignment: Alignment = field(default_factory=Alignment)
    lives: dict[int, Candidate] = field(default_factory=dict)
    threads: dict[int, dict[int, int]] = field(default_factory=dict)
    sequences: dict[int, Sequences] = field(default_factory=dict)
    refused_pids: dict[int, str] = field(default_factory=dict)
    pairs: tuple[Ints, Ints] = field(default_factory=lambda: (np.empty(0, np.int64), np.empty(0, np.int64)))
    """Rows of the allocations of both that are one."""
    outcomes: list[JoinOutcome] = field(default_factory=list)

    @property
    def unplaced(self) -> bool:
        """Whether nothing yet says where the report's times lie on the recording's clock."""
        return self.alignment.refused == NO_START or (not self.alignment.refused and self.alignment.error_ns is None)

    def on_recordings_clock(self, at_ns: npt.NDArray[np.int64]) -> Ints:
        """Times of the report as times of the recording."""
        return at_ns + self.alignment.offset_ns

    def mapped(self, rows: pd.DataFrame) -> tuple[Ints, Ints]:
        """(pid, tid) of rows of the report as the recording numbers them; tid -1 where it is not known: a thread of
        another PID namespace that is not the main one and in no pair."""
        pid, tid = rows["pid"].to_numpy(np.int64), rows["tid"].to_numpy(np.int64).copy()
        own = np.full(len(pid), -1, np.int64)
        for number, life in self.lives.items():
            here = pid == number
            own[here] = life.pid
            if not life.same_namespace:
                known = {**self.threads.get(number, {}), number: life.pid}
                threads, code = np.unique(tid[here], return_inverse=True)
                tid[here] = np.array([known.get(t, -1) for t in threads.tolist()], np.int64)[np.ravel(code)]
        tid[own < 0] = -1
        return own, tid


def owned(report: Evidence) -> pd.DataFrame:
    """The allocations of a report that are the driver's memory: not the blocks that a pool hands out again."""
    table = report.table("allocations")
    return table[table["kind"] != "pool_block"].reset_index(drop=True)


def of_life(rows: pd.DataFrame, life: Candidate) -> pd.DataFrame:
    """The rows (pid, ts_ns) of a process of the recording."""
    return rows[(rows["pid"] == life.pid) & (rows["ts_ns"] >= life.start_ns) & (rows["ts_ns"] <= life.end_ns)]


def columns(rows: pd.DataFrame, process: int | Ints) -> Allocations:
    """``rows`` (addr, size_bytes, ts_ns) of a process, or of one a row."""
    return Allocations(
        np.full(len(rows), process) if isinstance(process, int) else process,
        rows["addr"].to_numpy(np.uint64),
        rows["size_bytes"].to_numpy(np.int64),
        rows["ts_ns"].to_numpy(np.int64),
    )

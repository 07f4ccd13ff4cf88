"""From readouts and decoded calls to the tables of a census.

Kernel objects come as counts of the kernel side; what is rare (maps, device memory, heap objects where they are probed)
comes through the call ring event by event and is counted here. All of it ends in the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from leakscope.model.words import KINDS, KINDS_NOT_ADDED
from leakscope.record import records
from leakscope.record.census.book import ALLOCATED, CONTEXT, EXIT, FREED, IDENTITY, REUSED, Book, IntArray
from leakscope.record.census.cohorts import window_starts
from leakscope.record.census.kept_calls import KeptCalls
from leakscope.record.census.reader import CensusReader, Counts, Live
from leakscope.record.decode.columns import (
    CAUSE_CODES,
    KIND_CODES,
    LAYER_CODES,
    OP_CODES,
    EventColumns,
    distinct,
)
from leakscope.record.decode.exits import Exits
from leakscope.record.decode.kernel_objects import KernelObjects
from leakscope.record.probes.functions import FUNCTIONS
from leakscope.record.processes import Processes
from leakscope.record.symbols.stack_numbers import StackNumbers

FOLDED_PID = -1
"""Stands for processes that began and ended between two readouts and can never be judged on their own."""
SHORT_LIFE_SHARE = 0.1
"""Such a process lived less than this share of the recording up to its end (correlate.lives.MIN_LIFE_SHARE)."""
IDLE_READOUTS = 4
MOST_SITES = 1 << 16
"""Sites in memory beyond which idle ones are given up; one that comes back has another number."""
MOST_PENDING = 200_000
"""Events and calls that may wait for the next readout, which knows which processes were short-lived."""

_EVENT_OF_CAUSE = np.array(
    [{"call": FREED, "reuse": REUSED, "context": CONTEXT}.get(cause, EXIT) for cause in CAUSE_CODES], np.int64
)
_OF_KERNEL_OBJECTS = ("call_api", "call_stack")
_EVENT_COLUMNS = (
    *(name for name in IDENTITY if name not in _OF_KERNEL_OBJECTS),
    "ts_ns",
    "op",
    "cause",
    "result",
    "alloc_ts_ns",
    "call_id",
)
_ADDED = np.array([kind not in KINDS_NOT_ADDED for kind in KINDS])

Tables = list[tuple[str, pa.Table]]

if TYPE_CHECKING:
    from leakscope.record.live.sites import CensusSums


class Census:
    """Takes the place of `mem_events` (and of most `calls`) in what a recording writes."""

    def __init__(
        self,
        reader: CensusReader,
        columns: EventColumns,
        objects: KernelObjects,
        numbers: StackNumbers,
        processes: Processes,
        exits: Exits,
        *,
        origin_ns: int,
        interval_ns: int,
        sampled: bool,
    ) -> None:
        """`sampled`: heap objects need sites by size, to be scaled."""
        self._reader = reader
        self._columns = columns
        self._objects = objects
        self._numbers = numbers
        self._processes = processes
        self._exits = exits
        self._origin_ns = origin_ns
        self._interval_ns = interval_ns
        self._sampled = sampled
        self._book = Book(columns)
        self._known = np.empty(0, np.uint32)  # numbers of the kernel's identities at the last readout, in order
        self._counted = np.empty((0, 6), np.int64)  # their counts
        self._slot = np.empty(0, np.int64)
        self._events: list[dict[str, np.ndarray]] = []  # not counted yet
        self._calls = KeptCalls()
        # Live objects of what comes by events: slot << 32 | first interval of a window → objects, bytes.
        self._cohorts = np.empty(0, np.int64)
        self._cohort_sums = np.empty((0, 2), np.int64)
        self._written = np.empty(0, np.int64)  # cohorts as they were written last
        self._written_sums = np.empty((0, 2), np.int64)
        self._own_pids: set[int] = set()  # that have sites of their own
        self._ended_pids: set[int] = set()  # that may have something live or uncounted still
        self.read_ns = origin_ns
        """Time of the last readout."""
        self.sums: CensusSums | None = None
        """Where each readout is published, if somebody watches."""

    def tables(self, decoded: Tables, readouts: Iterable[Counts | Live]) -> Tables:
        """What to write in place of the decoded tables of a batch, which holds all that was before its readouts."""
        out: Tables = [(name, table) for name, table in decoded if name not in ("mem_events", "calls")]
        for name, table in decoded:
            if name == "mem_events" and table.num_rows:
                self._events.append(_columns(table))
            elif name == "calls" and table is not None:
                self._calls.add(table)
        for readout in readouts:
            self._count_events(readout.ts_ns)
            out.append(("calls", self._calls.take(readout.ts_ns)))
            out += self._take(readout) if isinstance(readout, Counts) else self._take_live(readout)
            if self.sums is not None and isinstance(readout, Counts):
                self.sums.publish(*self._book.live())
        if self._calls.rows + sum(len(columns["ts_ns"]) for columns in self._events) > MOST_PENDING:
            self._count_events(None)
            out.append(("calls", self._calls.take(None)))
        return out

    def ended(self, pids: Iterable[int]) -> None:
        """Processes whose exit began."""
        self._ended_pids.update(pids)

    # --- what comes by events

    def _count_events(self, until_ns: int | None) -> None:
        """Count what happened up to a time (None: all), keep the rest."""
        later: list[dict[str, np.ndarray]] = []
        for columns in self._events:
            due = np.ones(len(columns["ts_ns"]), bool) if until_ns is None else columns["ts_ns"] <= until_ns
            self._count({name: values[due] for name, values in columns.items()})
            if not due.all():
                later.append({name: values[~due] for name, values in columns.items()})
        self._events = later

    def _count(self, rows: dict[str, np.ndarray]) -> None:
        op = rows["op"]
        allocates = op == OP_CODES["alloc"]
        made_ns = np.where(allocates, rows["ts_ns"], rows["alloc_ts_ns"])
        exit_ns = self._exit_times(rows["pid"])
        counted = (op != OP_CODES["advise"]) & (made_ns > 0) & (allocates <= (rows["result"] == 0))
        counted &= (exit_ns == 0) | (made_ns < exit_ns)  # else made by the exit itself
        rows = {name: values[counted] for name, values in rows.items()}
        if not len(rows["op"]):
            return
        allocates, made_ns, exit_ns = allocates[counted], made_ns[counted], exit_ns[counted]
        event = np.where(allocates, ALLOCATED, _EVENT_OF_CAUSE[rows["cause"]])
        event[~allocates & (exit_ns > 0) & (rows["ts_ns"] >= exit_ns)] = EXIT
        pids = rows["pid"].copy()
        for pid in np.unique(pids).tolist():
            pids[rows["pid"] == pid] = self._owner(pid)
        by_size = (rows["kind"] == KIND_CODES["heap"]) & self._sampled
        identity = {
            **rows,
            **dict.fromkeys(_OF_KERNEL_OBJECTS, np.zeros(len(pids), np.int64)),
            "pid": pids,
            "size_bytes": np.where(by_size, rows["size_bytes"], 0),
        }
        columns = [identity[name] for name in IDENTITY]
        first, group = distinct(*columns)
        keys = np.stack([column[first].astype(np.int64) for column in columns], axis=1)
        slots, fresh = self._book.slots(keys, rows["call_id"][first])
        self._calls.want(rows["call_id"][first][fresh].tolist())
        slot = slots[group]
        size = rows["size_bytes"].astype(np.int64)
        objects = (rows["result"] == 0).astype(np.int64)
        self._book.add(slot, event, objects, size)
        own = allocates
        self._book.span(slot[own], rows["ts_ns"][own], rows["ts_ns"][own], size[own])
        sign = np.where(allocates, 1, -1)
        births = np.maximum(made_ns - self._origin_ns, 0) // self._interval_ns
        keys_of_change = slot << 32 | births
        if len(self._cohorts) > MOST_PENDING:
            now = (int(rows["ts_ns"].max()) - self._origin_ns) // self._interval_ns
            self._cohorts, self._cohort_sums = _summed(self._cohorts, self._cohort_sums, now)
        self._cohorts = np.concatenate([self._cohorts, keys_of_change])
        self._cohort_sums = np.concatenate([self._cohort_sums, np.stack([sign * objects, sign * size], axis=1)])

    def _exit_times(self, pids: np.ndarray) -> IntArray:
        """When the exit of each process began, 0 = it lives."""
        unique, group = np.unique(pids, return_inverse=True)
        times = self._exits.times(unique)
        lives = [self._processes.life(pid) for pid in unique.tolist()]
        started = np.array([life.start_ns if life else 0 for life in lives], np.int64)
        return np.where(started > times, 0, times)[group]  # the PID was given out again

    def _owner(self, pid: int) -> int:
        """The PID whose site an object of a process belongs to."""
        if pid in self._own_pids:
            return pid
        life = self._processes.life(pid)
        if life is not None and life.exit_ns and life.start_ns and life.role != "root":
            lived = life.exit_ns - max(life.start_ns, self._origin_ns)
            if lived < SHORT_LIFE_SHARE * (life.exit_ns - self._origin_ns):
                return FOLDED_PID
        self._own_pids.add(pid)
        self._columns.totals.pids.add(pid)
        return pid

    # --- what the kernel side counts

    def _take(self, readout: Counts) -> Tables:
        book = self._book
        slot, before = self._slots_of(readout)
        change = readout.counts[:, :4] - before[:, :4]
        moved: npt.NDArray[np.bool_] = np.asarray(change.any(axis=1))
        size_of = book.identity[slot, IDENTITY.index("size_bytes")]
        size = size_of[moved]
        for column, event in enumerate((ALLOCATED, FREED, REUSED, EXIT)):
            book.add(slot[moved], event, change[moved, column], change[moved, column] * size)
        first = readout.counts[moved, 4]
        book.span(slot[moved], first, readout.counts[moved, 5], size)
        self._known, self._counted, self._slot = readout.numbers, readout.counts, slot
        sites = book.site_rows()
        totals = book.total_rows(readout.ts_ns)
        added = _ADDED[book.identity[slot, IDENTITY.index("kind")]]
        kept = (change[:, 0] - change[:, 1] - change[:, 2]) * size_of
        self._columns.totals.live_bytes["kernel"] += int(kept[added].sum())
        self._tidy(readout, moved)
        self.read_ns = readout.ts_ns
        return [("census_sites", sites), ("census_totals", totals)]

    def _slots_of(self, readout: Counts) -> tuple[IntArray, npt.NDArray[np.int64]]:
        """(slot of each identity of a readout, its counts at the readout before)."""
        at = np.minimum(np.searchsorted(self._known, readout.numbers), max(len(self._known) - 1, 0))
        known = self._known[at] == readout.numbers if len(self._known) else np.zeros(len(readout.numbers), bool)
        slot = np.zeros(len(readout.numbers), np.int64)
        before = np.zeros_like(readout.counts)
        slot[known], before[known] = self._slot[at[known]], self._counted[at[known]]
        fresh = np.flatnonzero(~known)
        if len(fresh):
            slot[fresh] = self._new_slots(readout.keys[fresh], readout.counts[fresh, 4])
        return slot, before

    def _new_slots(self, keys: np.ndarray, first_ns: IntArray) -> IntArray:
        batch = np.zeros(len(keys), records.MEM_RECORD)
        for name in ("pid", "site", "kernel_stack", "user_stack", "python_stack", "weight"):
            batch[name] = keys[name]
        batch["ts_ns"] = first_ns
        identity = self._objects.identities(batch)
        identity["layer"] = np.full(len(keys), LAYER_CODES["kernel"])
        identity["pid"] = np.array([self._owner(pid) for pid in keys["pid"].tolist()], np.int64)
        identity["call_api"], identity["call_stack"] = self._calls_around(keys)
        rows = np.stack([identity[name].astype(np.int64) for name in IDENTITY], axis=1)
        return self._book.slots(rows)[0]

    def _calls_around(self, keys: np.ndarray) -> tuple[IntArray, IntArray]:
        """(api code, user stack) of the outermost probed call around the allocations of identities; 0 = none."""
        apis = np.zeros(len(keys), np.int64)
        within = np.flatnonzero(keys["call_function"])
        for i in within:
            apis[i] = self._columns.apis.code(FUNCTIONS[keys["call_function"][i] - 1].api)
        stacks = np.zeros(len(keys), np.int64)
        stacks[within] = self._numbers.stacks(keys["call_stack"][within])
        return apis, stacks

    def _take_live(self, live: Live) -> Tables:
        """`census` rows of the cohorts that are not what they were the last time."""
        now = (live.ts_ns - self._origin_ns) // self._interval_ns
        at = np.minimum(np.searchsorted(self._known, live.numbers), max(len(self._known) - 1, 0))
        # An identity that was made since the last counts is new at the next ones.
        known = self._known[at] == live.numbers if len(self._known) else np.zeros(len(at), bool)
        kernel_slot, objects = self._slot[at[known]], live.objects[known]
        size = self._book.identity[kernel_slot, IDENTITY.index("size_bytes")]
        self._cohorts, self._cohort_sums = _summed(self._cohorts, self._cohort_sums, now)
        keys, sums = _summed(
            np.concatenate([self._cohorts, kernel_slot << 32 | live.births[known]]),
            np.concatenate([self._cohort_sums, np.stack([objects, objects * size], axis=1)]),
            now,
        )
        every = np.union1d(keys, self._written)
        is_now, was = np.zeros((len(every), 2), np.int64), np.zeros((len(every), 2), np.int64)
        is_now[np.searchsorted(every, keys)] = sums
        was[np.searchsorted(every, self._written)] = self._written_sums
        changed = (is_now != was).any(axis=1) & (self._book.ids[every >> 32] > 0)
        self._written, self._written_sums = keys, sums
        starts = self._origin_ns + (every[changed] & 0xFFFFFFFF) * self._interval_ns
        sites = self._book.site_rows()
        rows = self._book.cohort_rows(live.ts_ns, every[changed] >> 32, starts, *is_now[changed].T)
        return [("census_sites", sites), ("census", rows)]

    def _tidy(self, readout: Counts, moved: np.ndarray) -> None:
        """Give up what belongs to processes that ended before the last readout, and what is idle where room is scarce.

        A number stays known while it is in readouts, as one may be on its way that was taken before it was retired.
        """
        pids = np.fromiter(self._ended_pids, np.int64, len(self._ended_pids))
        pids = pids[self._exits.times(pids) < self.read_ns]
        ended = set(pids.tolist())
        nothing_live = readout.counts[:, 0] == readout.counts[:, 1:4].sum(axis=1)
        of_ended = np.isin(readout.keys["pid"], pids)
        gone = of_ended & nothing_live & ~moved
        idle_ns = readout.ts_ns - IDLE_READOUTS * (readout.ts_ns - self.read_ns)
        if len(readout.numbers) > self._reader.identity_room // 2:
            gone |= nothing_live & ~moved & (readout.counts[:, 5] < idle_ns)
        self._reader.retire(readout.keys[gone], readout.numbers[gone])
        self._book.drop_idle(idle_ns if len(self._book) > MOST_SITES else 0, ended, self._slot)
        # What has identities left may have something live yet.
        done = ended - set(np.unique(readout.keys["pid"][of_ended]).tolist())
        self._ended_pids -= done
        self._processes.forget(done - self._own_pids)
        self._own_pids -= done
        self._exits.forget(done)


def _summed(keys: IntArray, sums: IntArray, now: int) -> tuple[IntArray, IntArray]:
    """Cohorts of the windows of a time, each once, in order, without those in which nothing lives."""
    moved = (keys >> 32 << 32) | window_starts(keys & 0xFFFFFFFF, now)
    unique, group = np.unique(moved, return_inverse=True)
    total = np.zeros((len(unique), 2), np.int64)
    np.add.at(total, group, sums)
    kept = total.any(axis=1)
    return unique[kept], total[kept]


def _columns(table: pa.Table) -> dict[str, np.ndarray]:
    """Columns of `mem_events` as numpy arrays, text as codes."""
    found = {}
    for name in _EVENT_COLUMNS:
        column = table[name].combine_chunks()
        found[name] = (column.indices if pa.types.is_dictionary(column.type) else column).to_numpy(zero_copy_only=False)
    return found

"""Reading the kernel side of a census: counts by identity, live objects by identity and birth."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leakscope.record import records
from leakscope.record.kernel.bpf import Map, possible_cpus
from leakscope.record.loader import LoadedPrograms

COUNTS = 6
"""Fields of IDENTITY_COUNT."""
BATCH_ENTRIES = 1 << 15
"""Entries of the live map that are in memory at once: 2 MB."""
SWEEP_ABOVE = 0.5
"""The share of a live map that may be filled before entries of freed objects are taken out of it."""
MOST_SWEPT = 1 << 15
"""Entries taken out of a map at a readout: some 50 ms."""


_LiveColumns = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Counts(NamedTuple):
    """Identities by number: ``numbers`` (uint32), ``keys`` (IDENTITY_KEY) and ``counts`` (int64[n, 6], the fields of
    IDENTITY_COUNT over all CPUs)."""

    numbers: npt.NDArray[np.uint32]
    keys: np.ndarray
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Readout:
    """The kernel objects of a census at `ts_ns`.

    Rows of ``numbers``, ``keys`` and ``counts`` are as in :class:`Counts`. Rows of ``live_numbers`` (uint32),
    ``births`` (int64, intervals since the start) and ``live_objects`` (int64) are live objects of an identity that were
    born in an interval.
    """

    ts_ns: int
    numbers: npt.NDArray[np.uint32]
    keys: np.ndarray
    counts: npt.NDArray[np.int64]
    live_numbers: npt.NDArray[np.uint32]
    births: npt.NDArray[np.int64]
    live_objects: npt.NDArray[np.int64]


class CensusReader:
    """Reads the maps of a census and keeps them from filling. Serves one thread."""

    def __init__(self, programs: LoadedPrograms, origin_ns: int, interval_ns: int) -> None:
        self._identities = programs.map("identities")
        self._counts = programs.map("identity_counts")
        self._live = (programs.map("live"), programs.map("live_pages"))
        self._counters = programs.map("counters")
        self._origin_ns = origin_ns
        self._interval_ns = interval_ns
        self._cpus = possible_cpus()
        self._swept = 0
        self._last_ns = origin_ns

    def counts(self) -> Counts:
        """What is counted now: a few milliseconds."""
        raw_keys, raw_numbers = self._identities.read_all()
        numbers = raw_numbers.view(np.uint32).reshape(-1)
        keys = raw_keys.view(records.IDENTITY_KEY).reshape(-1)
        raw_counted, raw_counts = self._counts.read_all()
        counted = raw_counted.view(np.uint32).reshape(-1)
        by_cpu = raw_counts.view(np.int64).reshape(len(counted), self._cpus, COUNTS)
        order = np.argsort(counted)
        # A number without counts was made between the two reads: it is new at the next readout.
        at = np.minimum(np.searchsorted(counted[order], numbers), max(len(counted) - 1, 0))
        known = counted[order][at] == numbers if len(counted) else np.zeros(len(numbers), bool)
        numbers, keys, by_cpu = numbers[known], keys[known], by_cpu[order][at[known]]
        counts = by_cpu.sum(axis=1)
        first = by_cpu[:, :, 4]
        counts[:, 4] = np.where(first > 0, first, np.iinfo(np.int64).max).min(axis=1, initial=np.iinfo(np.int64).max)
        counts[:, 5] = by_cpu[:, :, 5].max(axis=1, initial=0)
        ranked = np.argsort(numbers)
        return Counts(numbers[ranked], keys[ranked], counts[ranked])

    def read(self, ts_ns: int, counts: Counts, *, sweep: bool = True) -> Readout:
        """The readout of a time: what was counted then, and the live objects of now."""
        live = self._read_live(sweep)
        self._last_ns = ts_ns
        return Readout(ts_ns, *counts, *live)

    def retire(self, keys: np.ndarray, numbers: npt.NDArray[np.uint32]) -> None:
        """Drop identities that nothing live belongs to; one that is seen again gets another number."""
        for key, number in zip(keys, numbers, strict=True):
            self._identities.delete(key.tobytes())
            self._counts.delete(number.tobytes())

    @property
    def identity_room(self) -> int:
        """Most identities that there can be."""
        return self._identities.entries

    def _read_live(self, sweep: bool) -> _LiveColumns:
        groups, sizes = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for live in self._live:
            entries, stale = 0, []
            for raw_keys, raw_values in live.batches(BATCH_ENTRIES):
                values = raw_values.view(records.LIVE_OBJECT).reshape(-1)
                entries += len(values)
                alive = values["ts_ns"] > 0
                # `caller` of a freed object is the time of its end.
                old = ~alive & (values["caller"] < self._last_ns)
                stale.append(raw_keys[old])
                births = np.maximum(values["ts_ns"][alive].astype(np.int64) - self._origin_ns, 0) // self._interval_ns
                mixed = values["identity"][alive].astype(np.uint64) << np.uint64(32) | births.astype(np.uint64)
                distinct, counted = np.unique(mixed, return_counts=True)
                groups.append(distinct)
                sizes.append(counted)
            if sweep and entries > SWEEP_ABOVE * live.entries:
                self._sweep(live, np.concatenate(stale)[:MOST_SWEPT])
        distinct, group = np.unique(np.concatenate(groups), return_inverse=True)
        objects = np.bincount(group, np.concatenate(sizes), len(distinct)).astype(np.int64)
        numbers = (distinct >> np.uint64(32)).astype(np.uint32)
        return numbers, (distinct & np.uint64(0xFFFFFFFF)).astype(np.int64), objects

    def _sweep(self, live: Map, keys: Iterable[np.ndarray]) -> None:
        """Take freed objects out of a live map.

        All of them ended before the readout before this one. An address that is handed out again within the microsecond
        of its deletion would be lost to the map: its object is counted as allocated and its free is not seen. One that
        was idle for so long and comes back in that very microsecond is not to be expected in days of sweeping.
        """
        swept = sum(live.delete(key.tobytes()) for key in keys)
        if live is self._live[0]:
            self._swept += swept
            share = self._swept // (os.cpu_count() or 1)
            place = records.COUNTERS.index("live_swept").to_bytes(4, "little")
            self._counters.update(place, share.to_bytes(8, "little") * self._cpus)

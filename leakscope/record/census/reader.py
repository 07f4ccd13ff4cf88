"""Reading the kernel side of a census: counts by identity, live objects by identity and birth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leakscope.record import records
from leakscope.record.census.cohorts import window_starts
from leakscope.record.kernel.bpf import possible_cpus
from leakscope.record.loader import LoadedPrograms

COUNTS = 6
"""Fields of IDENTITY_COUNT."""
BATCH_ENTRIES = 1 << 15
"""Slots of the live table that are in memory at once: 2 MB."""
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Counts:
    """What was counted up to `ts_ns`: identities by number.

    ``numbers`` (uint32), ``keys`` (IDENTITY_KEY), ``counts`` (int64[n, 6]: the fields of IDENTITY_COUNT over all CPUs).
    """

    ts_ns: int
    numbers: npt.NDArray[np.uint32]
    keys: np.ndarray
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Live:
    """The live objects at `ts_ns`: ``objects`` (int64) of an identity ``numbers`` (uint32) that were born in an
    window of intervals that begins at ``births`` (int64, since the start; :func:`window_starts`)."""

    ts_ns: int
    numbers: npt.NDArray[np.uint32]
    births: npt.NDArray[np.int64]
    objects: npt.NDArray[np.int64]


class CensusReader:
    """Reads the maps of a census.

    :meth:`live` serves one thread, :meth:`retire` another, :meth:`counts` any.
    """

    def __init__(self, programs: LoadedPrograms, origin_ns: int, interval_ns: int) -> None:
        self._identities = programs.map("identities")
        self._identity_counts = programs.map("identity_counts")
        self._live, self._spilled = programs.map("live"), programs.map("live_spilled")
        self._origin_ns = origin_ns
        self._interval_ns = interval_ns
        self._cpus = possible_cpus()

    def counts(self, ts_ns: int) -> Counts:
        """What is counted now, labelled with a time: a few milliseconds."""
        raw_keys, raw_numbers = self._identities.read_all()
        numbers = raw_numbers.view(np.uint32).reshape(-1)
        keys = raw_keys.view(records.IDENTITY_KEY).reshape(-1)
        raw_counted, raw_counts = self._identity_counts.read_all()
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
        return Counts(ts_ns, numbers[ranked], keys[ranked], counts[ranked])

    def retire(self, keys: np.ndarray, numbers: npt.NDArray[np.uint32]) -> None:
        """Drop identities that nothing live belongs to; one that is seen again gets another number."""
        for key, number in zip(keys, numbers, strict=True):
            self._identities.delete(key.tobytes())
            self._identity_counts.delete(number.tobytes())

    @property
    def identity_room(self) -> int:
        """Most identities that there can be."""
        return self._identities.entries

    def live(self, ts_ns: int) -> Live:
        """The live objects of now, labelled with a time: some 50 ms.

        What it holds at once does not grow with the objects, dead or alive, nor with the time recorded: births are told
        by their window of that time (:func:`window_starts`).
        """
        now = (ts_ns - self._origin_ns) // self._interval_ns
        groups, sizes = np.empty(0, np.uint64), np.empty(0, np.int64)
        for objects in self._live_objects():
            births = np.maximum(objects["ts_ns"].astype(np.int64) - self._origin_ns, 0) // self._interval_ns
            mixed = objects["identity"].astype(np.uint64) << np.uint64(32) | births.astype(np.uint64)
            distinct, counted = np.unique(mixed, return_counts=True)
            windows = window_starts((distinct & _LOW).astype(np.int64), now).astype(np.uint64)
            groups = np.concatenate([groups, distinct >> _HALF << _HALF | windows])
            groups, group = np.unique(groups, return_inverse=True)
            sizes = np.bincount(group, np.concatenate([sizes, counted]), len(groups)).astype(np.int64)
        return Live(ts_ns, (groups >> _HALF).astype(np.uint32), (groups & _LOW).astype(np.int64), sizes)

    def _live_objects(self) -> Iterator[np.ndarray]:
        """Arrays of LIVE_OBJECT: those in the table, then those for which it had no slot."""
        for _, buckets in self._live.batches(BATCH_ENTRIES // records.LIVE_WAYS):
            slots = buckets.reshape(-1).view(records.LIVE_SLOT)
            yield slots["object"][(slots["word"] != 0) & (slots["word"] & records.SLOT_STATE == 0)]
        for _, values in self._spilled.batches(BATCH_ENTRIES):
            objects = values.reshape(-1).view(records.LIVE_OBJECT)
            yield objects[objects["ts_ns"] > 0]

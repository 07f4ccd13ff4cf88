"""What stands for the numbers that probes give to stacks, for as long as an event may name them.

Numbers are dense: a generation of them (2^16) is an array. When the next one has begun, no allocation names a number of
it any more; what frees may name later is kept, and the rest forgotten. So memory is bounded by what is live, however
many stacks come.
"""

from __future__ import annotations

import numpy as np

from leakscope.record.records import STACK_GENERATION_SHIFT

GENERATION = 1 << STACK_GENERATION_SHIFT
UNKNOWN = -1
_Which = np.ndarray | slice


class _Generation:
    """Ids and live objects of the numbers of one generation; `closed_ns` is 0 while these are given out."""

    def __init__(self) -> None:
        self.ids = np.full(GENERATION, UNKNOWN, np.int32)
        self.live = np.zeros(GENERATION, np.int32)
        self.closed_ns = 0


class Numbers:
    """Ids (int32, 0 or more) by number."""

    def __init__(self) -> None:
        self._generations: dict[int, _Generation] = {}
        # Of forgotten generations: what is live, in the order of numbers.
        self._kept = np.empty(0, np.int64)
        self._kept_ids = np.empty(0, np.int32)
        self._kept_live = np.empty(0, np.int64)

    def __len__(self) -> int:
        """Numbers that are kept: whole generations, and the live ones of those that were forgotten."""
        return len(self._generations) * GENERATION + len(self._kept)

    def put(self, number: int, new: int, ts_ns: int) -> None:
        """Let an id stand for a number that came at a time; the first of a generation closes those before it."""
        index = number >> STACK_GENERATION_SHIFT
        generation = self._generations.get(index)
        if generation is None:
            generation = self._generations[index] = _Generation()
            newest = max(self._generations)
            for other, older in self._generations.items():
                if other < newest and not older.closed_ns:
                    older.closed_ns = ts_ns
        generation.ids[number % GENERATION] = new

    def replace(self, number: int, new: int) -> None:
        """Let another id stand for a number, where it is not forgotten."""
        generation = self._generations.get(number >> STACK_GENERATION_SHIFT)
        if generation is not None:
            generation.ids[number % GENERATION] = new

    def ids(self, numbers: np.ndarray) -> np.ndarray:
        """int32 ids of int64 numbers from 0 on, :data:`UNKNOWN` for those that never came or are forgotten."""
        found = np.full(len(numbers), UNKNOWN, np.int32)
        for index, which in _by_generation(numbers):
            generation = self._generations.get(index)
            if generation is not None:
                found[which] = generation.ids[numbers[which] % GENERATION]
            elif len(self._kept):
                place = np.minimum(np.searchsorted(self._kept, numbers[which]), len(self._kept) - 1)
                found[which] = np.where(self._kept[place] == numbers[which], self._kept_ids[place], UNKNOWN)
        return found

    def count(self, numbers: np.ndarray, change: np.ndarray) -> None:
        """Count live objects by the number that their frees will name: +1 an allocation, -1 a free."""
        for index, which in _by_generation(numbers):
            generation = self._generations.get(index)
            if generation is not None:
                np.add.at(generation.live, numbers[which] % GENERATION, change[which].astype(np.int32))
            elif len(self._kept):
                place = np.minimum(np.searchsorted(self._kept, numbers[which]), len(self._kept) - 1)
                known = self._kept[place] == numbers[which]
                np.add.at(self._kept_live, place[known], change[which][known])

    def forget(self, before_ns: int) -> list[int]:
        """Give up the generations that were closed before a time, but for what is live, and what lives no more of older
        ones; their indices. Every allocation up to then has to be counted."""
        ended = sorted(index for index, of in self._generations.items() if 0 < of.closed_ns < before_ns)
        if not ended:
            return []
        numbers, ids, live = [self._kept], [self._kept_ids], [self._kept_live]
        for index in ended:
            generation = self._generations.pop(index)
            at = np.flatnonzero(generation.live > 0)
            numbers.append(at + index * GENERATION)
            ids.append(generation.ids[at])
            live.append(generation.live[at].astype(np.int64))
        lives = np.concatenate(live) > 0
        self._kept, self._kept_ids = np.concatenate(numbers)[lives], np.concatenate(ids)[lives]
        self._kept_live = np.concatenate(live)[lives]
        return ended


def _by_generation(numbers: np.ndarray) -> list[tuple[int, _Which]]:
    """(generation, which of the numbers are of it), each generation once."""
    if not len(numbers):
        return []
    generations = numbers >> STACK_GENERATION_SHIFT
    first, last = int(generations.min()), int(generations.max())
    if first == last:
        return [(first, slice(None))]
    return [(index, np.flatnonzero(generations == index)) for index in np.unique(generations).tolist()]

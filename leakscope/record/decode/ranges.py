"""The mappings of a process as ranges of addresses that can be cut."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

Stacks = tuple[int, ...]
"""Stacks of a call as probes gave them: user stack, caller, Python stack; and the number of its NVTX range."""


@dataclass(slots=True)
class Mapping:
    """One mapping as it was made. `left_bytes` is what of it is still mapped, in one piece or several."""

    ts_ns: int
    size_bytes: int
    requested_bytes: int
    function: int
    kind: int
    stacks: Stacks
    left_bytes: int


class Cut(NamedTuple):
    """A piece of a mapping that ended; `rest` says whether some of the mapping lives on."""

    addr: int
    size_bytes: int
    mapping: Mapping
    rest: bool


class Ranges:
    """Disjoint ranges [start, end) of one address space, each a piece of a mapping. Finding one takes O(log n)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[tuple[int, Mapping]] = []  # (end, mapping) of the range that begins at the same index

    def add(self, start: int, end: int, mapping: Mapping) -> None:
        """Add a range; what it overlaps has to be cut before."""
        at = bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._pieces.insert(at, (end, mapping))

    def cut(self, start: int, end: int, before_ns: int) -> list[Cut]:
        """End [start, end) of the mappings that were made before a time, in order of addresses."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._pieces[first][0] <= start:
            first += 1
        last = first
        cuts: list[Cut] = []
        kept: list[tuple[int, int, Mapping]] = []
        while last < len(self._starts) and self._starts[last] < end:
            begin, (stop, mapping) = self._starts[last], self._pieces[last]
            last += 1
            if mapping.ts_ns >= before_ns:
                kept.append((begin, stop, mapping))
                continue
            inside, outside = max(begin, start), min(stop, end)
            mapping.left_bytes -= outside - inside
            cuts.append(Cut(inside, outside - inside, mapping, mapping.left_bytes > 0))
            if begin < inside:
                kept.append((begin, inside, mapping))
            if outside < stop:
                kept.append((outside, stop, mapping))
        self._starts[first:last] = [begin for begin, _, _ in kept]
        self._pieces[first:last] = [(stop, mapping) for _, stop, mapping in kept]
        return cuts

    def end(self, before_ns: int) -> list[Cut]:
        """End everything that was made before a time."""
        return self.cut(0, 1 << 64, before_ns)

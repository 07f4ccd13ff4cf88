"""The mappings of a process as ranges of addresses that can be cut."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np


class Cut(NamedTuple):
    """A piece of a mapping that ended; `rest` says whether some of the mapping lives on."""

    addr: int
    size_bytes: int
    mapping: int
    rest: bool


class Ranges:
    """Disjoint ranges [start, stop) of one address space, each a piece of a mapping. Finding one takes O(log n).

    A mapping is a number; the times at which mappings were made stand in an array by that number.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.mappings: list[int] = []
        self.left_bytes: dict[int, int] = {}
        """Of mappings of which a part has ended: what is left, in one piece or several."""

    def add(self, start: int, stop: int, mapping: int) -> None:
        """Add a range; what it overlaps has to be cut before."""
        at = bisect_left(self.starts, start)
        self.starts.insert(at, start)
        self.stops.insert(at, stop)
        self.mappings.insert(at, mapping)

    def cut(self, start: int, stop: int, before_ns: int, made_ns: np.ndarray) -> list[Cut]:
        """End [start, stop) of the mappings that were made before a time, in order of addresses."""
        first = bisect_right(self.starts, start) - 1
        if first < 0 or self.stops[first] <= start:
            first += 1
        last = bisect_left(self.starts, stop, first)
        if first == last:
            return []
        cuts: list[Cut] = []
        kept: list[tuple[int, int, int]] = []
        for begin, end, mapping in zip(
            self.starts[first:last], self.stops[first:last], self.mappings[first:last], strict=True
        ):
            if made_ns[mapping] >= before_ns:
                kept.append((begin, end, mapping))
                continue
            inside, outside = max(begin, start), min(end, stop)
            cuts.append(Cut(inside, outside - inside, mapping, self._took(mapping, outside - inside, end - begin)))
            if begin < inside:
                kept.append((begin, inside, mapping))
            if outside < end:
                kept.append((outside, end, mapping))
        self.starts[first:last] = [piece[0] for piece in kept]
        self.stops[first:last] = [piece[1] for piece in kept]
        self.mappings[first:last] = [piece[2] for piece in kept]
        return cuts

    def _took(self, mapping: int, size_bytes: int, piece_bytes: int) -> bool:
        """Whether something of a mapping is left when so many bytes of one of its pieces end."""
        left = self.left_bytes.get(mapping, piece_bytes) - size_bytes  # one that was never cut is one piece
        if left:
            self.left_bytes[mapping] = left
        else:
            self.left_bytes.pop(mapping, None)
        return left > 0

"""What the probes know of paths: the map `unwound_paths`, a decision tree for each stack pointer and program counter.

Two callers of one function often have its frame at the same address. The lowest word in which their paths differ tells
them apart: it makes a branch, and its value a part of the tag under which the probe looks next (find_path in
bpf_programs/unwind.bpf.h).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from leakscope.record import records
from leakscope.record.kernel.bpf import Map
from leakscope.record.unwind.libdw import program_counter, saved_registers, stack_pointer
from leakscope.record.unwind.paths import Path, Way

MAX_KEYS = 4096
"""As many as the map has entries: the least recently used give way on both sides."""
MAX_PATHS = 32
_MASK = (1 << 64) - 1


class KnownPaths:
    """Tells the probes paths. One that was evicted comes back with the next dump that takes it."""

    def __init__(self, paths_map: Map) -> None:
        self._map = paths_map
        self._leaves: OrderedDict[tuple[int, int, int], OrderedDict[Way, np.void]] = OrderedDict()

    def add(self, path: Path, dump: np.void) -> None:
        """Make known that the dump's id stands for all that take its path from its stack pointer on.

        Not a path that may be unwound further another time, when a file is known, or that has too many words.
        """
        if len(path.places) > records.PATH_WORDS or not (path.complete or path.cut):
            return
        registers = dump["registers"].tolist()
        key = int(dump["pid"]), stack_pointer(registers), program_counter(registers)
        leaves = self._leaves.setdefault(key, OrderedDict())
        self._leaves.move_to_end(key)
        leaves[path.way] = leaf_of(path, dump)
        leaves.move_to_end(path.way)
        if len(leaves) > MAX_PATHS:
            leaves.popitem(last=False)
        if len(self._leaves) > MAX_KEYS:
            self._leaves.popitem(last=False)
        entry = np.zeros((), records.PATH_KEY)
        entry["pid"], entry["sp"], entry["ip"] = key
        for tag, value in tree(list(leaves.values())):
            entry["tag"] = tag
            self._map.update(entry.tobytes(), value.tobytes())


def leaf_of(path: Path, dump: np.void) -> np.void:
    """A dump's path as UNWOUND_PATH: the words as they stand on its stack."""
    registers = dump["registers"].tolist()
    saved, count = saved_registers(), len(path.places)
    leaf = np.zeros(1, records.UNWOUND_PATH)
    leaf["id"], leaf["words"] = dump["id"], count
    leaf["checked_registers"] = sum(1 << (place - saved.start) for place in path.registers.tolist())
    leaf["registers"][0, : saved.stop - saved.start] = registers[saved]
    leaf["values"][0, :count] = path.values + np.where(path.relative, np.uint64(stack_pointer(registers)), np.uint64(0))
    leaf["places"][0, :count] = 8 * path.places
    return leaf[0]


def tree(leaves: Sequence[np.void], tag: int = 0, depth: int = 0) -> Iterator[tuple[int, np.void]]:
    """(tag, UNWOUND_PATH) of leaves and of branches that tell them apart; of leaves that no word does, the newest."""
    words = [
        dict(zip(leaf["places"][: leaf["words"]].tolist(), leaf["values"].tolist(), strict=False)) for leaf in leaves
    ]
    common = sorted(set.intersection(*(set(own) for own in words)))
    place = next((place for place in common if len({own[place] for own in words}) > 1), None)
    if place is None or depth == records.PATH_BRANCHES - 1:
        yield tag, leaves[-1]
        return
    branch = np.zeros(1, records.UNWOUND_PATH)
    branch["words"], branch["places"][0, 0] = records.PATH_BRANCH, place
    yield tag, branch[0]
    for value in dict.fromkeys(own[place] for own in words):
        below = [leaf for leaf, own in zip(leaves, words, strict=True) if own[place] == value]
        yield from tree(below, mixed(tag, value) & 0xFFFFFFFF, depth + 1)


def mixed(place: int, value: int) -> int:
    """As in bpf_programs/unwind.bpf.h."""
    mix = (place ^ value * 0x9E3779B97F4A7C15 & _MASK) * 0xC2B2AE3D27D4EB4F & _MASK
    return mix ^ mix >> 29

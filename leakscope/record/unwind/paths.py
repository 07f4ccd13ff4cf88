"""Paths: what decided how a dump was unwound, so that dumps of the same path need not be unwound again.

An unwinder computes each frame from the program counter and from words of the stack. What it reads are return addresses
and saved registers, and of the latter only those that point into the stack can have become the address of a frame. Two
dumps with the same program counter, the same return addresses and the same such pointers (relative to the stack
pointer), at the same places, are therefore unwound to the same stack. Other words do not matter, except where the
unwinder gave up: there any of those that it read may be the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from leakscope.record import records
from leakscope.record.unwind.libdw import program_counter, saved_registers, stack_pointer

Way = tuple[tuple[int, ...], bytes, bytes]

STACK_REACH = 1 << 20
"""Bytes above the stack pointer up to which a word counts as a pointer into the stack."""


@dataclass(frozen=True)
class Path:
    """One way to a program counter; `pcs` innermost first.

    `complete`: the outermost frame is where the thread began; `cut`: the stack goes on beyond the dump.
    """

    pcs: tuple[int, ...]
    complete: bool
    cut: bool
    bytes: int  # of the dump
    places: np.ndarray  # int64: words above the stack pointer
    values: np.ndarray  # uint64, of pointers into the stack the distance from the stack pointer
    relative: np.ndarray  # bool: which are such pointers
    registers: np.ndarray  # int64: places in struct pt_regs of registers that are such pointers
    register_values: np.ndarray  # uint64, relative

    @classmethod
    def of(
        cls,
        dump: np.void,
        words: Mapping[int, int],
        is_code: Callable[[int], bool],
        pcs: Sequence[int],
        *,
        complete: bool,
        cut: bool,
    ) -> Path:
        """The path of a DUMP_RECORD; `words` are those that were read while it was unwound, by address."""
        registers = dump["registers"].tolist()
        sp = stack_pointer(registers)
        chosen = [
            ((address - sp) // 8, value, sp <= value < sp + STACK_REACH) for address, value in sorted(words.items())
        ]
        if complete:
            chosen = [word for word in chosen if word[2] or is_code(word[1])]
        saved = range(*saved_registers().indices(len(registers)))
        own = [place for place in saved if sp <= registers[place] < sp + STACK_REACH]
        return cls(
            tuple(pcs),
            complete,
            cut,
            int(dump["bytes"]),
            np.array([place for place, _, _ in chosen], np.int64),
            np.array([value - sp if points else value for _, value, points in chosen], np.uint64),
            np.array([points for _, _, points in chosen], bool),
            np.array(own, np.int64),
            np.array([registers[place] - sp for place in own], np.uint64),
        )

    def matches(self, dumps: np.ndarray) -> np.ndarray:
        """bool: which of several DUMP_RECORDs at the same program counter took this path."""
        registers = dumps["registers"]
        sp = registers[:, stack_pointer_place()]
        found = dumps["bytes"] >= 8 * (int(self.places[-1]) + 1 if len(self.places) else 0)
        if not self.complete:  # a larger dump may reach further
            found &= dumps["bytes"] == self.bytes
        for place, value in zip(self.registers.tolist(), self.register_values, strict=True):
            found &= registers[:, place] - sp == value
        expected = self.values + np.where(self.relative, sp[:, None], np.uint64(0))
        found &= (dumps["stack"][:, self.places] == expected).all(axis=1)
        return np.asarray(found)

    @property
    def way(self) -> Way:
        """Its program counters, and where on the stack the return addresses stand (with saved pointers to code)."""
        code = ~self.relative
        return self.pcs, self.places[code].tobytes(), self.values[code].tobytes()

    def generalised(self, other: Path) -> Path | None:
        """What two paths have in common, if they are one: its words alone matter. None if they are not.

        With all return addresses at the same places all frames are. The rules by which a frame was found are those of
        its program counter, so they took the same words in both; a word that differs was not among them.
        """
        if not (self.complete and other.complete) or self.way != other.way:
            return None
        theirs = dict(zip(other.places.tolist(), other.values.tolist(), strict=True))
        same = np.array(
            [theirs.get(p) == v for p, v in zip(self.places.tolist(), self.values.tolist(), strict=True)], bool
        )
        registers = dict(zip(other.registers.tolist(), other.register_values.tolist(), strict=True))
        own = zip(self.registers.tolist(), self.register_values.tolist(), strict=True)
        same_registers = np.array([registers.get(place) == value for place, value in own], bool)
        return replace(
            self,
            places=self.places[same],
            values=self.values[same],
            relative=self.relative[same],
            registers=self.registers[same_registers],
            register_values=self.register_values[same_registers],
        )


def stack_pointer_place() -> int:
    """The place of the stack pointer in struct pt_regs."""
    return stack_pointer(range(records.DUMP_REGISTERS))


def program_counter_place() -> int:
    """The place of the program counter in struct pt_regs."""
    return program_counter(range(records.DUMP_REGISTERS))


def restore_returns(dumps: np.ndarray) -> None:
    """Put the return addresses back, in place, that probes of returns replaced on the stack."""
    sp = dumps["registers"][:, stack_pointer_place()]
    rows = np.arange(len(dumps))
    for call in range(records.OPEN_RETURNS):
        at, caller = dumps["open"]["sp"][:, call], dumps["open"]["caller"][:, call]
        place = (at - sp) // np.uint64(8)
        inside = (at >= sp) & (place < dumps["bytes"] // 8)
        dumps["stack"][rows[inside], place[inside].astype(np.int64)] = caller[inside]

"""Numbers of stacks, as the probes give them, → stack ids.

A stack is resolved when it comes, while its process is known, and its addresses are not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from leakscope.model.recording import Loss
from leakscope.record.clocks import monotonic_ns
from leakscope.record.records import (
    OP_ALLOC,
    STACK_BESIDE_DUMP,
    STACK_DUMP_BIT,
    STACK_GENERATION_SHIFT,
    STACK_HEADER,
    STACK_KERNEL,
)
from leakscope.record.symbols.address_space import AddressSpace, AddressSpaces
from leakscope.record.symbols.interner import Interner
from leakscope.record.symbols.numbers import UNKNOWN, Numbers


class StackNumbers:
    """Stack ids of kernel, user and Python stacks by number. For one thread, but for :meth:`losses`."""

    def __init__(self, interner: Interner, spaces: AddressSpaces) -> None:
        self._interner = interner
        self._spaces = spaces
        self._walked = Numbers()
        self._python = Numbers()
        self._addresses: dict[int, dict[int, Sequence[int]]] = {}  # by generation, of walks that dumps name
        self.unwound: dict[int, tuple[int, int]] = {}
        """By the id of a stack dump: its stack, and the number of the stack by frame pointers where that is 0."""
        self.missing = 0
        """Numbers whose stack never came."""

    def __len__(self) -> int:
        """Numbers that are kept."""
        return len(self._walked) + len(self._python)

    def take(self, records: Iterable[bytes]) -> None:
        """Resolve stacks (stack_record of records.h)."""
        now = monotonic_ns()
        for record in records:
            made_ns, caller, number, pid, kind, depth = STACK_HEADER.unpack_from(record)
            addresses = memoryview(record)[STACK_HEADER.size :].cast("Q")[:depth].tolist()
            if kind == STACK_KERNEL:
                stack = self._interner.kernel_stack(addresses)
            else:
                space = self._spaces.at(pid, made_ns)
                addresses = with_caller(space, addresses, caller)
                stack = self._interner.native_stack(pid, space, addresses)
                if kind == STACK_BESIDE_DUMP:
                    self._addresses.setdefault(number >> STACK_GENERATION_SHIFT, {})[number] = addresses
            self._walked.put(number, stack, now)

    def stacks(self, numbers: np.ndarray) -> np.ndarray:
        """int32 stack ids of int32 numbers; 0 for those below 0 (none was taken) and those whose stack never came."""
        found = np.zeros(len(numbers), np.int32)
        own = np.flatnonzero(numbers >= 0)
        named = numbers[own].astype(np.int64)
        dumped = named >= STACK_DUMP_BIT
        if dumped.any():
            distinct, group = np.unique(named[dumped], return_inverse=True)
            found[own[dumped]] = np.array([self._of_dump(number) for number in distinct.tolist()], np.int32)[group]
            own, named = own[~dumped], named[~dumped]
        ids = self._walked.ids(named)
        unknown = ids == UNKNOWN
        if unknown.any():
            lost = np.unique(named[unknown])
            self.missing += len(lost)
            for number in lost.tolist():
                self._walked.replace(number, 0)
            ids[unknown] = 0
        found[own] = ids
        return found

    def _of_dump(self, number: int) -> int:
        dump = number & ~STACK_DUMP_BIT
        stack, by_frame_pointers = self.unwound.get(dump, (0, -1))
        if not stack and by_frame_pointers >= 0:  # once: the free may come when that number is forgotten
            stack = int(self.stacks(np.array([by_frame_pointers], np.int64))[0])
            self.unwound[dump] = stack, -1
        return stack

    def python_stacks(self, numbers: np.ndarray) -> np.ndarray:
        """int32 stack ids of uint32 numbers of Python stacks; 0 for 0 and for those without names."""
        found = np.zeros(len(numbers), np.int32)
        own = np.flatnonzero(numbers)
        if not len(own):
            return found
        named = numbers[own].astype(np.int64)
        ids = self._python.ids(named)
        unknown = np.flatnonzero(ids == UNKNOWN)
        if len(unknown):
            distinct, group = np.unique(named[unknown], return_inverse=True)
            new = np.zeros(len(distinct), np.int32)
            for i, number in enumerate(distinct.tolist()):
                stack = self._interner.python_stack(number)
                if stack is not None:
                    self._python.put(number, stack, monotonic_ns())
                    new[i] = stack
            ids[unknown] = new[group]
        found[own] = ids
        return found

    def count(self, batch: np.ndarray) -> None:
        """Count what lives by the stacks that its free will name: a batch of MEM_RECORD."""
        change = np.where(batch["op"] == OP_ALLOC, 1, -1)
        for name in ("kernel_stack", "user_stack"):
            own = np.flatnonzero((batch[name] >= 0) & (batch[name] < STACK_DUMP_BIT))
            self._walked.count(batch[name][own].astype(np.int64), change[own])
        own = np.flatnonzero(batch["python_stack"])
        self._python.count(batch["python_stack"][own].astype(np.int64), change[own])

    def count_calls(self, batch: np.ndarray, change: int) -> None:
        """The same of a batch of CALL_RECORD, all of them allocations (1) or frees (-1)."""
        own = batch["user_stack"][(batch["user_stack"] >= 0) & (batch["user_stack"] < STACK_DUMP_BIT)]
        self._walked.count(own.astype(np.int64), np.full(len(own), change))
        own = batch["python_stack"][batch["python_stack"] > 0]
        self._python.count(own.astype(np.int64), np.full(len(own), change))

    def forget(self, before_ns: int) -> None:
        """Give up what only events before a time could ask for: all that was allocated until then is counted."""
        for index in self._walked.forget(before_ns):
            self._addresses.pop(index, None)
        self._python.forget(before_ns)

    def walked(self, number: int) -> Sequence[int]:
        """Program counters of a walk by frame pointers that a dump names, innermost first; empty when it is gone."""
        return self._addresses.get(number >> STACK_GENERATION_SHIFT, {}).get(number, ()) if number >= 0 else ()

    def equate(self, number: int, stack: int) -> None:
        """Let a walk by frame pointers stand for a stack that is known otherwise."""
        if number >= 0:
            self._walked.replace(number, stack)

    def losses(self) -> list[Loss]:
        """Stacks that events name and that never came."""
        return [Loss("stacks", "stack_miss", self.missing, "stacks gone when read")] if self.missing else []


def with_caller(space: AddressSpace, addresses: list[int], caller: int) -> list[int]:
    """A walk of user code, with `caller` behind its innermost frame when that is code.

    A frame-pointer walk that starts in a function without a frame (a system-call stub, any function at its entry) skips
    that function's caller; the word at the stack pointer is its return address.
    """
    if addresses and caller and caller not in addresses[:2] and space.find(caller):
        return [addresses[0], caller, *addresses[1:]]
    return addresses

"""What one hit of a uprobe costs on this host, emulated and single-stepped: measured, not remembered.

A file in memory holds a loop that calls a function of a few bytes. An empty program is attached to that function's
first instruction, and the loop is timed with and without. Some 10 ms an instruction; x86-64 alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from leakscope.record.capabilities import trials
from leakscope.record.kernel import bpf

# Each begins with the instruction in question, undoes what it did, and returns.
STUBS: dict[str, bytes] = {
    name: bytes.fromhex(code)
    for name, code in {
        "push": "55 5d c3",  # push %rbp; pop %rbp; ret
        "nop": "90 c3",
        "long nop": "0f1f00 c3",
        "endbr64": "f30f1efa c3",
        "sub": "4883ec08 4883c408 c3",  # sub $8,%rsp; add $8,%rsp; ret
        "mov": "4889f8 c3",  # mov %rdi,%rax; ret
        "xor": "31c0 c3",  # xor %eax,%eax; ret
    }.items()
}
"""Machine code by class of instruction (:mod:`leakscope.record.probes.entry_points`)."""

_STUB_OFFSET = 64
# push %rbx; mov %edi,%ebx; again: call STUB; dec %ebx; jnz again; pop %rbx; ret
_LOOP = bytes.fromhex("53 89fb") + b"\xe8" + (_STUB_OFFSET - 8).to_bytes(4, "little") + bytes.fromhex("ffcb 75f7 5b c3")
_CALLS = 300
_ROUNDS = 3


@cache
def hit_ns(instruction: str) -> float | None:
    """Nanoseconds that a uprobe with an empty program adds to a call of a function which begins so.

    None where it cannot be measured: another machine, an instruction without a stub, a host that lets nobody execute a
    file in memory or lacks uprobe_multi (Linux 6.6).
    """
    stub = STUBS.get(instruction)
    if stub is None or platform.machine() != "x86_64":
        return None
    try:
        return _measure(stub)
    except OSError:
        return None


def _measure(stub: bytes) -> float:
    file = os.memfd_create("leakscope-price", os.MFD_CLOEXEC)
    program = link = -1
    try:
        os.write(file, _LOOP.ljust(_STUB_OFFSET, b"\xcc") + stub)
        os.ftruncate(file, mmap.PAGESIZE)
        # Not writable: breakpoints go into private mappings of code alone (valid_vma, kernel/events/uprobes.c).
        with mmap.mmap(file, mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC) as place:
            page = np.frombuffer(place, np.uint8)
            loop = ctypes.CFUNCTYPE(None, ctypes.c_int)(page.ctypes.data)
            before = _fastest(loop)
            program = trials.load_uprobe_program()
            link = bpf.link_uprobe_multi(program, f"/proc/self/fd/{file}", [_STUB_OFFSET], [0], at_return=False)
            after = _fastest(loop)
            del page  # the mapping cannot be closed while it is referred to
        return max(0.0, (after - before) / _CALLS)
    finally:
        # Ending the link waits for RCU, tens of milliseconds in which nothing else has to wait.
        descriptors = [descriptor for descriptor in (link, program, file) if descriptor >= 0]
        threading.Thread(target=lambda: list(map(os.close, descriptors)), name="leakscope-price").start()


def _fastest(loop: Callable[[int], None]) -> int:
    """The shortest time of a round of calls in nanoseconds: what disturbs only ever adds."""
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter_ns()
        loop(_CALLS)
        times.append(time.perf_counter_ns() - began)
    return min(times)


@dataclass(frozen=True)
class Price:
    """What a hit costs at an entry that is single-stepped and at one that is emulated, in nanoseconds."""

    stepped_ns: float
    emulated_ns: float

    def text(self) -> str:
        """``9.8 µs a call instead of 0.7 µs``."""
        return f"{self.stepped_ns / 1e3:.1f} µs a call instead of {self.emulated_ns / 1e3:.1f} µs"


_NOTICEABLE = 3.0


def price_of_stepping(instruction: str) -> Price | None:
    """The measured price of an entry of this class. None where it cannot be measured.

    A class that this kernel turns out to emulate after all has nearly the same price twice: see :func:`is_stepped`.
    """
    stepped, emulated = hit_ns(instruction if instruction in STUBS else "xor"), hit_ns("push")
    return None if stepped is None or emulated is None else Price(stepped, emulated)


def is_stepped(price: Price | None) -> bool:
    """Whether this kernel really single-steps, by its price; where that is not known it is taken to."""
    return price is None or price.stepped_ns > _NOTICEABLE * price.emulated_ns

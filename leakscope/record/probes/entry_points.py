"""Where in a function a uprobe costs least, from the function's first instruction.

A uprobe replaces an instruction by a breakpoint. What stood there is then emulated by the kernel, in a fraction of a
microsecond, or else executed out of line under single-stepping, which takes a second exception: some 10 µs on a
virtual machine. Emulated are, by arch/x86/kernel/uprobes.c, ``nop``, ``jmp``, ``call`` and ``jcc`` (relative ones:
branch_setup_xol_ops, v3.16) and ``push`` of a register (push_setup_xol_ops, v4.16, e7ed9d9bd037), in v6.18 longer nops,
by arch/arm64/kernel/probes/decode-insn.c branches and ``adr``, since v6.13 ``nop`` (ac4ad5c09b34).

A function built for indirect branch tracking begins with ``endbr64`` (arm64: ``bti c``), which is stepped. The probe
goes behind it where the next instruction is emulated: nothing is pushed yet, so arguments and return address stand
where they do at the first byte.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

LONGEST_ENTRY_BYTES = 16
"""As much of a function as :func:`entry_point` looks at: a landing pad and the longest instruction that it knows."""

_ENDBR64 = bytes.fromhex("f30f1efa")
_BTI = frozenset({0xD503245F, 0xD50324DF})  # bti c, bti jc


@dataclass(frozen=True)
class EntryPoint:
    """Where to attach to a function.

    `skipped_bytes` is how far behind its first byte. `instruction` names what stands there: a class of
    :data:`leakscope.record.probes.uprobe_price.STUBS` or "other". `emulated` says that every kernel with uprobe_multi
    emulates it.
    """

    skipped_bytes: int
    instruction: str
    emulated: bool


def entry_point(code: bytes, machine: str = "") -> EntryPoint:
    """Where to attach to the function that begins with `code`; at its first byte wherever that is in doubt.

    :param code: its first bytes, :data:`LONGEST_ENTRY_BYTES` or as many as there are.
    :param machine: as uname(2) tells it; default: this one's. Of others than x86_64 and aarch64 nothing is known.
    """
    classify, pad = {"x86_64": (_x86, _is_endbr64), "aarch64": (_arm64, _is_bti)}.get(
        machine or platform.machine(), (_unknown, _no_pad)
    )
    if pad(code):
        behind = classify(code[4:])
        if behind in EMULATED:
            return EntryPoint(4, behind, True)
        return EntryPoint(0, "endbr64", False)
    found = classify(code)
    return EntryPoint(0, found, found in EMULATED)


EMULATED = frozenset({"push", "nop", "jmp", "call", "jcc", "branch", "adr"})
"""Classes of instructions that the kernel emulates."""


def _is_endbr64(code: bytes) -> bool:
    return code[:4] == _ENDBR64


def _is_bti(code: bytes) -> bool:
    return int.from_bytes(code[:4], "little") in _BTI


def _no_pad(code: bytes) -> bool:
    return False


def _unknown(code: bytes) -> str:
    return "other"


def _x86(code: bytes) -> str:
    """The class of an x86-64 instruction."""
    first, second = (*code[:2], 0, 0)[:2]
    if 0x50 <= first <= 0x57 or (first == 0x41 and 0x50 <= second <= 0x57):
        return "push"
    if first == 0x90 or (first == 0x66 and second == 0x90):
        return "nop"
    if first in (0xEB, 0xE9):
        return "jmp"
    if first == 0xE8:
        return "call"
    if 0x70 <= first <= 0x7F or (first == 0x0F and 0x80 <= second <= 0x8F):
        return "jcc"
    return next((name for name, beginnings in _STEPPED_X86.items() if code.startswith(beginnings)), "other")


# Beginnings: prefix, opcode, and the ModRM byte where that is part of what the instruction is.
_STEPPED_X86: dict[str, tuple[bytes, ...]] = {
    "long nop": tuple(map(bytes.fromhex, ("0f1f", "660f1f"))),
    "sub": tuple(map(bytes.fromhex, ("4883ec", "4881ec"))),  # sub $n,%rsp
    "mov": tuple(bytes((rex, opcode)) for rex in (0x48, 0x49, 0x4C, 0x4D) for opcode in (0x89, 0x8B)),
    "xor": tuple(map(bytes.fromhex, ("31", "33"))),
}


def _arm64(code: bytes) -> str:
    """The class of an AArch64 instruction (encodings: Arm ARM, C4.1)."""
    word = int.from_bytes(code[:4], "little")
    if len(code) < 4:
        return "other"
    if word >> 26 in (0b000101, 0b100101) or word >> 25 in (0b0101010, 0b0011010, 0b1011010, 0b0011011, 0b1011011):
        return "branch"  # b, bl; b.cond, cbz and cbnz, tbz and tbnz
    if word & 0x1F000000 == 0x10000000:
        return "adr"  # adr, adrp
    return "other"  # nop too: emulated since v6.13 alone

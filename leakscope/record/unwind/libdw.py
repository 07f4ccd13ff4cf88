"""libdw.so.1 through ctypes: unwinding a copied stack with the call frame information of the mapped files.

Functions and callbacks as in elfutils/libdwfl.h (since 0.158; dwfl_report_elf with `add_p_vaddr` since 0.156).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

MAX_FRAMES = 127

_ADDRESS = ctypes.c_uint64
_POINTER = ctypes.c_void_p
_OK, _ABORT = 0, 1  # DWARF_CB_OK, DWARF_CB_ABORT

_NEXT_THREAD = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, ctypes.POINTER(_POINTER))
_GET_THREAD = ctypes.CFUNCTYPE(ctypes.c_bool, _POINTER, ctypes.c_int, _POINTER, ctypes.POINTER(_POINTER))
_MEMORY_READ = ctypes.CFUNCTYPE(ctypes.c_bool, _POINTER, _ADDRESS, ctypes.POINTER(_ADDRESS), _POINTER)
_SET_REGISTERS = ctypes.CFUNCTYPE(ctypes.c_bool, _POINTER, _POINTER)
_FIND_DEBUGINFO = ctypes.CFUNCTYPE(
    *(ctypes.c_int, _POINTER, _POINTER, ctypes.c_char_p, _ADDRESS, ctypes.c_char_p, ctypes.c_char_p),
    *(ctypes.c_uint32, _POINTER),
)
_FRAME = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)


class _Callbacks(ctypes.Structure):  # Dwfl_Callbacks
    _fields_ = [
        ("find_elf", _POINTER),
        ("find_debuginfo", _FIND_DEBUGINFO),
        ("section_address", _POINTER),
        ("debuginfo_path", _POINTER),
    ]


class _ThreadCallbacks(ctypes.Structure):  # Dwfl_Thread_Callbacks
    _fields_ = [
        ("next_thread", _NEXT_THREAD),
        ("get_thread", _GET_THREAD),
        ("memory_read", _MEMORY_READ),
        ("set_initial_registers", _SET_REGISTERS),
        ("detach", _POINTER),
        ("thread_detach", _POINTER),
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "dwfl_begin": (_POINTER, [ctypes.POINTER(_Callbacks)]),
    "dwfl_end": (None, [_POINTER]),
    "dwfl_version": (ctypes.c_char_p, [_POINTER]),
    "dwfl_errmsg": (ctypes.c_char_p, [ctypes.c_int]),
    "dwfl_report_begin_add": (None, [_POINTER]),
    "dwfl_report_elf": (
        _POINTER,
        [_POINTER, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, _ADDRESS, ctypes.c_bool],
    ),
    "dwfl_report_end": (ctypes.c_int, [_POINTER, _POINTER, _POINTER]),
    "dwfl_attach_state": (
        ctypes.c_bool,
        [_POINTER, _POINTER, ctypes.c_int, ctypes.POINTER(_ThreadCallbacks), _POINTER],
    ),
    "dwfl_getthread_frames": (ctypes.c_int, [_POINTER, ctypes.c_int, _FRAME, _POINTER]),
    "dwfl_frame_pc": (ctypes.c_bool, [_POINTER, ctypes.POINTER(_ADDRESS), ctypes.POINTER(ctypes.c_bool)]),
    "dwfl_thread_state_registers": (ctypes.c_bool, [_POINTER, ctypes.c_int, ctypes.c_uint, _POINTER]),
    "dwfl_thread_state_register_pc": (None, [_POINTER, _ADDRESS]),
}


class LibdwUnavailableError(Exception):
    """libdw.so.1 cannot be used here; the text says why."""


@cache
def libdw() -> Any:
    """The library with argument types; raises LibdwUnavailableError."""
    if platform.machine() not in _DWARF_ORDER:
        raise LibdwUnavailableError(f"stacks of {platform.machine()} cannot be unwound")
    try:
        library = ctypes.CDLL("libdw.so.1")
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LibdwUnavailableError(str(error)) from error
    return library


def version() -> str:
    """elfutils' version; raises LibdwUnavailableError."""
    return str(libdw().dwfl_version(None).decode())


# DWARF register numbers by place in struct pt_regs (arch/x86/include/asm/ptrace.h; System V ABI AMD64, figure 3.36;
# DWARF for the Arm 64-bit architecture: x0-x30, sp). The program counter is set apart.
_DWARF_ORDER = {
    "x86_64": (10, 12, 11, 5, 13, 14, 4, 19, 9, 8, 7, 6, 3, 2, 1, 0, 16),
    "aarch64": tuple(range(32)),
}
_PC = {"x86_64": 16, "aarch64": 32}
_SP = {"x86_64": 19, "aarch64": 31}
# REG_SAVED_OFFSET and REG_SAVED_COUNT of bpf_programs/compat.h.
_SAVED = {"x86_64": slice(0, 6), "aarch64": slice(19, 30)}


def program_counter(registers: Sequence[int]) -> int:
    """Of registers as struct pt_regs has them."""
    return registers[_PC[platform.machine()]]


def stack_pointer(registers: Sequence[int]) -> int:
    """Of registers as struct pt_regs has them."""
    return registers[_SP[platform.machine()]]


def saved_registers() -> slice:
    """The places in struct pt_regs of the registers that a call preserves."""
    return _SAVED[platform.machine()]


ReadWord = Callable[[int], int | None]
"""Address → the 64-bit word there, None where it is not known."""


class Dwfl:
    """The modules of one address space. Not for several threads at once; `close()` gives its files back."""

    def __init__(self) -> None:
        self._lib = libdw()
        # No search for separate debug files, on disk or on servers: .eh_frame suffices.
        self._callbacks = _Callbacks(None, _FIND_DEBUGINFO(lambda *arguments: -1), None, None)
        self._handle = self._lib.dwfl_begin(ctypes.byref(self._callbacks))
        if not self._handle:
            raise LibdwUnavailableError(self._message())
        self._attached = False
        self._read: ReadWord = lambda address: None
        self._registers: Sequence[int] = ()
        self._pcs: list[int] = []
        self._is_code: Callable[[int], bool] = lambda address: True
        # Kept here: libdw calls them later.
        self._threads = _ThreadCallbacks(
            _NEXT_THREAD(lambda dwfl, argument, place: 0),
            _GET_THREAD(lambda dwfl, tid, argument, place: True),
            _MEMORY_READ(self._memory_read),
            _SET_REGISTERS(self._set_registers),
            None,
            None,
        )
        self._on_frame = _FRAME(self._frame)
        self._pc = _ADDRESS()
        self._activation = ctypes.c_bool()

    def _message(self) -> str:
        return (self._lib.dwfl_errmsg(-1) or b"unknown error").decode(errors="replace")

    def report(self, files: Sequence[tuple[str, int]]) -> list[str]:
        """Add mapped files, as (path, what to add to the file's addresses); those that libdw does not take."""
        refused = []
        self._lib.dwfl_report_begin_add(self._handle)
        for path, bias in files:
            name = os.fsencode(path)
            if not self._lib.dwfl_report_elf(self._handle, name, name, -1, bias, True):
                refused.append(path)
        self._lib.dwfl_report_end(self._handle, None, None)
        return refused

    def unwind(
        self, registers: Sequence[int], read: ReadWord, is_code: Callable[[int], bool]
    ) -> tuple[list[int], bool]:
        """Program counters, innermost first (return addresses but for the first), and whether the stack ended there.

        `registers` as in struct pt_regs. Ends before an address that is no code, and at :data:`MAX_FRAMES`.
        """
        self._registers, self._read, self._is_code, self._pcs = registers, read, is_code, []
        if not self._attached:
            if not self._lib.dwfl_attach_state(self._handle, None, 1, ctypes.byref(self._threads), None):
                return [], False
            self._attached = True
        ended = self._lib.dwfl_getthread_frames(self._handle, 1, self._on_frame, None)
        return self._pcs, ended == 0

    def _memory_read(self, dwfl: int, address: int, result: Any, argument: int) -> bool:
        word = self._read(address)
        if word is None:
            return False
        result[0] = word
        return True

    def _set_registers(self, thread: int, argument: int) -> bool:
        machine = platform.machine()
        order = _DWARF_ORDER[machine]
        values = (ctypes.c_uint64 * len(order))(*(self._registers[place] for place in order))
        self._lib.dwfl_thread_state_register_pc(thread, self._registers[_PC[machine]])
        return bool(self._lib.dwfl_thread_state_registers(thread, 0, len(order), values))

    def _frame(self, state: int, argument: int) -> int:
        if not self._lib.dwfl_frame_pc(state, ctypes.byref(self._pc), ctypes.byref(self._activation)):
            return _ABORT
        pc = self._pc.value
        if not self._is_code(pc) or len(self._pcs) == MAX_FRAMES:
            return _ABORT
        self._pcs.append(pc)
        return _OK

    def close(self) -> None:
        """Give everything back; safe to call twice."""
        if self._handle:
            self._lib.dwfl_end(self._handle)
            self._handle = None

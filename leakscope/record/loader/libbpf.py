"""libbpf.so.1 with argument types, and what it says made into one line.

Facts from libbpf's src/libbpf.h and libbpf.c (v1.1): a verifier's log comes in one message between the markers
BEGIN and END PROG LOAD LOG, the refusal of a map in one that begins with ``map 'NAME':``.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import threading
from functools import cache
from typing import Any

from leakscope.errors import NotCapableError

_PRINTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_WARN = 0
_LONGEST_MESSAGE_BYTES = 17 << 20
"""A verifier's log of 16 MiB, the most that the kernel gives, with what libbpf puts around it."""
_MESSAGES_KEPT = 64
_LONG_CALLS = frozenset({"bpf_object__open_file", "bpf_object__load", "bpf_object__close"})
_VERIFIER_LINES = 3

_PROGRAM_LOG = re.compile(r"prog '(?P<name>\w+)': -- BEGIN PROG LOAD LOG --\n(?P<log>.*?)-- END PROG LOAD LOG --", re.S)
_PROGRAM = re.compile(r"prog '(?P<name>\w+)'")
_MAP = re.compile(r"map '(?P<name>[\w.]+)': failed to create")
_VERIFIER_STATISTICS = re.compile(
    r"(processed \d+ insns|verification time|stack depth|max_states|peak_states|mark_read)"
)


class Libbpf:
    """The library. What it prints is kept for the message of a refusal. NotCapableError where it is missing."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libbpf.so.1", use_errno=True)
        except OSError as error:
            raise NotCapableError(
                "libbpf.so.1 is not installed; install it (Debian/Ubuntu: apt-get install libbpf1; "
                "Fedora/RHEL: dnf install libbpf)"
            ) from error
        pointer, text, integer = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "bpf_object__open_file": (pointer, [text, pointer]),
            "bpf_object__load": (integer, [pointer]),
            "bpf_object__close": (None, [pointer]),
            "bpf_object__find_map_by_name": (pointer, [pointer, text]),
            "bpf_object__find_program_by_name": (pointer, [pointer, text]),
            "bpf_object__next_map": (pointer, [pointer, pointer]),
            "bpf_object__next_program": (pointer, [pointer, pointer]),
            "bpf_map__set_max_entries": (integer, [pointer, ctypes.c_uint32]),
            "bpf_map__initial_value": (pointer, [pointer, ctypes.POINTER(ctypes.c_size_t)]),
            "bpf_map__fd": (integer, [pointer]),
            "bpf_map__name": (text, [pointer]),
            "bpf_map__type": (integer, [pointer]),
            "bpf_map__key_size": (ctypes.c_uint32, [pointer]),
            "bpf_map__value_size": (ctypes.c_uint32, [pointer]),
            "bpf_map__max_entries": (ctypes.c_uint32, [pointer]),
            "bpf_map__map_flags": (ctypes.c_uint32, [pointer]),
            "bpf_map__reuse_fd": (integer, [pointer, integer]),
            "bpf_program__fd": (integer, [pointer]),
            "bpf_program__name": (text, [pointer]),
            "bpf_program__set_autoload": (integer, [pointer, ctypes.c_bool]),
            "bpf_program__set_expected_attach_type": (integer, [pointer, integer]),
            "libbpf_set_print": (pointer, [pointer]),
        }
        # A call of nanoseconds keeps Python's lock: taking it back may wait for another thread's imports.
        brief = ctypes.PyDLL("libbpf.so.1", use_errno=True)
        for name, (result, arguments) in signatures.items():
            function = getattr(self._library if name in _LONG_CALLS else brief, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self._libc = ctypes.CDLL(None)
        self._said = threading.local()  # a thread is told of what it loads
        self._printer = _PRINTER(self._print)  # kept: libbpf calls it later
        self.libbpf_set_print(ctypes.cast(self._printer, pointer))

    def _print(self, level: int, form: bytes, arguments: int) -> int:
        if level > _WARN:
            return 0
        with mmap.mmap(-1, _LONGEST_MESSAGE_BYTES) as buffer:  # takes memory only as far as it is written to
            place = (ctypes.c_char * _LONGEST_MESSAGE_BYTES).from_buffer(buffer)
            length = self._libc.vsnprintf(place, ctypes.c_size_t(len(place)), form, ctypes.c_void_p(arguments))
            text = buffer[: max(0, min(length, _LONGEST_MESSAGE_BYTES - 1))].decode(errors="replace")
            del place  # the mapping cannot be closed while it is referred to
        before = getattr(self._said, "messages", [])
        self._said.messages = [*before[1 - _MESSAGES_KEPT :], text]
        return 0

    def messages(self) -> list[str]:
        """What libbpf said to this thread since the last time."""
        said: list[str] = getattr(self._said, "messages", [])
        self._said.messages = []
        return said

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # the functions are set as attributes; this lets a type checker know of them


@cache
def libbpf() -> Libbpf:
    """The library, kept for as long as the process: it prints through our function also when others call it."""
    return Libbpf()


def one_line(messages: list[str]) -> str:
    """Messages on one line, the last 2,000 characters."""
    return " | ".join(" ".join(message.split()) for message in messages)[-2000:]


def refusal(error: int, messages: list[str]) -> NotCapableError:
    """Why an object was not loaded, in one line: what was refused, the reason, the verifier's last lines.

    :param error: errno, positive.
    :param messages: what libbpf said, as it said it.
    """
    said = "".join(messages)
    reason = os.strerror(error)
    if error in (errno.EPERM, errno.EACCES) and not _PROGRAM_LOG.search(said):
        return NotCapableError(
            f"the kernel refused the programs: {reason}: this needs CAP_BPF and CAP_PERFMON, or root; "
            "leakscope doctor shows which is missing and how to get it"
        )
    if log := _PROGRAM_LOG.search(said):
        last = " | ".join(verifier_reason(log["log"]))
        return NotCapableError(f"the kernel's verifier refused program {log['name']}: {reason}: {last}")
    if found := _MAP.search(said):
        return map_refusal(found["name"], error)
    found = _PROGRAM.search(said)
    what = f"program {found['name']}" if found else "the programs"
    return NotCapableError(f"the kernel refused {what}: {reason}: {one_line(messages)}")


def map_refusal(name: str, error: int) -> NotCapableError:
    """Why a map could not be made, in one line."""
    hints = {
        errno.ENOMEM: "; there is not enough memory: ask for less with --ring or --live-entries",
        errno.E2BIG: "; it is too large: ask for less with --ring or --live-entries",
        errno.EPERM: ": this needs CAP_BPF or root; leakscope doctor shows what is missing and how to get it",
        errno.EINVAL: "; this kernel does not know maps of its type or size: leakscope doctor shows what it knows",
    }
    return NotCapableError(f"the kernel refused map {name}: {os.strerror(error)}{hints.get(error, '')}")


def verifier_reason(log: str) -> list[str]:
    """The last lines of a verifier's log that say something, without its statistics."""
    lines = [" ".join(line.split()) for line in log.splitlines()]
    told = [line for line in lines if line and not _VERIFIER_STATISTICS.match(line)]
    return told[-_VERIFIER_LINES:]

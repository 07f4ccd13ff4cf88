"""The CO-RE loader: an object built by clang beforehand, loaded through libbpf.so.1. Needs no compiler, no headers."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from functools import cache
from pathlib import Path
from typing import Any

import bpf_programs
from leakscope.errors import NotCapableError
from leakscope.record.kernel.bpf import BPF_TRACE_UPROBE_MULTI, Map, map_facts
from leakscope.record.loader.base import ProgramConfig

_MAP_SIZES = {
    "mem_ring": "MEM_RING_BYTES",
    "call_ring": "CALL_RING_BYTES",
    "mark_ring": "MARK_RING_BYTES",
    "stacks": "STACK_ENTRIES",
    "sites": "SITE_ENTRIES",
    "site_states": "SITE_ENTRIES",
    "live": "LIVE_ENTRIES",
    "live_pages": "PAGE_ENTRIES",
    "live_ranges": "RANGE_ENTRIES",
    "launch_ring": "LAUNCH_RING_BYTES",
    "kernel_ring": "KERNEL_RING_BYTES",
    "launch_layouts": "LAYOUT_ENTRIES",
    "identities": "IDENTITY_ENTRIES",
    "identity_counts": "IDENTITY_ENTRIES",
}
_UPROBES = ("on_function_entry", "on_function_return", "on_kernel_entry", "on_kernel_return", "on_mark")
_PER_CPU_MAPS = frozenset({"counters", "site_states", "stack_budget", "identity_counts", "byte_countdowns"})

_PRINTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def config_fields() -> list[str]:
    """Names of the fields of `struct config` in bpf_programs/config.h, in order, upper case."""
    body = re.search(r"struct config \{(.*?)\};", (bpf_programs.DIRECTORY / "config.h").read_text(), re.DOTALL)
    assert body is not None
    return [name.upper() for name in re.findall(r"[us]64 (\w+);", body[1])]


class _Libbpf:
    """libbpf.so.1 with argument types; what it prints is kept for the message of a refusal."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libbpf.so.1", use_errno=True)
        except OSError as error:
            raise NotCapableError(
                "libbpf.so.1 is not installed; install it (Debian/Ubuntu: apt-get install libbpf1; "
                "Fedora/RHEL: dnf install libbpf)"
            ) from error
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "bpf_object__open_file": (pointer, [text, pointer]),
            "bpf_object__load": (ctypes.c_int, [pointer]),
            "bpf_object__close": (None, [pointer]),
            "bpf_object__find_map_by_name": (pointer, [pointer, text]),
            "bpf_object__find_program_by_name": (pointer, [pointer, text]),
            "bpf_object__next_map": (pointer, [pointer, pointer]),
            "bpf_object__next_program": (pointer, [pointer, pointer]),
            "bpf_map__set_max_entries": (ctypes.c_int, [pointer, ctypes.c_uint32]),
            "bpf_map__initial_value": (pointer, [pointer, ctypes.POINTER(ctypes.c_size_t)]),
            "bpf_map__fd": (ctypes.c_int, [pointer]),
            "bpf_map__name": (text, [pointer]),
            "bpf_map__reuse_fd": (ctypes.c_int, [pointer, ctypes.c_int]),
            "bpf_program__fd": (ctypes.c_int, [pointer]),
            "bpf_program__name": (text, [pointer]),
            "bpf_program__set_autoload": (ctypes.c_int, [pointer, ctypes.c_bool]),
            "bpf_program__set_expected_attach_type": (ctypes.c_int, [pointer, ctypes.c_int]),
            "libbpf_set_print": (pointer, [pointer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._libc = ctypes.CDLL(None)
        self._messages: list[str] = []
        self._printer = _PRINTER(self._print)  # kept: libbpf calls it later
        self._library.libbpf_set_print(ctypes.cast(self._printer, pointer))

    def _print(self, level: int, form: bytes, arguments: int) -> int:
        if level <= 1:  # LIBBPF_WARN, LIBBPF_INFO
            buffer = ctypes.create_string_buffer(4096)
            self._libc.vsnprintf(buffer, ctypes.c_size_t(len(buffer)), form, ctypes.c_void_p(arguments))
            self._messages.append(" ".join(buffer.value.decode(errors="replace").split()))
        return 0

    def messages(self) -> str:
        """What libbpf said since the last time, on one line."""
        said, self._messages = self._messages, []
        return " | ".join(said[-12:])[-2000:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


@cache
def _libbpf() -> _Libbpf:
    """The library, kept for as long as the process: it prints through our function also when others call it."""
    return _Libbpf()


class CorePrograms:
    """Opens and loads the object. See :class:`LoadedPrograms`."""

    name = "core"

    def __init__(self, config: ProgramConfig, path: Path = bpf_programs.OBJECT) -> None:
        if not path.exists():
            raise NotCapableError(
                f"{path} is not there: the programs were not built; run make build where clang is, or use --loader bcc"
            )
        self._lib = _libbpf()
        self._path = path
        self._constants = {**config.constants(), "SOURCES": bpf_programs.sources_id()}
        self._object = self._open(multi=True)
        for name, constant in _MAP_SIZES.items():
            self._lib.bpf_map__set_max_entries(self._find_map(name), self._constants[constant])
        self._lib.bpf_map__set_max_entries(self._find_map("stacks_overflow"), 4 * self._constants["STACK_ENTRIES"])
        self._load(self._object)
        self._for_perf: int | None = None

    def _open(self, *, multi: bool) -> int:
        handle = self._lib.bpf_object__open_file(os.fsencode(self._path), None)
        if not handle:
            raise NotCapableError(
                f"{self._path} cannot be opened: {self._lib.messages()}; it is damaged: run make build again"
            )
        size = ctypes.c_size_t()
        rodata = self._lib.bpf_object__find_map_by_name(handle, b".rodata")
        place: int = (self._lib.bpf_map__initial_value(rodata, ctypes.byref(size)) if rodata else None) or 0
        fields = config_fields()
        built_from = int.from_bytes(ctypes.string_at(place, 8), sys.byteorder) if place and size.value >= 8 else 0
        if size.value != 8 * len(fields) or built_from != self._constants["SOURCES"]:
            self._lib.bpf_object__close(handle)
            raise NotCapableError(f"{self._path} was built from other sources: run make build again")
        values = struct.pack(f"={len(fields)}Q", *(self._constants[name] & 0xFFFFFFFFFFFFFFFF for name in fields))
        ctypes.memmove(place, values, size.value)
        if multi:
            for name in _UPROBES:
                self._lib.bpf_program__set_expected_attach_type(
                    self._find_program(handle, name), BPF_TRACE_UPROBE_MULTI
                )
        return int(handle)

    def _load(self, handle: int) -> None:
        error = self._lib.bpf_object__load(handle)
        if error:
            raise NotCapableError(f"the kernel refused the programs: {os.strerror(-error)}: {self._lib.messages()}")

    def _find_map(self, name: str) -> int:
        found = self._lib.bpf_object__find_map_by_name(self._object, name.encode())
        if not found:
            raise NotCapableError(f"{self._path} has no map {name}: run make build again")
        return int(found)

    def _find_program(self, handle: int, name: str) -> int:
        found = self._lib.bpf_object__find_program_by_name(handle, name.encode())
        if not found:
            raise NotCapableError(f"{self._path} has no program {name}: run make build again")
        return int(found)

    def program(self, function: str, kind: str) -> int:
        """See :class:`LoadedPrograms`."""
        handle = self._perf_object() if kind == "uprobe_perf" else self._object
        return int(self._lib.bpf_program__fd(self._find_program(handle, function)))

    def _perf_object(self) -> int:
        """The uprobe programs loaded once more for perf events, on the same maps."""
        if self._for_perf is None:
            handle = self._open(multi=False)
            program = self._lib.bpf_object__next_program(handle, None)
            while program:
                wanted = self._lib.bpf_program__name(program).decode() in _UPROBES
                self._lib.bpf_program__set_autoload(program, wanted)
                program = self._lib.bpf_object__next_program(handle, program)
            found = self._lib.bpf_object__next_map(handle, None)
            while found:
                name = self._lib.bpf_map__name(found)
                own = self._lib.bpf_object__find_map_by_name(self._object, name)
                if own and not name.endswith(b".rodata"):
                    self._lib.bpf_map__reuse_fd(found, self._lib.bpf_map__fd(own))
                found = self._lib.bpf_object__next_map(handle, found)
            self._load(handle)
            self._for_perf = handle
        return self._for_perf

    def map(self, name: str) -> Map:
        """See :class:`LoadedPrograms`; raises NotCapableError when the object has no such map."""
        fd = int(self._lib.bpf_map__fd(self._find_map(name)))
        facts = map_facts(fd)
        return Map(fd, facts["key_size"], facts["value_size"], facts["max_entries"], per_cpu=name in _PER_CPU_MAPS)

    def close(self) -> None:
        """Unload everything."""
        for handle in (self._for_perf, self._object):
            if handle:
                self._lib.bpf_object__close(handle)
        self._for_perf = None
        self._object = 0

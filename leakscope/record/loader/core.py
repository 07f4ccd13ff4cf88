"""The CO-RE loader: an object built by clang beforehand, loaded through libbpf.so.1. Needs no compiler, no headers."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bpf_programs
from leakscope.errors import NotCapableError
from leakscope.record.kernel.bpf import BPF_TRACE_UPROBE_MULTI, Map, create_map, map_facts, possible_cpus
from leakscope.record.loader.base import ProgramConfig
from leakscope.record.loader.libbpf import libbpf, map_refusal, one_line, refusal

_MAP_SIZES = {
    "mem_ring": "MEM_RING_BYTES",
    "call_ring": "CALL_RING_BYTES",
    "mark_ring": "MARK_RING_BYTES",
    "dump_ring": "DUMP_RING_BYTES",
    "unwound_paths": "PATH_ENTRIES",
    "stack_ring": "STACK_RING_BYTES",
    "known_stacks": "STACK_ENTRIES",
    "sites": "SITE_ENTRIES",
    "site_states": "SITE_STATE_ENTRIES",
    "settled_sites": "SITE_ENTRIES",
    "live": "LIVE_ENTRIES",
    "live_spilled": "SPILL_ENTRIES",
    "spilled_from": "SPILLED_FROM_ENTRIES",
    "live_ranges": "RANGE_ENTRIES",
    "launch_ring": "LAUNCH_RING_BYTES",
    "kernel_ring": "KERNEL_RING_BYTES",
    "launch_layouts": "LAYOUT_ENTRIES",
    "identities": "IDENTITY_ENTRIES",
    "identity_counts": "IDENTITY_ENTRIES",
    "outermost_calls": "OUTERMOST_ENTRIES",
    "process_ends": "PROCESS_END_ENTRIES",
    "targets": "TARGET_ENTRIES",
}
_UPROBES = ("on_function_entry", "on_function_return", "on_kernel_entry", "on_kernel_return", "on_mark")
_BESIDE = frozenset({*_UPROBES, "on_enter_map_call", "on_exit_map_call"})
"""Programs loaded from a second object beside the first, about half of the verifier's work: it reads the programs of an
object one after another."""
_PER_CPU_MAPS = frozenset({"counters", "stack_budget", "identity_counts", "byte_countdowns"})
_PER_CPU_TYPES = frozenset({5, 6, 10})  # BPF_MAP_TYPE_PERCPU_HASH, PERCPU_ARRAY, LRU_PERCPU_HASH
_THREADS = 4
_LARGE_BYTES = 1 << 20


def config_fields() -> list[str]:
    """Names of the fields of `struct config` in bpf_programs/config.h, in order, upper case."""
    body = re.search(r"struct config \{(.*?)\};", (bpf_programs.DIRECTORY / "config.h").read_text(), re.DOTALL)
    assert body is not None
    return [name.upper() for name in re.findall(r"[us]64 (\w+);", body[1])]


class CorePrograms:
    """Opens and loads the object. See :class:`LoadedPrograms`."""

    name = "core"

    def __init__(self, config: ProgramConfig, path: Path = bpf_programs.OBJECT) -> None:
        if not path.exists():
            raise NotCapableError(
                f"{path} is not there: the programs were not built; run make build where clang is, or use --loader bcc"
            )
        if not bpf_programs.is_sealed(path.read_bytes()):
            raise NotCapableError(f"{path} is damaged: its checksum differs; run make build again")
        self._lib = libbpf()
        self._path = path
        self._constants = {**config.constants(), "SOURCES": bpf_programs.sources_id()}
        self._object = self._open(multi=True)
        self._beside = self._for_perf = 0
        try:
            for name, constant in _MAP_SIZES.items():
                self._lib.bpf_map__set_max_entries(self._find_map(name), self._constants[constant])
            with ThreadPoolExecutor(_THREADS) as pool:
                self._make_maps(pool)
                self._beside = self._open(multi=True)
                self._share_maps(self._beside)
                self._choose_programs(self._object, lambda name: name not in _BESIDE)
                self._choose_programs(self._beside, lambda name: name in _BESIDE)
                loading = [pool.submit(self._load, handle) for handle in (self._object, self._beside)]
            for done in loading:
                done.result()
        except BaseException:
            self.close()
            raise

    def _open(self, *, multi: bool) -> int:
        handle = self._lib.bpf_object__open_file(os.fsencode(self._path), None)
        if not handle:
            raise NotCapableError(
                f"{self._path} cannot be opened: {one_line(self._lib.messages())}; it is damaged: run make build again"
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

    def _make_maps(self, pool: ThreadPoolExecutor) -> None:
        """Make all maps side by side, the largest first: the kernel clears their memory, most of the time of loading.

        A map that holds the object's own data (``.rodata``) is made by libbpf, one an object.
        """
        found = self._lib.bpf_object__next_map(self._object, None)
        maps = []
        while found:
            if not self._is_internal(found):
                maps.append(found)
            found = self._lib.bpf_object__next_map(self._object, found)
        maps.sort(key=self._map_bytes, reverse=True)
        large = sum(self._map_bytes(found) >= _LARGE_BYTES for found in maps)
        making = [pool.submit(self._make_map, found) for found in maps[:large]]
        for found in maps[large:]:
            self._make_map(found, brief=True)
        for made in making:
            made.result()

    def _is_internal(self, found: int) -> bool:
        return b"." in self._lib.bpf_map__name(found)

    def _map_bytes(self, found: int) -> int:
        """At least so much memory a map takes."""
        entries = int(self._lib.bpf_map__max_entries(found))
        each = int(self._lib.bpf_map__key_size(found) + self._lib.bpf_map__value_size(found))
        return entries * (each or 1) * (possible_cpus() if self._lib.bpf_map__type(found) in _PER_CPU_TYPES else 1)

    def _make_map(self, found: int, *, brief: bool = False) -> None:
        lib = self._lib
        name = lib.bpf_map__name(found).decode()
        sizes = lib.bpf_map__key_size(found), lib.bpf_map__value_size(found), lib.bpf_map__max_entries(found)
        try:
            fd = create_map(
                lib.bpf_map__type(found), *sizes, flags=lib.bpf_map__map_flags(found), name=name, brief=brief
            )
        except OSError as error:
            raise map_refusal(name, error.errno or 0) from error
        lib.bpf_map__reuse_fd(found, fd)  # libbpf keeps a descriptor of its own
        os.close(fd)

    def _load(self, handle: int) -> None:
        self._lib.messages()
        error = self._lib.bpf_object__load(handle)
        if error:
            raise refusal(-error, self._lib.messages())

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
        handle = self._object
        if kind == "uprobe_perf":
            handle = self._perf_object()
        elif function in _BESIDE:
            handle = self._beside
        return int(self._lib.bpf_program__fd(self._find_program(handle, function)))

    def _perf_object(self) -> int:
        """The uprobe programs loaded once more for perf events, on the same maps."""
        if not self._for_perf:
            self._for_perf = self._open(multi=False)
            self._share_maps(self._for_perf)
            self._choose_programs(self._for_perf, lambda name: name in _UPROBES)
            self._load(self._for_perf)
        return self._for_perf

    def _share_maps(self, handle: int) -> None:
        """Let the programs of another object use the maps of the first."""
        found = self._lib.bpf_object__next_map(handle, None)
        while found:
            if not self._is_internal(found):
                own = self._lib.bpf_object__find_map_by_name(self._object, self._lib.bpf_map__name(found))
                self._lib.bpf_map__reuse_fd(found, self._lib.bpf_map__fd(own))
            found = self._lib.bpf_object__next_map(handle, found)

    def _choose_programs(self, handle: int, wanted: Callable[[str], bool]) -> None:
        program = self._lib.bpf_object__next_program(handle, None)
        while program:
            self._lib.bpf_program__set_autoload(program, wanted(self._lib.bpf_program__name(program).decode()))
            program = self._lib.bpf_object__next_program(handle, program)

    def map(self, name: str) -> Map:
        """See :class:`LoadedPrograms`; raises NotCapableError when the object has no such map."""
        fd = int(self._lib.bpf_map__fd(self._find_map(name)))
        facts = map_facts(fd)
        return Map(fd, facts["key_size"], facts["value_size"], facts["max_entries"], per_cpu=name in _PER_CPU_MAPS)

    def close(self) -> None:
        """Unload everything."""
        for handle in (self._for_perf, self._beside, self._object):
            if handle:
                self._lib.bpf_object__close(handle)
        self._for_perf = self._beside = self._object = 0

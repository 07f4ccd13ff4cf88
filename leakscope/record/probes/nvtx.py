"""NVTX ranges of the targets: the library that NVTX loads into them, and the probes on it.

NVTX, which applications carry inside themselves, loads the library that the environment variable
NVTX_INJECTION64_PATH names at its first call and never later. So ranges can be had of processes that were started with
it, and of no others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bpf_programs import NVTX_LIBRARY
from leakscope.record.options import RecordOptions
from leakscope.record.probes.libraries import FunctionProbes
from leakscope.symbols.elf import ElfFile

VARIABLE = "NVTX_INJECTION64_PATH"
PROGRAM = "on_mark"
FUNCTIONS = (
    "leakscope_nvtx_push",
    "leakscope_nvtx_pop",
    "leakscope_nvtx_start",
    "leakscope_nvtx_end",
    "leakscope_nvtx_mark",
    "leakscope_nvtx_too_deep",
)
"""What carries the probes; the index is the attach cookie, enum mark_event in bpf_programs/records.h."""

MAX_LIBRARY_BYTES = 16 << 20
"""A larger file of the library's name is not the library."""


def is_injection_library(path: str) -> bool:
    """Whether a file has the library's name, wherever it lies (a container may have its own copy)."""
    return path.endswith(f"/{NVTX_LIBRARY.name}") or path == NVTX_LIBRARY.name


def command_environment(environment: Mapping[str, str], wanted: bool) -> tuple[dict[str, str], str]:
    """(environment for a command so that its ranges are recorded, why they are not or '').

    A library that somebody else chose stays: only one can be loaded.
    """
    changed = dict(environment)
    if not wanted:
        return changed, ""
    chosen = environment.get(VARIABLE, "")
    if chosen:
        if is_injection_library(chosen):
            return changed, ""
        return changed, f"NVTX ranges are not recorded: {VARIABLE} is set to {chosen} already, and NVTX loads only one"
    if not NVTX_LIBRARY.exists():
        return changed, f"NVTX ranges are not recorded: {NVTX_LIBRARY} was not built; run make programs"
    changed[VARIABLE] = str(NVTX_LIBRARY)
    return changed, ""


def is_injected(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process has the library mapped, or will load it at its first range."""
    try:
        if NVTX_LIBRARY.name in (proc / str(pid) / "maps").read_text(errors="surrogateescape"):
            return True
        variables = (proc / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    value = next((v.partition(b"=")[2] for v in variables if v.startswith(VARIABLE.encode() + b"=")), b"")
    return is_injection_library(os.fsdecode(value))


def not_available(pid: int) -> str:
    """The sentence for a process that runs without the library."""
    return f"NVTX ranges of process {pid} are not available: it was not started with {VARIABLE}={NVTX_LIBRARY}"


def records_marks(options: RecordOptions, limits: list[str]) -> bool:
    """Whether a recording looks for ranges; of processes that run without the library, `limits` tells."""
    without = [pid for pid in options.pids if options.nvtx and not is_injected(pid)]
    limits += [not_available(pid) for pid in without]
    return options.nvtx and (not options.pids or len(without) < len(options.pids) or bool(options.command))


class MarkProbes:
    """Attaches to the injection library wherever it turns up; each file (device, inode) once."""

    def __init__(self, functions: FunctionProbes, enabled: bool) -> None:
        self._functions = functions
        self._enabled = enabled
        self._seen: set[tuple[int, int]] = set()

    def attach(self, path: str) -> None:
        """Attach to the library at a path; does nothing for any other file. Failures are noted, not raised."""
        if not self._enabled or not is_injection_library(path):
            return
        try:
            stat = Path(path).stat()
            if (stat.st_dev, stat.st_ino) in self._seen:
                return
            if stat.st_size > MAX_LIBRARY_BYTES:
                raise ValueError("too large to be the injection library")
            self._seen.add((stat.st_dev, stat.st_ino))
            offsets = ElfFile(Path(path).read_bytes()).function_offsets()
            wanted = [(offsets[name], index) for index, name in enumerate(FUNCTIONS) if name in offsets]
            if len(wanted) < len(FUNCTIONS):
                raise ValueError("not the injection library of this leakscope: a function is missing")
            self._functions.attach_program(PROGRAM, path, wanted)
        except (OSError, ValueError) as error:
            self._functions.failed(path, error)

"""Finding the libraries of a target and attaching to their functions: one uprobe_multi link a library and direction."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from leakscope.record.kernel import bpf, perf
from leakscope.record.kernel.bpf import Map
from leakscope.record.loader import LoadedPrograms
from leakscope.record.probes.entry_points import LONGEST_ENTRY_BYTES, EntryPoint, entry_point
from leakscope.record.probes.functions import FUNCTIONS, LIBRARY_PATTERNS
from leakscope.record.probes.tracepoints import Attachments
from leakscope.symbols.elf import ElfFile

PROGRAMS = {"kernel": ("on_kernel_entry", "on_kernel_return")}
"""The entry and return programs of a group's functions, other than those of all others."""
FUNCTION_PROGRAMS = ("on_function_entry", "on_function_return")


@functools.lru_cache(4096)
def library_of(path: str) -> str | None:
    """cuda, cudart or libc for a path with such a file name, else None. Asked for each file that is mapped."""
    name = Path(path).name
    for library, pattern in LIBRARY_PATTERNS.items():
        if re.match(pattern, name):
            return library
    return None


class FunctionProbes:
    """Attaches to libraries as they become known; each file (device, inode) once.

    ``LEAKSCOPE_UPROBES=perf`` in the environment leaves out multi links, as kernels before 6.6 do: for tests, and
    for a kernel whose multi links misbehave. Attaching and closing then take some 100 ms a function.
    """

    def __init__(
        self,
        programs: LoadedPrograms,
        attachments: Attachments,
        functions_map: Map,
        groups: Iterable[str],
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._programs = programs
        self._attachments = attachments
        self._groups = set(groups)
        self._wanted = {probe.library for probe in FUNCTIONS if probe.group in self._groups}
        self._seen: set[tuple[int, int]] = set()
        self._of_file: dict[tuple[int, int], dict[int, tuple[int, EntryPoint]]] = {}
        self._multi = os.environ.get("LEAKSCOPE_UPROBES") != "perf"
        self._warn = warn
        self.attached: dict[str, int] = {}  # path: functions
        self.stepped: dict[str, list[str]] = {}  # path: functions whose probe is single-stepped
        for index, probe in enumerate(FUNCTIONS):
            functions_map.update(index.to_bytes(4, "little"), probe.spec(probe.group in self._groups))

    @property
    def filters_by_process(self) -> bool:
        """Whether multi links can be had that probe one process alone (:meth:`link`).

        They have the filter since 6.6, but it took a thread for a process until 46ba0e49b642 (6.10, stable kernels).
        Kernels with that fix refuse the PID -1 with EINVAL before they look at the path.
        """
        if not self._multi:
            return False
        fd = self._programs.program(FUNCTION_PROGRAMS[0], "uprobe")
        try:
            os.close(bpf.link_uprobe_multi(fd, "/", [0], [0], at_return=False, pid=0xFFFFFFFF))
        except OSError as error:
            return error.errno == errno.EINVAL
        return False

    def wants(self, path: str) -> bool:
        """Whether a file's name is that of a library whose functions are to be probed."""
        return library_of(path) in self._wanted

    def attach(self, path: str, *, any_name: bool = False) -> int:
        """Attach to the known functions of one file; the number attached (0 if done before, or none are there).

        `path` may lead through /proc/PID/root. `any_name` looks for CUDA functions in a file of any name (a
        statically linked runtime). Failures are noted, not raised.
        """
        try:
            stat = Path(path).stat()
            if (stat.st_dev, stat.st_ino) in self._seen:
                return 0
            self._seen.add((stat.st_dev, stat.st_ino))
            found = self._entries(path, any_name)
            if not found:
                return 0
            for program, places, at_return in self._by_program(found):
                self._attach(path, places, program, at_return=at_return)
        except (OSError, ValueError) as error:
            self.failed(path, error)
            return 0
        self._tell(path, found)
        return len(found)

    def link(self, path: str, pid: int) -> list[int]:
        """Multi links to the functions of one file in one process, which are the caller's to close.

        Raises OSError (ProcessLookupError where the process has ended) and ValueError for a file that is no library.
        """
        stat = Path(path).stat()
        key = stat.st_dev, stat.st_ino
        known = self._of_file.get(key)
        if known is None:
            known = self._of_file[key] = self._entries(path, False)
        links = []
        for program, places, at_return in self._by_program(known):
            fd = self._programs.program(program, "uprobe")
            self._attachments.programs[program] = fd
            offsets, cookies = zip(*places, strict=True)
            links.append(bpf.link_uprobe_multi(fd, path, offsets, cookies, at_return=at_return, pid=pid))
        if key not in self._seen:
            self._seen.add(key)
            self._tell(path, known)
        return links

    def _entries(self, path: str, any_name: bool) -> dict[int, tuple[int, EntryPoint]]:
        """Where the functions to probe begin in a file, by their index: file offset, entry."""
        data = Path(path).read_bytes()
        offsets = ElfFile(data).function_offsets()
        library = library_of(path)
        return {
            index: (at, entry_point(data[at : at + LONGEST_ENTRY_BYTES]))
            for index, probe in enumerate(FUNCTIONS)
            if probe.group in self._groups
            and (at := offsets.get(probe.api)) is not None
            and (probe.library == library or (any_name and probe.library != "libc"))
        }

    def _by_program(
        self, found: Mapping[int, tuple[int, EntryPoint]]
    ) -> Iterator[tuple[str, list[tuple[int, int]], bool]]:
        """(program, its places as file offset and cookie, whether it runs at the return) in the order of attaching."""
        by_programs: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for index, (at, place) in found.items():
            programs = PROGRAMS.get(FUNCTIONS[index].group, FUNCTION_PROGRAMS)
            by_programs.setdefault(programs, []).append((at + place.skipped_bytes, index))
        # Returns first: a call that enters before its return is probed would stay open.
        for (entry, at_return), places in by_programs.items():
            yield at_return, places, True
            yield entry, places, False

    def _tell(self, path: str, found: Mapping[int, tuple[int, EntryPoint]]) -> None:
        self.attached[path] = len(found)
        self._tell_stepped(path, {FUNCTIONS[index].api: place for index, (_, place) in found.items()})
        how = "" if self._multi else ", a perf event each"
        self._attachments.names.append(f"uprobe:{path} ({len(found)} functions{how})")

    def _tell_stepped(self, path: str, entries: dict[str, EntryPoint]) -> None:
        """Warn, once a file, of functions whose probe costs many times the usual, with the price on this host."""
        names = defaultdict[str, list[str]](list)
        for api, entry in entries.items():
            if not entry.emulated:
                names[entry.instruction].append(api)
        if not names:
            return
        from leakscope.record.probes.uprobe_price import is_stepped, price_of_stepping

        prices = {instruction: price_of_stepping(instruction) for instruction in names}
        stepped = [api for instruction, apis in names.items() if is_stepped(prices[instruction]) for api in apis]
        if not stepped:
            return
        self.stepped[path] = stepped
        known = [price for price in prices.values() if price is not None]
        worst = max(known, key=lambda price: price.stepped_ns, default=None)
        several = f" and {len(stepped) - 1} more" if len(stepped) > 1 else ""
        costs = worst.text() if worst is not None else "some 10 µs a call (not measured on this host)"
        self._warn(f"{stepped[0]}{several} in {path}: the probe is single-stepped: {costs}")

    def attach_program(self, program: str, path: str, wanted: list[tuple[int, int]]) -> None:
        """Attach another uprobe program to entries (file offset, cookie) of a file. Raises OSError."""
        self._attach(path, wanted, program, at_return=False)
        how = "" if self._multi else ", a perf event each"
        self._attachments.names.append(f"uprobe:{path} ({len(wanted)} functions{how})")

    def failed(self, path: str, error: Exception) -> None:
        """Note that a file could not be attached to."""
        self._attachments.failed.append((f"uprobe:{path}", str(getattr(error, "strerror", None) or error)))

    def _attach(self, path: str, wanted: list[tuple[int, int]], program: str, *, at_return: bool) -> None:
        if self._multi:
            fd = self._programs.program(program, "uprobe")
            try:
                link = bpf.link_uprobe_multi(
                    fd, path, [offset for offset, _ in wanted], [index for _, index in wanted], at_return=at_return
                )
                self._attachments.programs[program] = fd
                self._attachments.descriptors.append(link)
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._multi = False  # before 6.6: single perf events
        fd = self._programs.program(program, "uprobe_perf")
        self._attachments.programs[program] = fd
        for offset, index in wanted:
            event = perf.open_uprobe(path, offset, at_return=at_return)
            self._attachments.events.append(event)
            self._attachments.descriptors.append(bpf.link_perf_event(fd, event, index))


def libraries_before_start(command: list[str], environment: dict[str, str]) -> list[str]:
    """Libraries that a command is going to load, as far as can be told beforehand.

    Reads the dynamic sections (never runs the program), LD_LIBRARY_PATH, run paths and `ldconfig -p`.
    """
    found: dict[str, None] = {}
    directories = [d for d in environment.get("LD_LIBRARY_PATH", "").split(":") if d]
    for directory in directories:
        with contextlib.suppress(OSError):
            for entry in sorted(Path(directory).iterdir()):
                if library_of(entry.name):
                    found[str(entry.resolve())] = None
    cache = _loader_cache()
    for name, path in cache.items():
        if library_of(name):
            found[os.path.realpath(path)] = None
    executable = _executable(command[0], environment)
    queue, seen = ([executable] if executable else []), set[str]()
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        needed, run_paths = _dynamic(path)
        for name in needed:
            for directory in [*run_paths, *directories]:
                candidate = os.path.realpath(Path(directory) / name)
                if Path(candidate).is_file():
                    break
            else:
                candidate = os.path.realpath(cache.get(name, ""))
            if Path(candidate).is_file():
                queue.append(candidate)
                if library_of(name) or library_of(candidate):
                    found[candidate] = None
    return list(found)


def _executable(name: str, environment: dict[str, str]) -> str | None:
    import shutil

    path = shutil.which(name, path=environment.get("PATH"))
    return os.path.realpath(path) if path else None


def _loader_cache() -> dict[str, str]:
    try:
        text = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return {}
    return {
        line.split()[0]: line.rsplit(" => ", 1)[1]
        for line in reversed(text.splitlines())
        if " => " in line and line.startswith("\t")
    }


def _dynamic(path: str) -> tuple[list[str], list[str]]:
    """(needed libraries, run paths with $ORIGIN expanded) of an ELF file; empty for anything else."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    needed, run_paths = [], []
    try:
        with open(path, "rb") as file:
            dynamic: Any = ELFFile(file).get_section_by_name(".dynamic")
            for tag in dynamic.iter_tags() if dynamic is not None else ():
                if tag.entry.d_tag == "DT_NEEDED":
                    needed.append(tag.needed)
                elif tag.entry.d_tag in ("DT_RUNPATH", "DT_RPATH"):
                    run_paths += str(getattr(tag, "runpath", None) or getattr(tag, "rpath", "")).split(":")
    except (OSError, ELFError):
        return [], []
    origin = str(Path(path).parent)
    return needed, [p.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for p in run_paths if p]

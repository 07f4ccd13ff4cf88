"""Which file is mapped where in each process, over time: fed by the side-band and by /proc/PID/maps."""

from __future__ import annotations

import bisect
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from leakscope.model.tables import MODULES
from leakscope.record.symbols.perf_map import PerfMap
from leakscope.symbols.debug_files import SymbolFile, separate_debug_files
from leakscope.symbols.demangle import demangle
from leakscope.symbols.elf import ElfFile, Segment, load_segments

_ANONYMOUS = ("//anon", "/memfd:", "/dev/zero", "/anon_hugepage")
"""How paths begin of executable memory that no file of the disk is behind: code made at run time."""


class Module:
    """A mapped file. Opened at first sight, so that its symbols can be read after the process or file is gone."""

    def __init__(self, path: str, candidates: list[str], build_id: str = "") -> None:
        self.path = path
        self._build_id = build_id
        self._elf: ElfFile | None = None
        self.problem = ""
        self._opened = ""
        self._segments: list[Segment] | None = None
        self._identity = (0, 0)
        self._root = ""  # what the path was found below: /proc/PID/root, or nothing
        for candidate in candidates:
            try:
                self._file = open(candidate, "rb")  # noqa: SIM115 (stays open: see symbol_files)
                self._data = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
                self._root = candidate.removesuffix(path)
                self._identity = _identity(self._file.fileno())
                self._opened = candidate
                break
            except (OSError, ValueError) as error:
                self.problem = str(error)
        else:
            self._data = None  # type: ignore[assignment]

    def _load(self) -> ElfFile | None:
        if self._elf is None and self._data is not None:
            try:
                self._elf = ElfFile(self._data)
            except ValueError as error:
                self._give_up(error)
        return self._elf

    def _give_up(self, error: ValueError) -> None:
        """A damaged file has no symbols: say why once, and do not try again."""
        self.problem = str(error)
        self._elf = None
        self._data = None  # type: ignore[assignment]

    @property
    def build_id(self) -> str:
        """GNU build id in hexadecimal, '' if the file has none or cannot be read."""
        if not self._build_id:
            elf = self._load()
            try:
                self._build_id = elf.build_id if elf else ""
            except ValueError as error:
                self._give_up(error)
        return self._build_id

    @property
    def known_build_id(self) -> str:
        """The build id if it was told or read already; never opens the file."""
        return self._build_id

    @property
    def data(self) -> mmap.mmap | None:
        """The bytes of the file, None where it cannot be read."""
        return self._data

    def current_path(self) -> str:
        """A path that leads to the very file that was mapped, '' when there is none any more."""
        for candidate in (self._opened, self.path):
            try:
                if self._data is not None and _identity(candidate) == self._identity:
                    return candidate
            except OSError:
                continue
        return ""

    def load_bias(self, start: int, file_offset: int) -> int | None:
        """What to add to addresses of the file where it is mapped executable from `file_offset` on at `start`."""
        if self._segments is None:
            try:
                self._segments = load_segments(self._data) if self._data is not None else []
            except ValueError:
                self._segments = []
        for segment in self._segments:
            if segment.executable and segment.offset & ~0xFFF <= file_offset < segment.offset + segment.size_bytes:
                return start - file_offset - (segment.address - segment.offset)
        return None

    def function_at(self, offset: int) -> str:
        """Readable name of the function at a file offset, '' when unknown."""
        return demangle(self.symbol_at(offset))

    def symbol_at(self, offset: int) -> str:
        """Name of the function at a file offset as the file has it, '' when unknown."""
        elf = self._load()
        try:
            return elf.function_at(offset) if elf else ""
        except ValueError as error:
            self._give_up(error)
            return ""

    @property
    def code(self) -> tuple[Segment, ...]:
        """The executable segments of a file whose symbols were asked for; never opens the file."""
        return self._elf.code if self._elf else ()

    def symbol_files(self) -> list[SymbolFile]:
        """The module and its separate debug files: of its own mount namespace while that lasts, then of the host."""
        elf = self._load()
        if elf is None:
            return []
        # By way of the descriptor: the process may be gone, and the file replaced or deleted.
        own = SymbolFile(f"/proc/{os.getpid()}/fd/{self._file.fileno()}", elf)
        try:
            return [own, *separate_debug_files(elf, self.path, sorted({self._root, ""}, reverse=True))]
        except ValueError:
            return [own]


def _identity(file: str | int) -> tuple[int, int]:
    stat = os.stat(file)  # noqa: PTH116 - of a descriptor too
    return stat.st_dev, stat.st_ino


@dataclass
class Mapping:
    """An executable mapping of a module: [start, end) at a file offset."""

    start: int
    end: int
    file_offset: int
    module: Module


@dataclass
class AddressSpace:
    """The executable mappings of one process, newest mapping of an address wins."""

    starts: list[int] = field(default_factory=list)
    mappings: list[Mapping] = field(default_factory=list)
    frames: dict[int, int] = field(default_factory=dict)
    """Frame ids of addresses in files as they are mapped now; a child shares them until either maps more."""

    def add(self, mapping: Mapping) -> None:
        """Add a mapping, replacing what it overlaps."""
        self.frames = {}
        first = bisect.bisect_left(self.starts, mapping.start)
        while first > 0 and self.mappings[first - 1].end > mapping.start:
            first -= 1
        last = first
        while last < len(self.starts) and self.starts[last] < mapping.end:
            last += 1
        self.starts[first:last] = [mapping.start]
        self.mappings[first:last] = [mapping]

    def find(self, address: int) -> Mapping | None:
        """The executable mapping that holds an address, or None."""
        index = bisect.bisect_right(self.starts, address) - 1
        if index >= 0 and address < self.mappings[index].end:
            return self.mappings[index]
        return None

    def copy(self) -> AddressSpace:
        """The same mappings for a forked child."""
        return AddressSpace(list(self.starts), list(self.mappings), self.frames)


class AddressSpaces:
    """All traced processes' address spaces over time. Modules are shared by (path, build id)."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._history: dict[int, list[tuple[int, AddressSpace]]] = {}  # pid: (from ts_ns, space), oldest first
        self._modules: dict[tuple[str, str], Module] = {}
        self._anonymous = Module("", [])
        self._perf_maps: dict[int, PerfMap] = {}

    def module(self, pid: int, path: str, build_id: str) -> Module:
        """The module of a path as `pid` sees it (its own mount namespace first)."""
        key = (path, build_id)
        if key not in self._modules:
            self._modules[key] = Module(path, [f"{self._proc}/{pid}/root{path}", path], build_id)
        return self._modules[key]

    def at(self, pid: int, ts_ns: int) -> AddressSpace:
        """The address space that a process had at a time; read from /proc when it was never seen."""
        history = self._history.get(pid)
        if not history:
            history = self._history[pid] = [(0, self._read_proc(pid))]
        for from_ns, space in reversed(history):
            if from_ns <= ts_ns:
                return space
        return history[0][1]

    def seed(self, pid: int) -> None:
        """Take a process that already runs from /proc."""
        self._history[pid] = [(0, self._read_proc(pid))]

    def start(self, pid: int, ts_ns: int) -> None:
        """A process replaced its image (exec)."""
        self._perf_maps.pop(pid, None)
        self._history.setdefault(pid, []).append((ts_ns, AddressSpace()))

    def fork(self, parent: int, child: int, ts_ns: int) -> None:
        """A process was forked: the child starts with its parent's mappings."""
        self._history.setdefault(child, []).append((ts_ns, self.at(parent, ts_ns).copy()))

    def map(self, pid: int, ts_ns: int, start: int, end: int, file_offset: int, path: str, build_id: str = "") -> None:
        """An executable mapping was made."""
        if path.startswith(_ANONYMOUS):
            self.at(pid, ts_ns).add(Mapping(start, end, start, self._anonymous))
            self._perf_map(pid)  # while the process is there
        elif path.startswith("/"):
            self.at(pid, ts_ns).add(Mapping(start, end, file_offset, self.module(pid, path, build_id)))

    def forget(self, pid: int) -> None:
        """Drop a process that ended long ago."""
        self._history.pop(pid, None)
        self._perf_maps.pop(pid, None)

    def _perf_map(self, pid: int) -> PerfMap:
        if pid not in self._perf_maps:
            self._perf_maps[pid] = PerfMap(pid, self._proc)
        return self._perf_maps[pid]

    def jit_function(self, pid: int, address: int) -> tuple[str, str]:
        """(path of the perf map, name) of a function that a process made at run time; ('', '') when unknown."""
        perf_map = self._perf_map(pid)
        name = perf_map.function_at(address)
        return (perf_map.path, name) if name else ("", "")

    def _read_proc(self, pid: int) -> AddressSpace:
        space = AddressSpace()
        try:
            text = (self._proc / str(pid) / "maps").read_text(errors="surrogateescape")
        except OSError:
            return space
        for line in text.splitlines():
            fields = [*line.split(None, 5), ""][:6]
            if "x" not in fields[1] or fields[5].startswith("["):
                continue
            start, end = (int(place, 16) for place in fields[0].split("-"))
            path = fields[5].removesuffix(" (deleted)")
            if not path or path.startswith(_ANONYMOUS):
                space.add(Mapping(start, end, start, self._anonymous))
            else:
                space.add(Mapping(start, end, int(fields[2], 16), self.module(pid, path, "")))
        return space

    def table(self, source_id: int) -> pa.Table:
        """`modules` rows: every executable mapping that was seen."""
        rows = [
            {
                "source_id": source_id, "pid": pid, "ts_ns": from_ns, "start": mapping.start, "end": mapping.end,
                "file_offset": mapping.file_offset, "path": mapping.module.path,
                "build_id": mapping.module.known_build_id,
            }
            for pid, from_ns, mapping in self.rows()
        ]  # fmt: skip
        return pa.Table.from_pylist(rows, schema=MODULES)

    def rows(self) -> list[tuple[int, int, Mapping]]:
        """(pid, from ts_ns, mapping) of every file that is known to be mapped."""
        return [
            (pid, from_ns, mapping)
            for pid, history in self._history.items()
            for from_ns, space in history
            for mapping in space.mappings
            if mapping.module is not self._anonymous
        ]

    def modules(self) -> list[Module]:
        """Every file that was mapped."""
        return list(self._modules.values())

"""Which file is mapped where in each process, over time: fed by the side-band and by /proc/PID/maps."""

from __future__ import annotations

import bisect
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

from leakscope.record.symbols.elf import ElfFile, Segment, load_segments


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
        for candidate in candidates:
            try:
                with open(candidate, "rb") as file:
                    self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    self._identity = _identity(file.fileno())
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
        """Name of the function at a file offset, '' when unknown."""
        elf = self._load()
        try:
            return elf.function_at(offset) if elf else ""
        except ValueError as error:
            self._give_up(error)
            return ""


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

    def add(self, mapping: Mapping) -> None:
        """Add a mapping, replacing what it overlaps."""
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
        return AddressSpace(list(self.starts), list(self.mappings))


class AddressSpaces:
    """All traced processes' address spaces over time. Modules are shared by (path, build id)."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._history: dict[int, list[tuple[int, AddressSpace]]] = {}  # pid: (from ts_ns, space), oldest first
        self._modules: dict[tuple[str, str], Module] = {}

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
        self._history.setdefault(pid, []).append((ts_ns, AddressSpace()))

    def fork(self, parent: int, child: int, ts_ns: int) -> None:
        """A process was forked: the child starts with its parent's mappings."""
        self._history.setdefault(child, []).append((ts_ns, self.at(parent, ts_ns).copy()))

    def map(self, pid: int, ts_ns: int, start: int, end: int, file_offset: int, path: str, build_id: str = "") -> None:
        """An executable file mapping was made."""
        if path.startswith("/"):
            self.at(pid, ts_ns).add(Mapping(start, end, file_offset, self.module(pid, path, build_id)))

    def forget(self, pid: int) -> None:
        """Drop a process that ended long ago."""
        self._history.pop(pid, None)

    def _read_proc(self, pid: int) -> AddressSpace:
        space = AddressSpace()
        try:
            text = (self._proc / str(pid) / "maps").read_text(errors="surrogateescape")
        except OSError:
            return space
        for line in text.splitlines():
            fields = line.split(None, 5)
            if len(fields) < 6 or "x" not in fields[1] or not fields[5].startswith("/"):
                continue
            start, _, end = fields[0].partition("-")
            path = fields[5].removesuffix(" (deleted)")
            space.add(Mapping(int(start, 16), int(end, 16), int(fields[2], 16), self.module(pid, path, "")))
        return space

    def rows(self) -> list[tuple[int, int, Mapping]]:
        """(pid, from ts_ns, mapping) of everything known."""
        return [
            (pid, from_ns, mapping)
            for pid, history in self._history.items()
            for from_ns, space in history
            for mapping in space.mappings
        ]

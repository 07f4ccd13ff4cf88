"""Stack dumps → stacks. Runs in the thread that writes, within a share of its time."""

from __future__ import annotations

import resource
import time
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field

import numpy as np

from leakscope.model.recording import Loss
from leakscope.record.kernel.bpf import Map
from leakscope.record.symbols.address_space import AddressSpace, AddressSpaces, Module
from leakscope.record.symbols.interner import Interner
from leakscope.record.symbols.stack_numbers import StackNumbers
from leakscope.record.unwind.known import KnownPaths
from leakscope.record.unwind.libdw import Dwfl, stack_pointer
from leakscope.record.unwind.paths import STACK_REACH, Path, program_counter_place, restore_returns, stack_pointer_place
from leakscope.record.unwind.policy import unwind_policy

TIME_SHARE = 0.25
"""Of a CPU's time that goes into unwinding, averaged over :data:`TIME_BURST_S`. Dumps beyond are not unwound."""
TIME_BURST_S = 2.0
MAX_OPEN_FILES = 4096
"""Files of address spaces that are kept open (libdw holds a descriptor of each), and no more than a quarter of what the
process may open; the least recently used address space gives way."""
MAX_PATHS = 64
"""Paths to one program counter that are compared with a dump before it is unwound."""


def unwind_losses(wanted: str, stacks: UnwoundStacks) -> list[Loss]:
    """What was not unwound, by reason."""
    reasons = {f"stack dumps: {reason}": count for reason, count in stacks.not_unwound.items()}
    unwind_policy(wanted, lambda why: reasons.update({why: 1}))
    return [Loss("unwinding", "native_unwind_unavailable", count, reason) for reason, count in reasons.items()]


@dataclass
class _Layout:
    """Files mapped at the same addresses, in one process or, after a fork, in several."""

    dwfl: Dwfl
    reported: set[tuple[str, int]] = field(default_factory=set)  # (path, bias)
    paths: dict[int, list[Path]] = field(default_factory=lambda: defaultdict(list))  # by program counter

    def keep(self, pc: int, path: Path) -> Path:
        """Remember a path to a program counter, as one with what is known of it already."""
        paths = self.paths[pc]
        for index, known in enumerate(paths):
            general = known.generalised(path)
            if general is not None:
                paths[index] = general
                return general
        self.paths[pc] = [path, *paths[: MAX_PATHS - 1]]
        return path


def _of_libc(space: AddressSpace, pc: int) -> bool:
    mapping = space.find(pc)
    return mapping is not None and mapping.module.path.rpartition("/")[2].startswith(("libc.so", "libc-2", "ld-musl"))


_Mapped = tuple[tuple[int, str], ...]


class UnwoundStacks:
    """Unwinds dumps, keeps what they came to in `numbers.unwound`, and tells the probes the paths (`paths_map`)."""

    def __init__(self, interner: Interner, numbers: StackNumbers, spaces: AddressSpaces, paths_map: Map) -> None:
        self._interner = interner
        self._numbers = numbers
        self._spaces = spaces
        self._known = KnownPaths(paths_map)
        self._layouts: OrderedDict[_Mapped, _Layout] = OrderedDict()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._most_files = min(MAX_OPEN_FILES, hard // 4)
        self._seconds = TIME_BURST_S
        self._earned_at = time.monotonic()
        self.dumps = 0
        """Dumps looked at."""
        self.unwound = 0
        """Those whose path was not known yet."""
        self.not_unwound: Counter[str] = Counter()
        """By reason: dumps whose stacks are those by frame pointers, or end early."""

    def resolve(self, dumps: np.ndarray) -> None:
        """Make stacks of an array of DUMP_RECORD (changed in place)."""
        if not len(dumps):
            return
        now = time.monotonic()
        self._seconds = min(TIME_BURST_S, self._seconds + TIME_SHARE * (now - self._earned_at))
        self._earned_at = now
        self.dumps += len(dumps)
        restore_returns(dumps)
        spaces: dict[int, AddressSpace] = {}
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        times, pids = dumps["ts_ns"].tolist(), dumps["pid"].tolist()
        for index, pc in enumerate(dumps["registers"][:, program_counter_place()].tolist()):
            space = self._spaces.at(pids[index], times[index])
            spaces[id(space)] = space
            groups[id(space), pc].append(index)
        layouts = {which: self._layout(space) for which, space in spaces.items()}
        for (which, pc), indices in groups.items():
            space, layout = spaces[which], layouts[which]
            rest = np.array(indices)
            for path in layout.paths[pc]:
                rest = self._take(space, path, dumps, rest)
                if not len(rest):
                    break
            while len(rest):
                found = self._unwind(space, layout, dumps[rest[0]])
                if found is None:
                    self._fall_back(dumps[rest], "more than there was time for")
                    break
                if not len(found.places):  # nothing by which to know it again
                    self._fall_back(dumps[rest[:1]], "could not be begun")
                    rest = rest[1:]
                    continue
                rest = self._take(space, layout.keep(pc, found), dumps, rest)

    def _take(self, space: AddressSpace, path: Path, dumps: np.ndarray, rest: np.ndarray) -> np.ndarray:
        """Give the path's stack to those of the dumps `rest` that took it; the others."""
        took = path.matches(dumps[rest])
        own = dumps[rest[took]]
        stack = self._interner.native_stack(int(own["pid"][0]) if len(own) else 0, space, path.pcs)
        shorter = np.zeros(len(own), bool)
        if path.complete:
            self._equate(space, path, own, stack)
        else:
            self.not_unwound["ended early"] += len(own)
            depths = [len(self._numbers.walked(number)) + 1 for number in own["user_stack"].tolist()]
            shorter = len(path.pcs) <= np.array(depths, np.int64)
        for number, by_frame_pointers, is_shorter in zip(
            own["id"].tolist(), own["user_stack"].tolist(), shorter.tolist(), strict=True
        ):
            self._numbers.unwound[number] = (0, by_frame_pointers) if is_shorter else (stack, -1)
        own = own[~shorter]
        sp = own["registers"][:, stack_pointer_place()]
        for index in np.unique(sp, return_index=True)[1]:
            self._known.add(path, own[index])
        return np.asarray(rest[~took])

    def _equate(self, space: AddressSpace, path: Path, dumps: np.ndarray, stack: int) -> None:
        """Let walks by frame pointers that reached the start of the thread stand for its unwound stack.

        Whether a frame keeps its frame pointer is a property of its program counter: a walk that found the very frames
        of the unwound stack finds them whenever it looks like this. Above them is libc's start of a thread or program.
        """
        for number in set(dumps["user_stack"].tolist()):
            walked = self._numbers.walked(number)
            above = path.pcs[len(walked) - 1 : -1]  # from the last that was walked to the entry of the program
            if walked and path.pcs[: len(walked)] == tuple(walked) and all(_of_libc(space, pc) for pc in above):
                self._numbers.equate(number, stack)

    def _fall_back(self, dumps: np.ndarray, reason: str) -> None:
        self.not_unwound[reason] += len(dumps)
        for dump in dumps:
            self._numbers.unwound[int(dump["id"])] = (0, int(dump["user_stack"]))

    def _unwind(self, space: AddressSpace, layout: _Layout, dump: np.void) -> Path | None:
        """The path of a dump; None when the time for this is used up."""
        if self._seconds <= 0:
            return None
        began = time.thread_time()
        registers = dump["registers"].tolist()
        sp, words = stack_pointer(registers), dump["stack"][: int(dump["bytes"]) // 8].tolist()
        seen: dict[int, int] = {}

        failed: list[int] = []

        def read(address: int) -> int | None:
            place = address - sp
            if place & 7 or not 0 <= place < 8 * len(words):
                failed.append(place)
                return None
            word: int = words[place >> 3]
            seen[address] = word
            return word

        def is_code(address: int) -> bool:
            return space.find(address) is not None

        pcs, ended = layout.dwfl.unwind(registers, read, is_code)
        # A return address that cannot be read looks like a stack's end to libdw.
        cut = any(8 * len(words) <= place < STACK_REACH for place in failed)
        path = Path.of(dump, seen, is_code, pcs, complete=ended and not failed, cut=cut)
        self.unwound += 1
        self._seconds -= time.thread_time() - began
        return path

    def _layout(self, space: AddressSpace) -> _Layout:
        """The layout of an address space: a known one, one that only grew, or a new one."""
        mapped: _Mapped = tuple((mapping.start, mapping.module.path) for mapping in space.mappings)
        if mapped in self._layouts:
            self._layouts.move_to_end(mapped)
            return self._layouts[mapped]
        began = time.thread_time()
        wanted: dict[tuple[str, int], Module] = {}
        for mapping in space.mappings:
            bias = mapping.module.load_bias(mapping.start, mapping.file_offset)
            if bias is not None:
                wanted[mapping.module.path, bias] = mapping.module
        grown = next(
            (key for key, known in self._layouts.items() if known.reported and known.reported <= wanted.keys()), None
        )
        layout = self._layouts.pop(grown) if grown is not None else _Layout(Dwfl())
        added = [
            (module.current_path(), bias)
            for (path, bias), module in wanted.items()
            if (path, bias) not in layout.reported
        ]
        layout.dwfl.report([(path, bias) for path, bias in added if path])
        layout.reported = set(wanted)
        for paths in layout.paths.values():  # these may go on in the new files
            paths[:] = [path for path in paths if path.complete or path.cut]
        if grown is not None:  # a parent may live on with the fewer files
            self._layouts[grown] = layout
        self._layouts[mapped] = layout
        while len(self._layouts) > 1 and self._open_files() > self._most_files:
            _, oldest = self._layouts.popitem(last=False)
            if not any(oldest is other for other in self._layouts.values()):
                oldest.dwfl.close()
        self._seconds -= time.thread_time() - began
        return layout

    def _open_files(self) -> int:
        return sum(len(layout.reported) for layout in {id(known): known for known in self._layouts.values()}.values())

    def close(self) -> None:
        """Give all files back."""
        for layout in self._layouts.values():
            layout.dwfl.close()
        self._layouts.clear()

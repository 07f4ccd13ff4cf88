"""What comes in the place of a target that ended: a process like it, or a group of the same name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leakscope.record import scope
from leakscope.record.kernel.bpf import Map
from leakscope.record.loader.base import SCOPE_CGROUP
from leakscope.record.options import RecordOptions
from leakscope.record.processes import process_exists

PROC = Path("/proc")


@dataclass(frozen=True)
class Identity:
    """By what a process is known again: its program, its arguments, its name."""

    executable: str
    arguments: tuple[bytes, ...]
    name: str

    @classmethod
    def of(cls, pid: int, proc: Path = PROC) -> Identity | None:
        """The identity of a process, None where it has ended or is a kernel thread."""
        place = proc / str(pid)
        try:
            arguments = tuple((place / "cmdline").read_bytes().rstrip(b"\0").split(b"\0"))
            name = (place / "comm").read_text(errors="replace").strip()
            executable = str((place / "exe").readlink()).removesuffix(" (deleted)")
        except OSError:
            return None
        return cls(executable, arguments, name) if arguments != (b"",) else None

    def succeeds(self, other: Identity) -> bool:
        """Whether a process of this identity is `other` started again: the same program, with the same arguments or
        at least the same script or subcommand; a program of another path (an upgrade) by name and arguments."""
        if self.executable == other.executable:
            return self.arguments == other.arguments or self.arguments[:2] == other.arguments[:2] != self.arguments[:1]
        return self.name == other.name and self.arguments[1:] == other.arguments[1:]


def find_successors(ended: Identity, known: Callable[[int], bool], proc: Path = PROC) -> list[int]:
    """PIDs of running processes that are `ended` started again, in ascending order; of a process and its children
    that look alike the parent alone. `known`: PIDs that are none."""
    alike = {}
    for place in proc.iterdir():
        if place.name.isdigit() and not known(int(place.name)):
            found = Identity.of(int(place.name), proc)
            if found is not None and found.succeeds(ended):
                alike[int(place.name)] = _parent(place)
    return sorted(pid for pid, parent in alike.items() if parent not in alike)


def _parent(place: Path) -> int:
    try:
        stat = (place / "stat").read_text(errors="replace")
        return int(stat[stat.rindex(")") + 2 :].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


class Successors:
    """Watches the targets of a recording that goes on when they end."""

    def __init__(self, options: RecordOptions, targets: Map) -> None:
        """:param targets: the map of processes that the probes record; used by the caller's thread alone."""
        self._targets = targets
        self._cgroup = options.cgroup
        self._by_id = scope.cgroup_scope(options) == SCOPE_CGROUP
        self._inode = options.cgroup.stat().st_ino if options.cgroup else 0
        self._roots = {pid: identity for pid in options.pids if (identity := Identity.of(pid)) is not None}
        self._before = {int(p.name) for p in PROC.iterdir() if p.name.isdigit()}

    def cgroup_replaced(self) -> bool:
        """Whether the group was removed (and perhaps made again) where the kernel side knows it by its id."""
        if self._cgroup is None or not self._by_id:
            return False
        try:
            return self._cgroup.stat().st_ino != self._inode
        except OSError:
            return True

    def newcomers(self, belongs: Callable[[int], bool]) -> list[int]:
        """Processes to take in now: new members of the group, or the successors of roots that ended."""
        if self._cgroup is not None:
            return [pid for pid in scope.cgroup_members(self._cgroup) if not belongs(pid)]
        ended = [pid for pid in self._roots if not process_exists(pid)]
        found: list[int] = []
        for pid in ended:
            identity = self._roots[pid]
            # Others of the kind that ran beside the target all the time are not what follows it.
            successors = find_successors(identity, lambda other: other in self._before or belongs(other))
            successors = [other for other in successors if other not in found]
            if successors:
                del self._roots[pid]
                self._roots[successors[0]] = identity
                found.append(successors[0])
        return found

    def let_record(self, pid: int) -> None:
        """Let the probes record a process and what it forks."""
        scope.add_target(self._targets, pid)

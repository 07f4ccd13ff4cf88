"""Which processes a recording is of: those that were named, their children, what a control group holds, successors."""

from __future__ import annotations

from leakscope.record import scope
from leakscope.record.child import Command
from leakscope.record.loader import LoadedPrograms
from leakscope.record.loader.base import SCOPE_PROCESSES
from leakscope.record.mapped import mapped_files
from leakscope.record.options import RecordOptions
from leakscope.record.processes import Processes, process_exists
from leakscope.record.python.stacks import PythonStacks
from leakscope.record.successors import Successors
from leakscope.record.symbols.address_space import AddressSpaces


class Members:
    """Adds processes to all that has to know them: the probes, `processes`, their address spaces, their Pythons."""

    def __init__(
        self,
        options: RecordOptions,
        command: Command | None,
        programs: LoadedPrograms,
        config_scope: int,
        processes: Processes,
        spaces: AddressSpaces,
        python: PythonStacks,
    ) -> None:
        self._options = options
        self._command = command
        self._config_scope = config_scope
        self._processes = processes
        self._spaces = spaces
        self._python = python
        self._targets = programs.map("targets")
        self._asked = programs.map("targets")  # its own: a Map serves one thread
        self._successors = Successors(options, programs.map("targets")) if options.follow else None
        self.roots = roots(options, command)

    def add(self, pid: int) -> None:
        """Record a process from now on."""
        scope.add_target(self._targets, pid)
        self._processes.seed(pid, "root")
        self._spaces.seed(pid)

    def in_scope(self, pid: int) -> bool:
        """Whether the kernel side records a process (of a cgroup v2 or the host: any may be)."""
        if self._config_scope != SCOPE_PROCESSES:
            return True
        return self._asked.lookup(pid.to_bytes(4, "little")) is not None

    def look_into_cgroup(self) -> None:
        """Add what has come into the control group since."""
        if self._options.cgroup and self._successors is None:
            for pid in scope.cgroup_members(self._options.cgroup):
                if not self._processes.belongs(pid):
                    self.add(pid)
                    self._python.seed(pid, mapped_files(pid))

    def take_in_successors(self) -> bool:
        """Take in what has come in the place of targets that ended; False where only a new recording can."""
        if self._successors is None:
            return True
        if self._successors.cgroup_replaced():
            return False
        for pid in self._successors.newcomers(self._processes.belongs):
            self._successors.let_record(pid)
            self._processes.seed(pid, "root")
            self._spaces.seed(pid)
            self._python.seed(pid, mapped_files(pid))
        return True

    def have_ended(self) -> bool:
        """Whether every process that was named has ended (never, for a cgroup or the whole host)."""
        if self._command is not None:
            return self._command.poll() is not None
        if self._successors is not None:
            return False
        return bool(self.roots) and not any(process_exists(pid) for pid in self.roots)


def roots(options: RecordOptions, command: Command | None) -> list[int]:
    """The processes that were named."""
    return [*options.pids, *([command.pid] if command else [])]

"""Processes and control groups as a source: their counters from /proc, without eBPF, and a verdict on their growth."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from leakscope.errors import BadInputError
from leakscope.record.processes import Processes, process_exists
from leakscope.record.samplers import MemoryHierarchy, SamplerSet
from leakscope.record.samplers.cgroup import CgroupSampler
from leakscope.record.samplers.gpu import GpuSampler
from leakscope.record.samplers.process import ProcessSampler
from leakscope.record.scope import cgroup_members
from leakscope.report.export.metrics import Metric
from leakscope.report.text import printable
from leakscope.serve.memory import MemoryMetrics
from leakscope.serve.source import count
from leakscope.serve.verdicts import LiveVerdict
from leakscope.soak.watch import Watch, lives_of

if TYPE_CHECKING:
    import pyarrow as pa


class ProcessSource:
    """Named processes and all that they start, or the members of a control group. Their own user may read them."""

    kind = "processes"

    def __init__(
        self, pids: Sequence[int], cgroup: Path | None, every_s: float, look_s: float, limit_bytes: float | None = None
    ) -> None:
        """Raises BadInputError for a PID or control group that does not exist."""
        missing = next((pid for pid in pids if not process_exists(pid)), None)
        if missing is not None:
            raise BadInputError(f"PID {missing}: no such process")
        self.name = f"cgroup:{printable(str(cgroup))}" if cgroup is not None else "pid:" + ",".join(map(str, pids))
        self.every_s = every_s
        self._roots, self._cgroup = list(pids), cgroup
        self._processes = Processes(everyone=False)
        samplers = (ProcessSampler(self._alive), CgroupSampler(self._alive, self._groups), gpu := GpuSampler())
        self._samplers, self._gpu = SamplerSet(self._alive, self._groups, samplers=samplers), gpu
        self._metrics = MemoryMetrics(self.name)
        self._live = LiveVerdict(self.name, look_s, limit_bytes, str(cgroup or ""))

    def read(self, now_s: float) -> list[Metric]:
        """See :class:`Source`."""
        now_ns = time.monotonic_ns()
        self._follow(now_ns)
        if not self._alive():
            raise BadInputError(f"{self.name}: none of its processes runs")
        rows = self._samplers.read(now_ns)
        self._live.take(now_ns / 1e9, partial(self._feed, rows))
        columns = rows.select(["scope", "scope_id", "counter", "value"]).to_pydict()
        names = {str(pid): life.name for pid in self._alive() if (life := self._processes.life(pid)) is not None}
        failed = sum(lost for _, _, lost, _ in self._samplers.losses())
        return [
            *self._metrics.of(zip(*columns.values(), strict=True), names),
            count("sampler.errors", "Readings that failed.", [((self.name,), float(failed))]),
            *self._live.metrics(),
        ]

    def close(self) -> None:
        """See :class:`Source`."""
        self._samplers.close()
        self._gpu.close()

    def _feed(self, rows: pa.Table, watch: Watch, began_s: float) -> None:
        zero_ns = round(began_s * 1e9)
        watch.add(rows, zero_ns, lives_of(self._processes.lives(), zero_ns))

    def _alive(self) -> list[int]:
        return self._processes.alive()

    def _groups(self) -> list[str | Path]:
        return [self._cgroup] if self._cgroup is not None else []

    def _follow(self, now_ns: int) -> None:
        """Find out who belongs to it now."""
        if self._cgroup is not None:
            wanted = dict.fromkeys(cgroup_members(self._cgroup), "root")
        else:
            wanted = {pid: "root" for pid in self._roots if process_exists(pid)}
            wanted |= {pid: "child" for pid in descendants(wanted) if pid not in wanted}
        for pid in self._alive():
            if pid not in wanted:
                self._processes.ended(pid, now_ns)
        known = set(self._alive())
        for pid, role in wanted.items():
            if pid not in known and pid != os.getpid():
                self._processes.seed(pid, role)
        self._processes.forget({life.pid for life in self._processes.lives() if life.exit_ns and life.role == "child"})


def descendants(roots: Sequence[int] | dict[int, str]) -> list[int]:
    """PIDs of all children of processes, and theirs, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            stat = Path(entry.path, "stat").read_text(errors="replace")
            parent = int(stat[stat.rindex(")") + 2 :].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    left = list(roots)
    while left:
        of = children.get(left.pop(), [])
        found += of
        left += of
    return found


def cgroup_of(path: Path) -> Path:
    """The folder of a control group. Raises BadInputError where there is none, or no memory controller."""
    hierarchy = MemoryHierarchy.find()
    if hierarchy is None:
        from leakscope.record.scope import find_cgroup

        return find_cgroup(path)
    return hierarchy.of_path(path).directory

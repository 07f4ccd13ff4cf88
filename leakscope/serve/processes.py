"""Processes and control groups as a source: their counters from /proc, without eBPF, and a verdict on their growth."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from leakscope.errors import BadInputError
from leakscope.model.results import Verdict
from leakscope.record.processes import Process, Processes, process_exists
from leakscope.record.samplers import MemoryHierarchy, SamplerSet
from leakscope.record.samplers.cgroup import CgroupSampler
from leakscope.record.samplers.gpu import GpuSampler
from leakscope.record.samplers.process import ProcessSampler
from leakscope.record.scope import cgroup_members
from leakscope.report.export.metrics import Metric
from leakscope.serve.memory import MemoryMetrics, verdict_metrics
from leakscope.serve.source import count
from leakscope.soak.watch import Plan, Watch, lives_of

if TYPE_CHECKING:
    import pyarrow as pa

HORIZON_S = 72 * 3600.0
WATCHED_EVERY_S = 30.0
NOT_YET = Verdict("inconclusive", "window_too_short", missing=("ten minutes of readings",))


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
        self.name = f"cgroup:{cgroup}" if cgroup is not None else "pid:" + ",".join(map(str, pids))
        self.every_s = every_s
        self._roots, self._cgroup = list(pids), cgroup
        self._processes = Processes(everyone=False)
        samplers = (ProcessSampler(self._alive), CgroupSampler(self._alive, self._groups), gpu := GpuSampler())
        self._samplers, self._gpu = SamplerSet(self._alive, self._groups, samplers=samplers), gpu
        self._metrics = MemoryMetrics(self.name)
        self._look_s, self._limit_bytes = look_s, limit_bytes
        self._watches: list[tuple[int, Watch]] = []  # (zero in ns, watch), oldest first
        self._watched_ns = 0

    def read(self, now_s: float) -> list[Metric]:
        """See :class:`Source`."""
        now_ns = time.monotonic_ns()
        self._follow(now_ns)
        if not self._alive():
            raise BadInputError(f"{self.name}: none of its processes runs")
        rows = self._samplers.read(now_ns)
        columns = rows.select(["scope", "scope_id", "counter", "value"]).to_pydict()
        names = {str(pid): life.name for pid in self._alive() if (life := self._processes.life(pid)) is not None}
        failed = sum(lost for _, _, lost, _ in self._samplers.losses())
        return [
            *self._metrics.of(zip(*columns.values(), strict=True), names),
            count("sampler.errors", "Readings that failed.", [((self.name,), float(failed))]),
            *verdict_metrics(self.name, self._verdict(rows, now_ns)),
        ]

    def close(self) -> None:
        """See :class:`Source`."""
        self._samplers.close()
        self._gpu.close()

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

    def _verdict(self, rows: pa.Table, now_ns: int) -> Verdict:
        """Of the last look; a leak counts only beyond chance over all looks (:mod:`leakscope.detect.looks`)."""
        self._renew(now_ns)
        if now_ns - self._watched_ns >= 0.9e9 * WATCHED_EVERY_S:
            self._watched_ns = now_ns
            for zero_ns, watch in self._watches:
                lives: list[Process] = self._processes.lives()
                watch.add(rows, zero_ns, lives_of(lives, zero_ns))
                watch.advance((now_ns - zero_ns) / 1e9)
        looks = self._watches[0][1].looks
        if not looks:
            return NOT_YET
        last = looks[-1]
        verdict = replace(last.verdict, forecast=last.forecast)
        return replace(verdict, verdict="inconclusive") if verdict.verdict == "leak" and not last.alarm else verdict

    def _renew(self, now_ns: int) -> None:
        """A watch lasts for its horizon; the next begins halfway, so that it knows the service when it takes over."""
        if not self._watches or now_ns - self._watches[-1][0] >= HORIZON_S / 2 * 1e9:
            cgroup = str(self._cgroup or "")
            plan = Plan(self.name, "", HORIZON_S, self._look_s, self._limit_bytes, cgroup=cgroup)
            self._watches.append((now_ns, Watch(plan)))
        if now_ns - self._watches[0][0] >= HORIZON_S * 1e9:
            del self._watches[0]


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

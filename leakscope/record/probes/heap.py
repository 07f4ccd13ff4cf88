"""Probes of malloc's family in single processes, so that no other process of the host pays for them.

A uprobe is placed in a file, and every process that maps the file runs into it; libc is mapped by all. With the filter
of a multi link the breakpoints are written into one process alone. A child is followed from its fork on, which is told
some milliseconds after it: what it does with its heap until then is not recorded, and said.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from leakscope.model.recording import Loss
from leakscope.record.clocks import monotonic_ns
from leakscope.record.options import RecordOptions
from leakscope.record.probes.libraries import FunctionProbes
from leakscope.record.probes.tracepoints import CLOSING_THREADS
from leakscope.record.side_band import SideBandEvent

MOST_FOLLOWED = 256
"""Processes that are probed at once: each takes two links and some milliseconds."""


def wants_single_processes(options: RecordOptions) -> bool:
    """Whether malloc's probes go into single processes: into those that are named by their PID.

    A command is probed by file, so that its children are recorded from their first call on, however short they live;
    so are targets whose successors are followed.
    """
    return options.malloc and bool(options.pids) and not (options.command or options.cgroup or options.follow)


class HeapProbes:
    """Attaches to libc in the processes that are recorded, and in their children. Serves one thread."""

    def __init__(self, functions: FunctionProbes, pids: Iterable[int]) -> None:
        self._functions = functions
        self._files: dict[int, dict[tuple[int, int], str]] = {pid: {} for pid in pids}  # of those followed
        self._links: defaultdict[int, list[int]] = defaultdict(list)
        self._closing = ThreadPoolExecutor(CLOSING_THREADS, "leakscope-heap")  # each end waits for RCU
        self._late_ns: list[int] = []
        self._not_followed = 0

    def attach(self, pid: int, path: str) -> None:
        """Attach to a libc in a process that is followed; once a file. Failures are noted, not raised."""
        files = self._files.get(pid)
        if files is None:
            return
        try:
            stat = Path(path).stat()
            key = stat.st_dev, stat.st_ino
            if key not in files:
                files[key] = path
                self._links[pid] += self._functions.link(path, pid)
        except ProcessLookupError:
            pass  # it ended meanwhile
        except (OSError, ValueError) as error:
            self._functions.failed(f"{path} in process {pid}", error)

    def follow(self, event: SideBandEvent) -> None:
        """A process was made or ended."""
        if event.kind == "fork" and event.pid != event.other and event.other in self._files:
            if len(self._files) >= MOST_FOLLOWED:
                self._not_followed += 1
                return
            self._files[event.pid] = {}
            for path in list(self._files[event.other].values()):
                self.attach(event.pid, path)
            self._late_ns.append(monotonic_ns() - event.ts_ns)
        elif event.kind == "exit" and event.pid == event.tid and self._files.pop(event.pid, None) is not None:
            for link in self._links.pop(event.pid, []):
                self._closing.submit(os.close, link)

    def losses(self) -> list[Loss]:
        """What is not recorded of children."""
        losses = []
        if self._late_ns:
            detail = f"children: their malloc and free in the first {max(self._late_ns) / 1e6:.0f} ms or less"
            losses.append(Loss("malloc", "attach_failed", len(self._late_ns), detail))
        if self._not_followed:
            detail = f"children beyond {MOST_FOLLOWED} processes at once: their heap is not recorded"
            losses.append(Loss("malloc", "attach_failed", self._not_followed, detail))
        return losses

    def close(self) -> None:
        """End all links; nothing is followed afterwards."""
        self._files.clear()
        for links in self._links.values():
            for link in links:
                self._closing.submit(os.close, link)
        self._links.clear()
        self._closing.shutdown()

"""Memory of processes from /proc/PID/status, smaps_rollup, fd and (on request) maps."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from leakscope.record.samplers.base import Reading, describe_error

_STATUS_COUNTERS = {
    b"VmSize": "vss",
    b"VmRSS": "rss",
    b"RssAnon": "rss_anon",
    b"RssFile": "rss_file",
    b"RssShmem": "rss_shmem",
    b"VmPTE": "page_tables",
    b"VmSwap": "swap",
}
_STATUS_LINE = re.compile(rb"^(VmSize|VmRSS|RssAnon|RssFile|RssShmem|VmPTE|VmSwap):\s+(\d+) kB$", re.MULTILINE)
_THREADS = re.compile(rb"^Threads:\s+(\d+)$", re.MULTILINE)
_ROLLUP_LINE = re.compile(rb"^(Pss|Shared_Clean):\s+(\d+) kB$", re.MULTILINE)
_ROLLUP_COUNTERS = {b"Pss": "pss", b"Shared_Clean": "shared_clean"}

ROLLUP_TIME_SHARE = 0.02
"""Share of one CPU that reading smaps_rollup may take. The kernel walks all page tables of the process for it
(about 1 s for 100 GB of 4 KiB pages) and competes for the process's own mmap lock."""
_ROLLUP_BURST_S = 0.1


class TimeBudget:
    """A token bucket of seconds: filled with ``share`` seconds a second, never above ``burst_s``.

    A use may overdraw it (its cost is known only afterwards); then nothing is allowed until it has recovered.
    """

    def __init__(self, share: float, burst_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._burst_s, self._clock = share, burst_s, clock
        self._left_s, self._at = burst_s, clock()

    def allows(self) -> bool:
        """Whether there is time left to spend now."""
        now = self._clock()
        self._left_s = min(self._burst_s, self._left_s + (now - self._at) * self._share)
        self._at = now
        return self._left_s > 0

    def spend(self, seconds: float) -> None:
        """Take ``seconds`` from the budget."""
        self._left_s -= seconds


class ProcessSampler:
    """Counters of scope process, ``scope_id`` the PID as text.

    Every reading: ``rss``, ``vss``, ``rss_anon``, ``rss_file``, ``rss_shmem``, ``page_tables``, ``swap``
    (bytes), ``threads``, ``fds`` (numbers). They come from ``status``, which costs the same for any size;
    kernels 6.2 to 6.16 keep these sums per CPU and may be off by some dozens of pages a CPU. ``pss`` and
    ``shared_clean`` come from ``smaps_rollup`` as often as :data:`ROLLUP_TIME_SHARE` permits, the process
    read longest ago first.

    With ``maps``: ``maps_anon``, ``maps_file``, ``maps_shmem``, ``maps_heap``, ``maps_stack``,
    ``maps_reserved`` (no access rights: address space, not memory), all address-space bytes, and
    ``map_count``.

    A process that has exited, a zombie and a kernel thread give no rows and no error.
    """

    name = "process"
    sparse = False

    def __init__(
        self,
        pids: Callable[[], Sequence[int]],
        proc_root: Path = Path("/proc"),
        *,
        maps: bool = False,
        rollup_budget: TimeBudget | None = None,
    ) -> None:
        self.errors: Counter[str] = Counter()
        self._pids, self._proc_root, self._maps = pids, proc_root, maps
        self._budget = rollup_budget or TimeBudget(ROLLUP_TIME_SHARE, _ROLLUP_BURST_S)
        self._rollup_read: dict[int, int] = {}  # PID → ts_ns of its last smaps_rollup

    def sample(self, ts_ns: int) -> Iterator[Reading]:
        """Readings of all PIDs that ``pids()`` names and that still run."""
        running = []
        for pid in self._pids():
            status = self._read(pid, "status")
            if status is None or b"\nVmSize:" not in status:
                continue
            running.append(pid)
            yield from self._of_status(pid, status)
            yield from self._of_descriptors(pid)
            if self._maps:
                yield from self._of_maps(pid)
        last_read = {pid: self._rollup_read.get(pid, -1) for pid in running}
        self._rollup_read = {pid: ts for pid, ts in last_read.items() if ts >= 0}
        for pid in sorted(running, key=lambda pid: last_read[pid]):
            if not self._budget.allows():
                break
            started = time.perf_counter()
            rollup = self._read(pid, "smaps_rollup")
            self._budget.spend(time.perf_counter() - started)
            self._rollup_read[pid] = ts_ns
            for line, kib in _ROLLUP_LINE.findall(rollup or b""):
                yield Reading("process", str(pid), _ROLLUP_COUNTERS[line], int(kib) * 1024)

    def facts(self) -> dict[str, Any]:
        """Nothing to state."""
        return {}

    def _of_status(self, pid: int, status: bytes) -> Iterator[Reading]:
        for line, kib in _STATUS_LINE.findall(status):
            yield Reading("process", str(pid), _STATUS_COUNTERS[line], int(kib) * 1024)
        if threads := _THREADS.search(status):
            yield Reading("process", str(pid), "threads", int(threads[1]))

    def _of_descriptors(self, pid: int) -> Iterator[Reading]:
        folder = self._proc_root / str(pid) / "fd"
        try:
            # Since Linux 6.2 (f1f1f2569901) the size of the folder is the number of descriptors; before, 0.
            count = folder.stat().st_size or sum(1 for _ in folder.iterdir())
        except OSError as error:
            self._note(error, "/proc/PID/fd")
            return
        yield Reading("process", str(pid), "fds", count)

    def _of_maps(self, pid: int) -> Iterator[Reading]:
        text = self._read(pid, "maps")
        if text is None:
            return
        for counter, value in parse_maps(text).items():
            yield Reading("process", str(pid), counter, value)

    def _read(self, pid: int, name: str) -> bytes | None:
        try:
            return (self._proc_root / str(pid) / name).read_bytes()
        except OSError as error:
            self._note(error, f"/proc/PID/{name}")
            return None

    def _note(self, error: OSError, what: str) -> None:
        # ENOENT: gone before open; ESRCH: gone between open and read.
        if not isinstance(error, (FileNotFoundError, ProcessLookupError)):
            self.errors[describe_error(error, what)] += 1


_MAP_KINDS = ("maps_anon", "maps_file", "maps_shmem", "maps_heap", "maps_stack", "maps_reserved")
# What shared memory is called in maps: memfd_create, System V segments, shared anonymous maps, shm_open.
_SHMEM_PATHS = (b"/memfd:", b"/SYSV", b"/dev/zero (deleted)", b"/dev/shm/")


def parse_maps(text: bytes) -> dict[str, int]:
    """Address-space bytes by kind from the text of /proc/PID/maps (proc(5)), and ``map_count``."""
    sums: defaultdict[str, int] = defaultdict(int)
    sums.update(dict.fromkeys(_MAP_KINDS, 0))
    count = 0
    for line in text.splitlines():
        # start-end perms offset device inode [path]
        fields = line.split(None, 5)
        start, end = fields[0].split(b"-")
        path = fields[5] if len(fields) > 5 else b""
        count += 1
        if path.startswith(_SHMEM_PATHS):
            kind = "maps_shmem"
        elif path.startswith(b"/"):
            kind = "maps_file"
        elif fields[1].startswith(b"---"):
            kind = "maps_reserved"
        elif path == b"[heap]":
            kind = "maps_heap"
        elif path.startswith(b"[stack"):
            kind = "maps_stack"
        else:
            kind = "maps_anon"
        sums[kind] += int(end, 16) - int(start, 16)
    return {**sums, "map_count": count}

"""Memory of cgroups, from the memory controller of cgroup v2 or, where it is mounted, of v1.

File formats: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the Linux kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakscope.errors import BadInputError
from leakscope.record.samplers.base import Reading, describe_error

_V1_UNLIMITED_BYTES = 1 << 62
"""v1 has no word for "no limit": it shows the largest page count in bytes, just under 2**63."""

# memory.stat line → counter. In both versions "file" (v1: "cache") includes shared memory.
_V2_STAT = {
    "anon": "cgroup_anon",
    "file": "cgroup_file",
    "shmem": "cgroup_shmem",
    "kernel": "cgroup_kernel",
    "slab_reclaimable": "cgroup_slab_reclaimable",
    "slab_unreclaimable": "cgroup_slab_unreclaimable",
    "sock": "cgroup_sock",
}
_V2_KERNEL_PARTS = ("slab", "kernel_stack", "pagetables", "percpu", "vmalloc")
_V1_STAT = {
    "total_rss": "cgroup_anon",
    "total_cache": "cgroup_file",
    "total_shmem": "cgroup_shmem",
    "total_swap": "cgroup_swap",
}


@dataclass(frozen=True)
class MemoryCgroup:
    """One cgroup: ``path`` as in /proc/PID/cgroup (``/`` is the root), ``directory`` its folder, version 1
    or 2.
    """

    path: str
    directory: Path
    version: int


@dataclass(frozen=True)
class MemoryHierarchy:
    """The mounted hierarchy that has the memory controller.

    ``root`` is the cgroup that ``mount`` shows: ``/`` on a host, the container's own cgroup where only that
    part is mounted.
    """

    version: int
    mount: Path
    root: str

    @classmethod
    def find(cls, proc_root: Path = Path("/proc")) -> MemoryHierarchy | None:
        """The hierarchy of the memory controller, from /proc/self/mountinfo; None when it is not mounted.

        Hybrid hosts mount v2 without the memory controller beside v1 with it: then v1 is the answer.
        """
        found = None
        for mount in _mounts(proc_root):
            if mount.fstype == "cgroup" and "memory" in mount.super_options:
                return cls(1, mount.point, mount.root)
            if mount.fstype == "cgroup2" and "memory" in _words(mount.point / "cgroup.controllers"):
                found = cls(2, mount.point, mount.root)
        return found

    def of_pid(self, pid: int, proc_root: Path = Path("/proc")) -> MemoryCgroup | None:
        """The cgroup of a process; None when the process is gone or its cgroup lies outside the mount."""
        try:
            text = (proc_root / str(pid) / "cgroup").read_text(errors="surrogateescape")
        except OSError:
            return None
        for line in text.splitlines():
            # hierarchy-id:controllers:path, "0::path" for v2
            number, controllers, path = line.split(":", 2)
            if (self.version == 1 and "memory" in controllers.split(",")) or (
                self.version == 2 and number == "0" and not controllers
            ):
                return self._at(path)
        return None

    def of_path(self, path: str | Path) -> MemoryCgroup:
        """The cgroup that a user names, by folder (under the mount) or by path inside the hierarchy.

        :raises BadInputError: when there is no such cgroup.
        """
        folder = Path(path)
        if not folder.is_relative_to(self.mount):
            inside = self._at("/" + str(path).strip("/"))
            folder = inside.directory if inside else self.mount / str(path).strip("/")
        if not (folder / "cgroup.procs").exists():
            raise BadInputError(
                f"no cgroup {path!s} under {self.mount} (memory controller of cgroup v{self.version}): "
                "give its folder, or its path as in /proc/PID/cgroup"
            )
        inner = "/" + str(folder.relative_to(self.mount)).strip("./")
        return MemoryCgroup((self.root.rstrip("/") + inner).rstrip("/") or "/", folder, self.version)

    def _at(self, path: str) -> MemoryCgroup | None:
        root = self.root.rstrip("/")
        if path != self.root and not path.startswith(root + "/"):
            return None
        directory = self.mount / path[len(root) :].strip("/")
        # A cgroup outside the reader's cgroup namespace shows as /../x.
        if ".." in directory.parts or not directory.is_dir():
            return None
        return MemoryCgroup(path, directory, self.version)


@dataclass(frozen=True)
class _Mount:
    root: str
    point: Path
    fstype: str
    super_options: frozenset[str]


def _mounts(proc_root: Path) -> Iterator[_Mount]:
    """Mounts of /proc/self/mountinfo (proc(5)): `id parent dev root point options [tags] - type source
    super`.
    """
    try:
        text = (proc_root / "self" / "mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        head, tail = left.split(), right.split()
        if len(head) >= 6 and len(tail) >= 3:
            point = Path(_unescape(head[4]))
            yield _Mount(_unescape(head[3]), point, tail[0], frozenset(tail[2].split(",")))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def cgroup_versions(proc_root: Path = Path("/proc")) -> list[int]:
    """The cgroup versions that are mounted: [1], [2], [1, 2] (hybrid) or []."""
    types = {mount.fstype for mount in _mounts(proc_root)}
    return [version for version, fstype in ((1, "cgroup"), (2, "cgroup2")) if fstype in types]


class CgroupSampler:
    """Counters of scope cgroup, ``scope_id`` the cgroup's path; each includes its descendants. Bytes.

    ``cgroup`` is memory.current (v2) or memory.usage_in_bytes (v1); ``cgroup_kernel`` the kernel line of
    memory.stat or memory.kmem.usage_in_bytes; ``cgroup_limit`` only where one is set. The kernel charges
    groups in batches of up to 64 pages a CPU, so ``cgroup`` may run ahead of its parts by that much.

    Sampled are the cgroups that ``cgroups()`` names and those of ``pids()``, each once.
    """

    name = "cgroup"
    sparse = False

    def __init__(
        self,
        pids: Callable[[], Sequence[int]],
        cgroups: Callable[[], Sequence[str | Path]] = lambda: (),
        proc_root: Path = Path("/proc"),
    ) -> None:
        self.errors: Counter[str] = Counter()
        self._pids, self._cgroups, self._proc_root = pids, cgroups, proc_root
        self._hierarchy = MemoryHierarchy.find(proc_root)

    def sample(self, ts_ns: int) -> Iterator[Reading]:
        """Readings of every cgroup that exists now."""
        for group in sorted(self._current_groups(), key=lambda group: group.path):
            try:
                counters = read_v2(group.directory) if group.version == 2 else read_v1(group.directory)
            except OSError as error:
                # A group that was removed: ENOENT before open, ENODEV after.
                if group.directory.is_dir():
                    self.errors[describe_error(error, "memory cgroup")] += 1
                continue
            for counter, value in counters.items():
                yield Reading("cgroup", group.path, counter, value)

    def facts(self) -> dict[str, Any]:
        """``cgroup_versions`` mounted, the hierarchy with the memory controller (or null), and where it is absent
        ``cgroup_memory_absent``, one line that says so."""
        hierarchy, versions = self._hierarchy, cgroup_versions(self._proc_root)
        facts: dict[str, Any] = {
            "cgroup_versions": versions,
            "cgroup_memory": hierarchy
            and {"version": hierarchy.version, "mount": str(hierarchy.mount), "root": hierarchy.root},
        }
        if hierarchy is None:
            mounted = f"cgroup v{' and v'.join(map(str, versions))} without it" if versions else "no cgroup"
            facts["cgroup_memory_absent"] = (
                f"memory of cgroups is not read: no memory controller here ({mounted} is mounted)"
            )
        return facts

    def _current_groups(self) -> set[MemoryCgroup]:
        if self._hierarchy is None:
            return set()
        groups = set()
        for path in self._cgroups():
            try:
                groups.add(self._hierarchy.of_path(path))
            except BadInputError:
                continue  # removed since it was named
        for pid in self._pids():
            if group := self._hierarchy.of_pid(pid, self._proc_root):
                groups.add(group)
        return groups


def read_v2(directory: Path) -> dict[str, int]:
    """Counter → bytes of one v2 cgroup. The root has no memory.current and no limit: they are left out.

    :raises OSError: when memory.stat cannot be read.
    """
    stat = _keyed(directory / "memory.stat")
    counters = {counter: stat[line] for line, counter in _V2_STAT.items() if line in stat}
    if "kernel" not in stat:
        # The sum is a line of its own since Linux 5.18 (a8c49af3be5f).
        counters["cgroup_kernel"] = sum(stat.get(part, 0) for part in _V2_KERNEL_PARTS)
    for file, counter in (
        ("memory.current", "cgroup"),
        ("memory.max", "cgroup_limit"),
        ("memory.swap.current", "cgroup_swap"),
    ):
        words = _words(directory / file)
        if words and words[0] != "max":
            counters[counter] = int(words[0])
    return counters


def read_v1(directory: Path) -> dict[str, int]:
    """Counter → bytes of one v1 cgroup.

    :raises OSError: when memory.stat cannot be read.
    """
    stat = _keyed(directory / "memory.stat")
    counters = {counter: stat[line] for line, counter in _V1_STAT.items() if line in stat}
    for file, counter in (
        ("memory.usage_in_bytes", "cgroup"),
        ("memory.kmem.usage_in_bytes", "cgroup_kernel"),
    ):
        if words := _words(directory / file):
            counters[counter] = int(words[0])
    # The effective limit: the tightest of the ancestors too.
    limit = stat.get("hierarchical_memory_limit", _V1_UNLIMITED_BYTES)
    if limit < _V1_UNLIMITED_BYTES:
        counters["cgroup_limit"] = limit
    return counters


def _keyed(path: Path) -> dict[str, int]:
    with path.open(encoding="ascii") as file:
        return {key: int(value) for key, value in map(str.split, file)}

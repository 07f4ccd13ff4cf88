"""Which processes the kernel side records: PIDs and their children, a cgroup, or everyone."""

from __future__ import annotations

import os
from pathlib import Path

from leakscope.errors import BadInputError
from leakscope.record.kernel.bpf import Map
from leakscope.record.loader.base import SCOPE_CGROUP, SCOPE_HOST, SCOPE_PROCESSES, ProgramConfig
from leakscope.record.options import RecordOptions


def find_cgroup(path: Path) -> Path:
    """A cgroup's directory: as given, or below the cgroup mounts. Raises BadInputError when there is none."""
    candidates = [path]
    for line in Path("/proc/mounts").read_text().splitlines():
        fields = line.split()
        if fields[2] in ("cgroup2", "cgroup"):
            candidates.append(Path(fields[1]) / str(path).lstrip("/"))
    for candidate in candidates:
        if (candidate / "cgroup.procs").exists():
            return candidate.resolve()
    raise BadInputError(f"{path}: no such cgroup; give its directory, e.g. /sys/fs/cgroup/system.slice/vllm.service")


def cgroup_members(cgroup: Path) -> list[int]:
    """PIDs in a cgroup and those below it."""
    members: set[int] = set()
    for listing in [cgroup / "cgroup.procs", *cgroup.rglob("cgroup.procs")]:
        try:
            members.update(int(line) for line in listing.read_text().split())
        except OSError:
            continue
    return sorted(members)


def others_of_host() -> list[int]:
    """PIDs of all processes but this one."""
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and int(p.name) != os.getpid()]


def _version_2_mount(cgroup: Path) -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        fields = line.split()
        if fields[2] == "cgroup2" and cgroup.is_relative_to(fields[1]):
            return Path(fields[1])
    return None


def cgroup_scope(options: RecordOptions) -> int:
    """How the kernel side tells who belongs to a recording: one of SCOPE_HOST, SCOPE_CGROUP, SCOPE_PROCESSES."""
    if options.everyone:
        return SCOPE_HOST
    alone = options.cgroup is not None and not (options.pids or options.command)
    return SCOPE_CGROUP if alone and options.cgroup and _version_2_mount(options.cgroup) else SCOPE_PROCESSES


def configure(options: RecordOptions, config: ProgramConfig) -> None:
    """Set the scope in the programs' constants.

    A cgroup v2 is told in the kernel by its id, children and newcomers included. A v1 cgroup is followed by its
    members and their children, re-read at every sample.
    """
    config.scope = cgroup_scope(options)
    if config.scope == SCOPE_CGROUP and options.cgroup:
        mount = _version_2_mount(options.cgroup)
        assert mount is not None
        config.cgroup_id = options.cgroup.stat().st_ino  # the id of a cgroup is its inode (kernfs)
        config.cgroup_level = len(options.cgroup.relative_to(mount).parts)


def add_target(targets: Map, pid: int) -> None:
    """Let the probes record a process and what it forks."""
    targets.update(pid.to_bytes(4, "little"), (1).to_bytes(4, "little"))

"""The checks. Each looks at one thing and gives one :class:`Capability`."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import bpf_programs
from leakscope.errors import NotCapableError
from leakscope.model.capability import Capability, State
from leakscope.record.bcc_location import find_bcc, import_bcc
from leakscope.record.capabilities import remedies, trials
from leakscope.record.capabilities.host import Host

# Bits of the capability sets, include/uapi/linux/capability.h.
_CAPABILITY_BITS = {
    "dac_override": 1,
    "dac_read_search": 2,
    "sys_ptrace": 19,
    "sys_admin": 21,
    "sys_resource": 24,
    "syslog": 34,
    "perfmon": 38,
    "bpf": 39,
}
_DENIED = (errno.EPERM, errno.EACCES)
_LARGEST_TRIAL_BYTES = 16 << 20
_NO_PRIVILEGE = "not tried without the BPF privilege"


def effective_capabilities(host: Host) -> set[str]:
    """Names (without ``cap_``) of the known capabilities that this process has now."""
    for line in (host.text("proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            bits = int(line.split()[1], 16)
            return {name for name, bit in _CAPABILITY_BITS.items() if bits >> bit & 1}
    return set()


def check_privilege(host: Host) -> Capability:
    """Whether the kernel takes a tracing program from this process."""
    error = trials.attempt(trials.load_tracing_program)
    have = effective_capabilities(host)
    setting = host.text("proc/sys/kernel/unprivileged_bpf_disabled")
    who = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    detail = f"{who}; kernel.unprivileged_bpf_disabled = {setting or 'not set'}"
    remedy = remedies.PRIVILEGE
    if error is not None:
        lacking = [] if "sys_admin" in have else [name for name in ("bpf", "perfmon") if name not in have]
        if error.errno not in _DENIED:
            detail = f"{error.strerror}; {detail}"
            remedy = {}
        elif lacking:
            detail = f"no {' and no '.join(f'CAP_{name.upper()}' for name in lacking)}; {detail}"
        else:
            detail = f"the capabilities are there, yet bpf(2) is refused (seccomp or an LSM); {detail}"
            remedy = remedies.SECCOMP
    return Capability(
        "BPF privilege", _state(error), detail, "every probe (CAP_BPF and CAP_PERFMON, or root)", True, remedy
    )


def check_ring(host: Host) -> Capability:
    """Whether a ring buffer map can be made, larger than the limit of locked memory where that is small."""
    error = trials.attempt(lambda: trials.create_ring(1 << 20))
    needed_for = "events on their way out of the kernel"
    if error is None:
        return Capability("BPF ring buffer", "ok", "a map of 1 MiB was made", needed_for, True)
    if error.errno == errno.EINVAL:
        return Capability("BPF ring buffer", "missing", "not in this kernel (Linux 5.8)", needed_for, True)
    return _refused(host, "BPF ring buffer", error, needed_for)


def check_lockdown(host: Host) -> Capability:
    """Whether programs may read kernel memory, which lockdown=confidentiality forbids."""
    text = host.text("sys/kernel/security/lockdown")
    mode = text[text.index("[") + 1 : text.index("]")] if text and "[" in text else ""
    shown = mode or "not shown (securityfs is not mounted or there is no lockdown)"
    error = trials.attempt(trials.load_kernel_reader)
    needed_for = "reading kernel memory in probes (not possible at confidentiality)"
    if error is None:
        detail = shown if mode else f"below confidentiality; mode {shown}"
        return Capability("kernel lockdown", "ok", detail, needed_for, True)
    if mode != "confidentiality" and _lacks_privilege(host, error):
        return Capability("kernel lockdown", "unknown", f"{shown}; {_NO_PRIVILEGE}", needed_for, True)
    detail = f"{shown}; a program that reads kernel memory is refused ({error.strerror})"
    return Capability("kernel lockdown", "missing", detail, needed_for, True, remedies.LOCKDOWN)


def check_types(host: Host) -> Capability:
    """Whether the kernel publishes its types (BTF) and lets programs use them."""
    path = host.sys / "kernel/btf/vmlinux"
    needed_for = "slab cache names, user stacks of system calls"
    if not _readable(path):
        return Capability(
            "kernel types (BTF)",
            "missing",
            f"{path} is not readable",
            needed_for,
            True,
            remedies.KERNEL_TYPES,
        )
    error = trials.attempt(trials.load_task_reader)
    size = f"{path}, {path.stat().st_size / 1e6:.1f} MB"
    if error is None:
        return Capability("kernel types (BTF)", "ok", size, needed_for, True)
    if _lacks_privilege(host, error):
        return Capability("kernel types (BTF)", "unknown", f"{size}; {_NO_PRIVILEGE}", needed_for, True)
    detail = f"{size}; a program that uses them is refused ({error.strerror}; Linux 5.11)"
    return Capability("kernel types (BTF)", "missing", detail, needed_for, True)


def check_tracefs(host: Host) -> Capability:
    """Whether tracefs is mounted and its tracepoints are readable."""
    needed_for = "tracepoints of maps, processes and resident memory"
    places = [host.sys / path for path in ("kernel/tracing", "kernel/debug/tracing") if _mounted(host, f"sys/{path}")]
    for place in places:
        if _readable(place / "events/kmem/kmalloc/id"):
            return Capability("tracefs", "ok", str(place), needed_for, True)
    if places:
        detail = f"{places[0]} is mounted but not readable for this user"
        return Capability("tracefs", "missing", detail, needed_for, True, remedies.TRACEFS_ACCESS)
    detail = f"not mounted on {host.sys / 'kernel/tracing'}"
    return Capability("tracefs", "missing", detail, needed_for, True, remedies.TRACEFS)


def check_raw_tracepoints(host: Host) -> Capability:
    """Whether a program can be attached to a raw tracepoint of the kernel's allocator."""
    error = trials.attempt(trials.attach_raw_tracepoint)
    needed_for = "kernel allocations and frees (kmalloc, slab, pages)"
    if error is None:
        return Capability("raw tracepoints", "ok", "a program was attached to kfree", needed_for, True)
    return _refused(host, "raw tracepoints", error, needed_for)


def check_bcc(host: Host) -> Capability:
    """Whether the distribution's bcc is installed and loads; required where no programs were built beforehand."""
    needed_for = "compiling the probes (loader bcc)"
    folder = find_bcc()
    try:
        module = import_bcc()
    except NotCapableError as error:
        if folder is None:
            detail = "the Python package of libbcc was not found (PyPI's project of that name is another)"
        else:
            detail = str(error)
        required = not bpf_programs.OBJECT.exists()
        if not required:
            detail += f"; not needed: the probes in {bpf_programs.OBJECT} were built beforehand (loader core)"
        return Capability("bcc", "missing", detail, needed_for, required, remedies.BCC)
    return Capability("bcc", "ok", f"{getattr(module, '__version__', '?')} in {folder}", needed_for)


def check_libbpf(host: Host) -> Capability:
    """Whether libbpf.so.1 loads."""
    needed_for = "reading the kernel's types"
    try:
        library = ctypes.CDLL("libbpf.so.1")
    except OSError as error:
        return Capability("libbpf", "missing", str(error), needed_for, True, remedies.LIBBPF)
    library.libbpf_version_string.restype = ctypes.c_char_p
    version = library.libbpf_version_string().decode()
    return Capability("libbpf", "ok", f"libbpf.so.1, {version}", needed_for, True)


def check_uprobes(host: Host) -> Capability:
    """Whether functions of user libraries can be probed, and by one link a library."""
    needed_for = "CUDA and malloc calls"
    multi = trials.attempt(trials.attach_uprobe_multi)
    if multi is None:
        return Capability("uprobes", "ok", "uprobe_multi links (one a library)", needed_for)
    single = trials.attempt(trials.open_uprobe)
    if single is None:
        detail = "single probes only, no uprobe_multi (Linux 6.6): ending a recording takes seconds"
        return Capability("uprobes", "degraded", detail, needed_for)
    if _lacks_privilege(host, multi):
        return Capability("uprobes", "unknown", _NO_PRIVILEGE, needed_for)
    if not (host.sys / "bus/event_source/devices/uprobe/type").exists():
        return Capability("uprobes", "missing", "not in this kernel (CONFIG_UPROBE_EVENTS)", needed_for)
    detail = f"uprobe_multi: {multi.strerror}; through perf events: {single.strerror} (CAP_SYS_ADMIN)"
    return Capability("uprobes", "missing", detail, needed_for, remedies=remedies.UPROBES)


def check_side_band(host: Host) -> Capability:
    """Whether events about maps, exec and exit of all processes can be had."""
    setting = host.text("proc/sys/kernel/perf_event_paranoid")
    detail = f"kernel.perf_event_paranoid = {setting or 'not set'}"
    error = trials.attempt(trials.open_side_band)
    needed_for = "modules that are loaded while recording, so that their stacks get names"
    if error is None:
        return Capability("process side-band", "ok", detail, needed_for)
    return Capability(
        "process side-band",
        "missing",
        f"{error.strerror}; {detail}",
        needed_for,
        remedies=remedies.SIDE_BAND if error.errno in _DENIED else {},
    )


def check_other_processes(host: Host) -> Capability:
    """Whether /proc of other users' processes can be read."""
    needed_for = "maps, libraries and PSS of processes of other users"
    if "sys_ptrace" in effective_capabilities(host):
        return Capability("other processes", "ok", "CAP_SYS_PTRACE", needed_for)
    detail = "no CAP_SYS_PTRACE: only processes of this user"
    return Capability("other processes", "degraded", detail, needed_for, remedies=remedies.OTHER_PROCESSES)


def check_kernel_symbols(host: Host) -> Capability:
    """Whether /proc/kallsyms shows addresses."""
    setting = host.text("proc/sys/kernel/kptr_restrict")
    detail = f"kernel.kptr_restrict = {setting or 'not set'}"
    needed_for = "names of kernel functions in stacks"
    try:
        with (host.proc / "kallsyms").open() as file:
            shown = any(int(line.split()[0], 16) for line, _ in zip(file, range(100), strict=False))
    except OSError as error:
        shown, detail = False, f"{error.strerror}; {detail}"
    if shown:
        return Capability("kernel symbols", "ok", detail, needed_for)
    detail = f"/proc/kallsyms hides the addresses; {detail}"
    # 2 hides them from everybody; below, CAP_SYSLOG shows them (kallsyms_show_value, ksyms_common.c).
    remedy = remedies.KERNEL_SYMBOLS if setting == "2" else remedies.SYSLOG
    return Capability("kernel symbols", "degraded", detail, needed_for, remedies=remedy)


def check_slabinfo(host: Host) -> Capability:
    """Whether slab caches can be read."""
    path = host.proc / "slabinfo"
    needed_for = "the cross-check of kernel events with slab caches"
    if _readable(path):
        return Capability("slab statistics", "ok", str(path), needed_for)
    if not path.exists():
        return Capability("slab statistics", "missing", f"this kernel has no {path}", needed_for)
    detail = f"{path} is not readable for this user"
    return Capability("slab statistics", "degraded", detail, needed_for, remedies=remedies.SLABINFO)


def check_memlock(host: Host) -> Capability:
    """Whether the limit of locked memory bounds BPF maps, as it did before Linux 5.11."""
    needed_for = "rings and maps of tens of MiB"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Capability("locked memory", "ok", "unlimited", needed_for)
    shown = f"limit {soft // 1024} KiB"
    size = 1 << max(20, soft.bit_length())  # the next power of two above the limit
    if size > _LARGEST_TRIAL_BYTES:
        return Capability("locked memory", "unknown", f"{shown}; not tried", needed_for)
    error = trials.attempt(lambda: trials.create_ring(size))
    if error is None:
        return Capability("locked memory", "ok", f"{shown}, which does not bind BPF maps here", needed_for)
    if trials.attempt(lambda: trials.create_ring(4096)) is not None:
        return Capability("locked memory", "unknown", f"{shown}; {_NO_PRIVILEGE}", needed_for)
    detail = f"{shown}, and it binds BPF maps here"
    return Capability("locked memory", "missing", detail, needed_for, True, remedies.MEMLOCK)


def check_cgroups(host: Host) -> Capability:
    """Which cgroup versions are mounted and which has the memory controller."""
    from leakscope.record.samplers.cgroup import MemoryHierarchy, cgroup_versions

    versions = cgroup_versions(host.proc)
    hierarchy = MemoryHierarchy.find(host.proc)
    mounted = " and ".join(f"v{version}" for version in versions) or "none"
    needed_for = "memory counters of cgroups; --cgroup needs v2 mounted"
    if hierarchy is None:
        return Capability("cgroups", "degraded", f"{mounted} mounted, no memory controller", needed_for)
    detail = f"{mounted} mounted; memory controller in v{hierarchy.version} on {hierarchy.mount}"
    return Capability("cgroups", "ok" if 2 in versions else "degraded", detail, needed_for)


def check_pid_namespace(host: Host) -> Capability:
    """Whether PIDs here are those that the kernel's probes see."""
    needed_for = "naming processes by PID (-p)"
    initial = host.in_initial_pid_namespace()
    if initial is None:
        return Capability("PID namespace", "unknown", "/proc/self/ns/pid is not readable", needed_for)
    if initial:
        return Capability("PID namespace", "ok", "the host's", needed_for)
    kind = host.container()
    detail = f"not the host's{f' ({kind})' if kind else ''}: probes see other PIDs than this process"
    return Capability("PID namespace", "degraded", detail, needed_for, remedies=remedies.PID_NAMESPACE)


def check_nvml(host: Host) -> Capability:
    """Whether NVML answers, and for which GPUs."""
    from leakscope.record.samplers.gpu import open_nvml

    nvml = open_nvml()
    needed_for = "GPU memory used, by device and process"
    if nvml.available:
        names = ", ".join(gpu.name for gpu in nvml.gpus) or "no GPU"
        return Capability("NVML", "ok", f"driver {nvml.driver}: {names}", needed_for)
    if not _has_nvidia_device(host):
        detail = f"{nvml.reason}; no NVIDIA device in this host"
        return Capability("NVML", "missing", detail, needed_for)
    return Capability("NVML", "missing", nvml.reason, needed_for, remedies=remedies.NVIDIA_DRIVER)


def check_nvtx(host: Host) -> Capability:
    """Whether the library is there through which NVTX ranges are recorded."""
    needed_for = "NVTX ranges around allocations"
    if not bpf_programs.NVTX_LIBRARY.exists():
        detail = f"{bpf_programs.NVTX_LIBRARY} was not built"
        return Capability("NVTX library", "missing", detail, needed_for, remedies=remedies.NVTX_LIBRARY)
    detail = f"start a service with NVTX_INJECTION64_PATH={bpf_programs.NVTX_LIBRARY}; record -- CMD does it by itself"
    return Capability("NVTX library", "ok", detail, needed_for)


CHECKS: tuple[Callable[[Host], Capability], ...] = (
    check_privilege,
    check_ring,
    check_raw_tracepoints,
    check_types,
    check_tracefs,
    check_lockdown,
    check_libbpf,
    check_bcc,
    check_memlock,
    check_uprobes,
    check_side_band,
    check_other_processes,
    check_kernel_symbols,
    check_slabinfo,
    check_cgroups,
    check_pid_namespace,
    check_nvml,
    check_nvtx,
)
"""All checks of the host, what is required first."""


def _state(error: OSError | None) -> State:
    return "ok" if error is None else "missing"


def _lacks_privilege(host: Host, error: OSError) -> bool:
    """Whether a refusal says no more than that this process may not use BPF at all."""
    have = effective_capabilities(host)
    return error.errno in _DENIED and "sys_admin" not in have and not {"bpf", "perfmon"} <= have


def _refused(host: Host, name: str, error: OSError, needed_for: str) -> Capability:
    """A required capability that the kernel refused; without the privilege nothing can be told about it."""
    if _lacks_privilege(host, error):
        return Capability(name, "unknown", _NO_PRIVILEGE, needed_for, True)
    return Capability(name, "missing", error.strerror or str(error), needed_for, True)


def _readable(path: Path) -> bool:
    """Whether the file opens; access(2) would leave out the capabilities of a user who is not root."""
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False


def _mounted(host: Host, path: str) -> bool:
    place = str(host.root / path)
    mounts = (host.text("proc/self/mounts") or "").splitlines()
    return any(fields[1] == place and fields[2] == "tracefs" for line in mounts if (fields := line.split()))


def _has_nvidia_device(host: Host) -> bool:
    vendors = (host.sys / "bus/pci/devices").glob("*/vendor")
    return (host.root / "dev/nvidiactl").exists() or any(
        host.text(str(path.relative_to(host.root))) == "0x10de" for path in vendors
    )

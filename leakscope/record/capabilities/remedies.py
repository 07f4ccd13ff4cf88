"""Commands that mend what is missing, by platform. docs/permissions.md has the whole manifests."""

from __future__ import annotations

from leakscope.model.capability import PLATFORMS, Platform

Remedies = dict[Platform, str]

LINUX_CAPABILITIES = ("bpf", "perfmon", "sys_ptrace", "syslog", "dac_read_search")
"""What a recorder without root needs; what each is for stands in docs/permissions.md."""

_SEE = "(whole manifest: docs/permissions.md)"


def ordered(remedies: Remedies, first: Platform) -> Remedies:
    """The same remedies, that of the detected platform first."""
    names = [first, *(name for name in PLATFORMS if name != first)]
    return {name: remedies[name] for name in names if name in remedies}


def _everywhere(host: str, container: str = "", kubernetes: str = "") -> Remedies:
    remedies: Remedies = {"debian": host, "fedora": host}
    remedies["container"] = container or f"on the host: {host}"
    remedies["kubernetes"] = kubernetes or f"on the node: {host}"
    return remedies


def _add_capabilities(*names: str) -> Remedies:
    upper = [name.upper() for name in names]
    return {
        "container": "docker run " + " ".join(f"--cap-add={name}" for name in upper) + " …",
        "kubernetes": f"securityContext.capabilities.add: [{', '.join(upper)}] {_SEE}",
    }


_SUDO = 'sudo "$(command -v leakscope)" record …'

PRIVILEGE: Remedies = {"debian": _SUDO, "fedora": _SUDO, **_add_capabilities(*LINUX_CAPABILITIES)}
SECCOMP: Remedies = {
    "container": "docker run --security-opt seccomp=unconfined …",
    "kubernetes": f"securityContext.seccompProfile.type: Unconfined {_SEE}",
}
LOCKDOWN: Remedies = {
    "debian": "sed -i s/=confidentiality/=integrity/ /etc/default/grub && update-grub && reboot",
    "fedora": "grubby --update-kernel=ALL --remove-args=lockdown --args=lockdown=integrity && reboot",
    "container": "boot the host with the kernel parameter lockdown=integrity",
    "kubernetes": "boot the node with lockdown=integrity (Bottlerocket, Talos: docs/permissions.md)",
}
KERNEL_TYPES: Remedies = {
    "debian": "apt-get install -y linux-image-$(dpkg --print-architecture) && reboot",
    "fedora": "dnf install -y kernel && reboot",
    "container": "docker run -v /sys/kernel/btf:/sys/kernel/btf:ro …",
    "kubernetes": f"mount hostPath /sys/kernel/btf read-only {_SEE}",
}
TRACEFS: Remedies = _everywhere(
    "mount -t tracefs tracefs /sys/kernel/tracing",
    "docker run -v /sys/kernel/tracing:/sys/kernel/tracing:ro …",
    f"mount hostPath /sys/kernel/tracing read-only {_SEE}",
)
TRACEFS_ACCESS: Remedies = {
    "debian": _SUDO,
    "fedora": _SUDO,
    **_add_capabilities("dac_read_search"),
}
BCC: Remedies = {
    "debian": "apt-get install -y python3-bpfcc",
    "fedora": "dnf install -y python3-bcc",
    "container": "add to the Dockerfile: RUN apt-get update && apt-get install -y python3-bpfcc",
    "kubernetes": "use an image whose Dockerfile has: RUN apt-get update && apt-get install -y python3-bpfcc",
}
LIBBPF: Remedies = {
    "debian": "apt-get install -y libbpf1",
    "fedora": "dnf install -y libbpf",
    "container": "add to the Dockerfile: RUN apt-get update && apt-get install -y libbpf1",
    "kubernetes": "use an image whose Dockerfile has: RUN apt-get update && apt-get install -y libbpf1",
}
UPROBES: Remedies = {"debian": _SUDO, "fedora": _SUDO, **_add_capabilities("sys_admin")}
SIDE_BAND: Remedies = {"debian": _SUDO, "fedora": _SUDO, **_add_capabilities("perfmon")}
OTHER_PROCESSES: Remedies = {
    "debian": _SUDO,
    "fedora": _SUDO,
    "container": "docker run --cap-add=SYS_PTRACE --security-opt apparmor=unconfined …",
    "kubernetes": f"capabilities.add: [SYS_PTRACE] and appArmorProfile.type: Unconfined {_SEE}",
}
KERNEL_SYMBOLS: Remedies = _everywhere("sysctl -w kernel.kptr_restrict=1")
SYSLOG: Remedies = {"debian": _SUDO, "fedora": _SUDO, **_add_capabilities("syslog")}
SLABINFO: Remedies = {"debian": _SUDO, "fedora": _SUDO, **_add_capabilities("dac_read_search")}
MEMLOCK: Remedies = {
    "debian": "ulimit -l unlimited",
    "fedora": "ulimit -l unlimited",
    "container": "docker run --ulimit memlock=-1:-1 …",
    "kubernetes": f"capabilities.add: [SYS_RESOURCE] {_SEE}",
}
NVTX_LIBRARY: Remedies = _everywhere("make programs")
PID_NAMESPACE: Remedies = {
    "container": "docker run --pid=host …",
    "kubernetes": f"spec.hostPID: true {_SEE}",
}
NVIDIA_DRIVER: Remedies = {
    "debian": "apt-get install -y nvidia-driver (Ubuntu: ubuntu-drivers install)",
    "fedora": "dnf install -y akmod-nvidia (from RPM Fusion)",
    "container": "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …",
    "kubernetes": f"runtimeClassName: nvidia and env NVIDIA_VISIBLE_DEVICES=all {_SEE}",
}

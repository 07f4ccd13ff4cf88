"""The host that the checks look at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from leakscope.model.capability import Platform

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_OVERLAYS = ("overlay", "fuse-overlayfs", "fuse.fuse-overlayfs")


@dataclass(frozen=True)
class Host:
    """File systems to look at; ``root`` differs from ``/`` only in tests."""

    root: Path = Path("/")

    @property
    def proc(self) -> Path:
        """Its /proc."""
        return self.root / "proc"

    @property
    def sys(self) -> Path:
        """Its /sys."""
        return self.root / "sys"

    def text(self, path: str) -> str | None:
        """Content of a small file under the root, stripped; None when it is not readable."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def platform(self) -> Platform:
        """The detected platform: a pod, a container, or the distribution's family (Debian's if unknown)."""
        if "KUBERNETES_SERVICE_HOST" in os.environ or "kubepods" in (self.text("proc/self/cgroup") or ""):
            return "kubernetes"
        if self.container():
            return "container"
        release = self.os_release()
        families = {release.get("ID", ""), *release.get("ID_LIKE", "").split()}
        return "fedora" if families & {"fedora", "rhel", "centos"} else "debian"

    def in_initial_pid_namespace(self) -> bool | None:
        """Whether PIDs here are the host's; None when /proc does not tell."""
        try:
            return (self.proc / "self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE
        except OSError:
            return None

    def container(self) -> str:
        """The kind of container that this process runs in; empty outside of one.

        Virtual machines made of a container image keep its marker files, so these count only on an overlay or
        outside the host's PID namespace.
        """
        cgroup = self.text("proc/self/cgroup") or ""
        for word in ("kubepods", "docker", "containerd", "libpod", "lxc"):
            if word in cgroup:
                return word
        if self._root_file_system() not in _OVERLAYS and self.in_initial_pid_namespace() is not False:
            return ""
        for marker, kind in (("run/.containerenv", "podman"), (".dockerenv", "docker")):
            if (self.root / marker).exists():
                return kind
        return os.environ.get("container", "")  # noqa: SIM112, as podman and systemd-nspawn spell it

    def _root_file_system(self) -> str:
        mounts = [line.split() for line in (self.text("proc/self/mounts") or "").splitlines()]
        return next((fields[2] for fields in reversed(mounts) if fields[1] == "/"), "")

    def os_release(self) -> dict[str, str]:
        """Fields of os-release(5)."""
        text = self.text("etc/os-release") or self.text("usr/lib/os-release") or ""
        pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
        return {key.strip(): value.strip().strip("\"'") for key, value in pairs}

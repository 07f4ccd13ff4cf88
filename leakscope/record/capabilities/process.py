"""What can be recorded of one process: its maps, and the CUDA libraries in them."""

from __future__ import annotations

import re
from pathlib import Path

from leakscope.errors import BadInputError
from leakscope.model.capability import Capability
from leakscope.record.capabilities import remedies
from leakscope.record.capabilities.host import Host

# Wheels may add a hash: libcudart-1a2b.so.12
_CUDA_LIBRARY = re.compile(r"/lib(?:cuda|cudart)(?:-[0-9a-f]+)?\.so[.\d]*$")
_DELETED = " (deleted)"


def check_process(host: Host, pid: int) -> list[Capability]:
    """Capabilities of one process: whether its maps are readable, and its CUDA libraries.

    :raises BadInputError: when there is no such process.
    """
    folder = host.proc / str(pid)
    if not folder.is_dir():
        raise BadInputError(f"no process with PID {pid} (ps -e lists them)")
    name = (host.text(f"proc/{pid}/comm") or "?").strip()
    needed_for = "libraries and symbols of the process"
    try:
        maps = (folder / "maps").read_text(errors="surrogateescape")
    except PermissionError:
        detail = f"{name}: /proc/{pid}/maps is not readable for this user"
        return [
            Capability(f"process {pid}", "missing", detail, needed_for, remedies=remedies.OTHER_PROCESSES),
            Capability(f"CUDA of {pid}", "unknown", "maps not readable", _CUDA_USE),
        ]
    except OSError as error:
        reason = f"{error.strerror}: it may just have ended"
        raise BadInputError(f"process {pid} cannot be read ({reason})") from error
    if not maps:
        detail = f"{name}: a kernel thread or a zombie, without memory maps"
        return [Capability(f"process {pid}", "degraded", detail, needed_for)]
    readable = Capability(f"process {pid}", "ok", f"{name}, {len(maps.splitlines())} maps", needed_for)
    return [readable, _check_cuda(folder, pid, cuda_libraries(maps)), _check_nvtx(host, pid)]


_CUDA_USE = "GPU allocations of the process"


def cuda_libraries(maps: str) -> dict[str, int]:
    """Paths (as the process sees them) of mapped libcuda and libcudart → inode, from the text of
    /proc/PID/maps.
    """
    found = {}
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and _CUDA_LIBRARY.search(fields[5].removesuffix(_DELETED)):
            found[fields[5]] = int(fields[4])
    return found


def _check_cuda(folder: Path, pid: int, libraries: dict[str, int]) -> Capability:
    name = f"CUDA of {pid}"
    if not libraries:
        detail = "no libcuda or libcudart mapped now; libraries loaded later are found then"
        return Capability(name, "missing", detail, _CUDA_USE)
    unreachable = [path for path, inode in libraries.items() if not _is_same_file(folder, path, inode)]
    listed = ", ".join(libraries)
    if unreachable:
        detail = f"{listed}; not the mapped file any more: {', '.join(unreachable)} (replaced while it runs?)"
        return Capability(name, "degraded", detail, _CUDA_USE)
    if not any("/libcudart" in path for path in libraries):
        listed += " (no libcudart: linked statically or unused; its driver calls are seen)"
    return Capability(name, "ok", listed, _CUDA_USE)


def _check_nvtx(host: Host, pid: int) -> Capability:
    from leakscope.record.probes.nvtx import is_injected, not_available

    name, needed_for = f"NVTX of {pid}", "NVTX ranges of the process"
    if is_injected(pid, host.proc):
        return Capability(name, "ok", "started with leakscope's injection library", needed_for)
    return Capability(name, "missing", not_available(pid), needed_for)


def _is_same_file(folder: Path, path: str, inode: int) -> bool:
    """Whether the path, in the process's own mount namespace, still is the file that it maps."""
    if path.endswith(_DELETED):
        return False
    try:
        return Path(f"{folder}/root{path}").stat().st_ino == inode
    except OSError:
        return False

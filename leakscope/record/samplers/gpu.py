"""GPU memory from NVML (nvidia-ml-py), which is loaded on first use. No GPU is a fact, not an error."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from leakscope.record.samplers.base import Reading, describe_error


@dataclass(frozen=True)
class Gpu:
    """One physical GPU: NVML handle, index, UUID, product name and total memory."""

    handle: Any
    index: int
    uuid: str
    name: str
    total_bytes: int


@dataclass(frozen=True)
class NvmlState:
    """What NVML offers here. ``reason`` says why ``available`` is false; ``gpus`` may then not be trusted."""

    available: bool
    reason: str = ""
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()


class GpuSampler:
    """``gpu_used`` and ``gpu_total`` of each device, ``gpu_process_used`` of each process that uses one.

    Scope device has the UUID as ``scope_id``, scope process the PID. ``gpu_used`` leaves out what the driver
    reserves for itself, as nvidia-smi does; drivers before 510 cannot tell the two apart and include it (fact
    ``gpu_used_includes_reserved``). ``gpu_process_used`` sums a process over the GPUs; a process with compute
    and graphics contexts is on both lists of NVML with the same figure and is counted once. NVML names PIDs
    of the host's PID namespace. Where it does not know a process's memory (WSL, some virtual GPUs) there is
    no row.
    """

    name = "gpu"
    sparse = False

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self._state: NvmlState | None = None
        self._includes_reserved = False

    @property
    def state(self) -> NvmlState:
        """NVML as found on first use."""
        if self._state is None:
            self._state = open_nvml()
        return self._state

    def sample(self, ts_ns: int) -> Iterator[Reading]:
        """Readings of every device and of every process that uses one."""
        if not self.state.available:
            return
        process_bytes: defaultdict[int, int] = defaultdict(int)
        for gpu in self.state.gpus:
            used = self._read(lambda gpu=gpu: self._used_bytes(gpu), "NVML memory info")  # type: ignore[misc]
            if used is not None:
                yield Reading("device", gpu.uuid, "gpu_used", used)
                yield Reading("device", gpu.uuid, "gpu_total", gpu.total_bytes)
            for pid, size_bytes in self._processes(gpu).items():
                process_bytes[pid] += size_bytes
        for pid, size_bytes in sorted(process_bytes.items()):
            yield Reading("process", str(pid), "gpu_process_used", size_bytes)

    def facts(self) -> dict[str, Any]:
        """``nvml``: available, reason, driver; ``gpus``: index, uuid, name, total_bytes of each."""
        state = self.state
        for gpu in state.gpus[:1]:
            # Finds out which form of the call this driver has.
            self._read(lambda gpu=gpu: self._used_bytes(gpu), "NVML memory info")  # type: ignore[misc]
        return {
            "nvml": {
                "available": state.available,
                "reason": state.reason,
                "driver": state.driver,
                "gpu_used_includes_reserved": self._includes_reserved,
            },
            "gpus": [
                {"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "total_bytes": gpu.total_bytes}
                for gpu in state.gpus
            ],
        }

    def close(self) -> None:
        """Give NVML back; a later sample opens it again."""
        if self._state is not None and self._state.available:
            import pynvml

            self._read(pynvml.nvmlShutdown, "NVML shutdown")
        self._state = None

    def _used_bytes(self, gpu: Gpu) -> int:
        import pynvml

        if not self._includes_reserved:
            try:
                return int(pynvml.nvmlDeviceGetMemoryInfo(gpu.handle, version=pynvml.nvmlMemory_v2).used)
            except pynvml.NVMLError as error:
                if not _is_missing_function(error):
                    raise
                self._includes_reserved = True
        return int(pynvml.nvmlDeviceGetMemoryInfo(gpu.handle).used)

    def _processes(self, gpu: Gpu) -> dict[int, int]:
        """PID → bytes on one GPU. A process has one entry for each MIG instance that it uses."""
        import pynvml

        entries: dict[tuple[int, int, int], int] = {}
        for kind in ("Compute", "Graphics"):
            processes = self._read(
                lambda kind=kind: _running_processes(pynvml, kind, gpu.handle),  # type: ignore[misc]
                f"NVML {kind.lower()} processes",
            )
            for process in processes or ():
                if process.usedGpuMemory is not None:
                    key = (process.pid, process.gpuInstanceId, process.computeInstanceId)
                    entries[key] = max(entries.get(key, 0), int(process.usedGpuMemory))
        by_pid: defaultdict[int, int] = defaultdict(int)
        for (pid, _, _), size_bytes in entries.items():
            by_pid[pid] += size_bytes
        return by_pid

    def _read(self, call: Callable[[], Any], what: str) -> Any:
        """The result of ``call``, or None and an error counted."""
        import pynvml

        try:
            return call()
        except pynvml.NVMLError as error:
            self.errors[describe_error(error, what)] += 1
            return None


def _running_processes(pynvml: Any, kind: str, handle: Any) -> list[Any]:
    """Processes of ``kind`` Compute or Graphics; drivers before 510 lack the third form of the call."""
    for version in ("v3", "v2"):
        try:
            return list(getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses_{version}")(handle))
        except pynvml.NVMLError_NotSupported:
            return []  # a device without graphics, or without compute
        except pynvml.NVMLError as error:
            if version == "v2" or not _is_missing_function(error):
                raise
    return []


def _is_missing_function(error: Exception) -> bool:
    import pynvml

    missing = (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
    return getattr(error, "value", None) in missing


def open_nvml() -> NvmlState:
    """Initialise NVML and list the GPUs. Never raises: what fails becomes the state's ``reason``."""
    try:
        import pynvml
    except ImportError:
        return NvmlState(False, "the Python package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvmlState(False, str(error))
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        gpus = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        return NvmlState(False, str(error))
    return NvmlState(True, "", driver, gpus)


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        total_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        total_bytes = 0  # devices that share the host's memory have no figure of their own
    return Gpu(
        handle,
        index,
        _text(pynvml.nvmlDeviceGetUUID(handle)),
        _text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes,
    )


def _text(value: str | bytes) -> str:
    """Older releases of the binding return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value

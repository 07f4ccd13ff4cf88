"""The functions of libcuda, libcudart and libc that allocate, free, or change contexts, and what each does.

Signatures follow cuda.h and cuda_runtime_api.h. One table drives the BPF programs (bpf_programs/ranges.bpf.h,
sizes.bpf.h, functions.bpf.h): their enums are repeated here by number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from leakscope.record.records import SPACE_ARRAY, SPACE_HANDLE, SPACE_HEAP, SPACE_MEMORY

(
    NONE, ALLOC, FREE, REALLOC, CONTEXT_SET, CONTEXT_PUSH, CONTEXT_POP, CONTEXT_CREATE, CONTEXT_RETAIN, CONTEXT_DESTROY,
    DEVICE_RESET, HANDLE_MAP, HANDLE_UNMAP, HANDLE_RELEASE, HANDLE_RETAIN, LAUNCH_DRIVER, LAUNCH_RUNTIME, CALL,
    LAUNCH_COOPERATIVE, LAUNCH_CONFIG_DRIVER, LAUNCH_CONFIG_RUNTIME, IMAGE_LOAD, IMAGE_FILE, IMAGE_REGISTER,
    KERNEL_REGISTER, KERNEL_GET, KERNEL_ALIAS, KERNEL_PARAMETER,
) = range(28)  # fmt: skip
(
    SIZE_NONE, SIZE_ARG, SIZE_PRODUCT, SIZE_PITCH, SIZE_ARRAY, SIZE_ARRAY_3D, SIZE_RUNTIME_ARRAY, SIZE_RUNTIME_ARRAY_3D,
    SIZE_PITCHED_PTR, SIZE_MIPMAPPED,
) = range(10)  # fmt: skip
ADDR_NONE, ADDR_OUT, ADDR_RETURN, ADDR_ARG = range(4)
SUCCESS_ZERO, SUCCESS_NON_NULL, SUCCESS_ALWAYS = range(3)


@dataclass(frozen=True)
class FunctionProbe:
    """One probed function: its role, and where its size, address and success are found."""

    api: str
    library: str  # cuda, cudart, libc
    role: int
    layer: str = "gpu"
    kind: str = "device"
    size_how: int = SIZE_NONE
    size_arg: int = 0
    size_arg2: int = 0
    addr_how: int = ADDR_NONE
    addr_arg: int = 0
    success: int = SUCCESS_ZERO
    space: int = SPACE_MEMORY
    group: str = "memory"  # memory, launch, kernel (where kernels come from), heap: what switches it on

    def spec(self, enabled: bool) -> bytes:
        """The row of the BPF map `functions` (struct function_spec)."""
        return struct.pack(
            "=10B6x",
            self.role,
            self.size_how,
            self.size_arg,
            self.size_arg2,
            self.addr_how,
            self.addr_arg,
            self.success,
            self.space,
            int(enabled),
            int(self.group != "heap"),
        )


def _alloc(api: str, kind: str, size_arg: int, library: str, **more: object) -> list[FunctionProbe]:
    layer = "host" if kind in ("pinned", "registered") else "gpu"
    values: dict[str, object] = {"size_how": SIZE_ARG, "size_arg": size_arg, "addr_how": ADDR_OUT, **more}
    return [FunctionProbe(api, library, ALLOC, layer, kind, **values)]  # type: ignore[arg-type]


def _free(api: str, library: str, space: int = SPACE_MEMORY) -> list[FunctionProbe]:
    return [FunctionProbe(api, library, FREE, addr_how=ADDR_ARG, space=space)]


def _plain(role: int, library: str, *apis: str, group: str = "memory") -> list[FunctionProbe]:
    return [FunctionProbe(api, library, role, group=group) for api in apis]


def _with_stream_twins(*apis: str) -> list[str]:
    """Functions that take a stream have twins for per-thread default streams (cuda.h: _ptsz)."""
    return [name for api in apis for name in (api, f"{api}_ptsz")]


def _driver() -> list[FunctionProbe]:
    lib = "cuda"
    table: list[FunctionProbe] = []
    for api in ("cuMemAlloc_v2", "cuMemAlloc"):
        table += _alloc(api, "device", 1, lib)
    table += _alloc("cuMemAllocPitch_v2", "device", 2, lib, size_how=SIZE_PITCH)
    table += _alloc("cuMemAllocManaged", "managed", 1, lib)
    for api in _with_stream_twins("cuMemAllocAsync", "cuMemAllocFromPoolAsync"):
        table += _alloc(api, "async", 1, lib)
    for api in (
        "cuMemFree_v2",
        "cuMemFree",
        *_with_stream_twins("cuMemFreeAsync"),
        "cuMemFreeHost",
        "cuMemHostUnregister",
    ):
        table += _free(api, lib)
    for api in ("cuMemAllocHost_v2", "cuMemHostAlloc"):
        table += _alloc(api, "pinned", 1, lib)
    table += _alloc("cuMemHostRegister_v2", "registered", 1, lib, addr_how=ADDR_ARG)
    table += _alloc("cuMemCreate", "vmm", 1, lib, space=SPACE_HANDLE)
    table += _plain(HANDLE_MAP, lib, "cuMemMap") + _plain(HANDLE_UNMAP, lib, "cuMemUnmap")
    table += _plain(HANDLE_RELEASE, lib, "cuMemRelease") + _plain(HANDLE_RETAIN, lib, "cuMemRetainAllocationHandle")
    table += _alloc("cuArrayCreate_v2", "array", 1, lib, size_how=SIZE_ARRAY, space=SPACE_ARRAY)
    table += _alloc("cuArray3DCreate_v2", "array", 1, lib, size_how=SIZE_ARRAY_3D, space=SPACE_ARRAY)
    table += _alloc("cuMipmappedArrayCreate", "array", 1, lib, size_how=SIZE_MIPMAPPED, space=SPACE_ARRAY)
    table += _free("cuArrayDestroy", lib, SPACE_ARRAY) + _free("cuMipmappedArrayDestroy", lib, SPACE_ARRAY)
    for api in ("cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle"):
        table += _alloc(api, "ipc", 0, lib, size_how=SIZE_NONE)
    table += _free("cuIpcCloseMemHandle", lib)
    table += _plain(CONTEXT_CREATE, lib, "cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4")
    table += _plain(CONTEXT_SET, lib, "cuCtxSetCurrent") + _plain(CONTEXT_PUSH, lib, "cuCtxPushCurrent_v2")
    table += _plain(CONTEXT_POP, lib, "cuCtxPopCurrent_v2") + _plain(CONTEXT_DESTROY, lib, "cuCtxDestroy_v2")
    table += _plain(CONTEXT_RETAIN, lib, "cuDevicePrimaryCtxRetain")
    table += _plain(DEVICE_RESET, lib, "cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxReset")
    table += _plain(
        CALL, lib, "cuDevicePrimaryCtxRelease_v2", "cuMemAddressReserve", "cuMemAddressFree", "cuMemPoolCreate",
        "cuMemPoolDestroy", *_with_stream_twins("cuMemPoolTrimTo"),
    )  # fmt: skip
    table += _plain(LAUNCH_DRIVER, lib, *_with_stream_twins("cuLaunchKernel"), group="launch")
    table += _plain(LAUNCH_COOPERATIVE, lib, *_with_stream_twins("cuLaunchCooperativeKernel"), group="launch")
    table += _plain(LAUNCH_CONFIG_DRIVER, lib, *_with_stream_twins("cuLaunchKernelEx"), group="launch")
    table += _plain(
        CALL, lib, "cuGraphInstantiateWithFlags", *_with_stream_twins("cuGraphInstantiateWithParams", "cuGraphLaunch"),
        "cuGraphExecDestroy", group="launch",
    )  # fmt: skip
    table += _plain(
        IMAGE_LOAD, lib, "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary", "cuLibraryLoadData",
        group="kernel",
    )  # fmt: skip
    table += _plain(IMAGE_FILE, lib, "cuModuleLoad", "cuLibraryLoadFromFile", group="kernel")
    table += _plain(KERNEL_GET, lib, "cuModuleGetFunction", "cuLibraryGetKernel", group="kernel")
    table += _plain(KERNEL_ALIAS, lib, "cuKernelGetFunction", "cuLibraryGetModule", group="kernel")
    table += _plain(KERNEL_PARAMETER, lib, "cuFuncGetParamInfo", "cuKernelGetParamInfo", group="kernel")
    return table


def _runtime() -> list[FunctionProbe]:
    lib = "cudart"
    table = _alloc("cudaMalloc", "device", 1, lib)
    table += _alloc("cudaMallocPitch", "device", 2, lib, size_how=SIZE_PITCH)
    table += _alloc("cudaMalloc3D", "device", 0, lib, size_how=SIZE_PITCHED_PTR)
    table += _alloc("cudaMallocManaged", "managed", 1, lib)
    for api in _with_stream_twins("cudaMallocAsync", "cudaMallocFromPoolAsync"):
        table += _alloc(api, "async", 1, lib)
    for api in ("cudaFree", *_with_stream_twins("cudaFreeAsync"), "cudaFreeHost", "cudaHostUnregister"):
        table += _free(api, lib)
    for api in ("cudaMallocHost", "cudaHostAlloc"):
        table += _alloc(api, "pinned", 1, lib)
    table += _alloc("cudaHostRegister", "registered", 1, lib, addr_how=ADDR_ARG)
    table += _alloc("cudaMallocArray", "array", 2, lib, size_how=SIZE_RUNTIME_ARRAY, space=SPACE_ARRAY)
    table += _alloc("cudaMalloc3DArray", "array", 2, lib, size_how=SIZE_RUNTIME_ARRAY_3D, space=SPACE_ARRAY)
    table += _alloc("cudaMallocMipmappedArray", "array", 2, lib, size_how=SIZE_RUNTIME_ARRAY_3D, space=SPACE_ARRAY)
    table += _free("cudaFreeArray", lib, SPACE_ARRAY) + _free("cudaFreeMipmappedArray", lib, SPACE_ARRAY)
    table += _alloc("cudaIpcOpenMemHandle", "ipc", 0, lib, size_how=SIZE_NONE) + _free("cudaIpcCloseMemHandle", lib)
    table += _plain(DEVICE_RESET, lib, "cudaDeviceReset")
    # __cudaLaunchKernel: what the launch stubs of nvcc 12.8 and later call, with a cudaKernel_t.
    launches = _with_stream_twins("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "__cudaLaunchKernel")
    table += _plain(LAUNCH_RUNTIME, lib, *launches, group="launch")
    table += _plain(LAUNCH_CONFIG_RUNTIME, lib, *_with_stream_twins("cudaLaunchKernelExC"), group="launch")
    table += [
        FunctionProbe(api, lib, role, success=SUCCESS_ALWAYS, group="kernel")
        for api, role in (("__cudaRegisterFatBinary", IMAGE_REGISTER), ("__cudaRegisterFunction", KERNEL_REGISTER))
    ]
    table += _plain(KERNEL_ALIAS, lib, "cudaGetFuncBySymbol", "cudaGetKernel", "__cudaGetKernel", group="kernel")
    table += _plain(IMAGE_LOAD, lib, "cudaLibraryLoadData", group="kernel")
    table += _plain(IMAGE_FILE, lib, "cudaLibraryLoadFromFile", group="kernel")
    table += _plain(KERNEL_GET, lib, "cudaLibraryGetKernel", group="kernel")
    table += _plain(KERNEL_PARAMETER, lib, "cudaFuncGetParamInfo", group="kernel")
    table += _plain(
        CALL,
        lib,
        "cudaGraphInstantiate",
        *_with_stream_twins("cudaGraphLaunch"),
        "cudaGraphExecDestroy",
        group="launch",
    )
    return table


def _libc() -> list[FunctionProbe]:
    heap: dict[str, object] = {
        "layer": "host", "kind": "heap", "success": SUCCESS_NON_NULL, "space": SPACE_HEAP, "group": "heap",
        "addr_how": ADDR_RETURN, "size_how": SIZE_ARG,
    }  # fmt: skip

    def probe(api: str, role: int = ALLOC, **more: object) -> FunctionProbe:
        return FunctionProbe(api, "libc", role, **{**heap, **more})  # type: ignore[arg-type]

    return [
        probe("malloc", size_arg=0),
        probe("calloc", size_how=SIZE_PRODUCT, size_arg=0, size_arg2=1),
        probe("realloc", REALLOC, size_arg=1, addr_arg=0),
        probe("aligned_alloc", size_arg=1),
        probe("memalign", size_arg=1),
        probe("valloc", size_arg=0),
        probe("posix_memalign", size_arg=2, addr_how=ADDR_OUT, success=SUCCESS_ZERO),
        probe("free", FREE, addr_how=ADDR_ARG, size_how=SIZE_NONE, success=SUCCESS_ALWAYS),
    ]


FUNCTIONS: tuple[FunctionProbe, ...] = (*_driver(), *_runtime(), *_libc())
"""All probed functions; the index is the attach cookie and the row of the BPF map `functions`."""

LIBRARY_PATTERNS = {
    "cuda": r"libcuda\.so(\.|$)",
    "cudart": r"libcudart(\.so|-)",
    "libc": r"libc(\.so\.6|-2\.\d+\.so)$",
}
"""File names of the libraries (a wheel's libcudart may carry a hash: libcudart-d0da41ae.so.11.0)."""

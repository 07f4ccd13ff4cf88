"""The sample programs with CUDA do what their reports say, checked against /proc and the stand-in's own count."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from recording import BIN
from sample_runs import KIB, MIB, command, descriptors, held, run

pytestmark = pytest.mark.usefixtures("samples")


DRIVER_EXPORTS = """
cuInit cuDriverGetVersion cuDeviceGet cuDeviceGetCount cuDeviceGetName cuDeviceTotalMem_v2 cuMemGetInfo_v2
cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxSetCurrent cuCtxGetCurrent
cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxSynchronize cuDevicePrimaryCtxRetain
cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2
cuMemAlloc_v2 cuMemFree_v2 cuMemAllocPitch_v2 cuMemAllocManaged
cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz
cuMemFreeAsync cuMemFreeAsync_ptsz cuMemPoolCreate cuMemPoolDestroy cuDeviceGetDefaultMemPool
cuMemAllocHost_v2 cuMemHostAlloc cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister
cuMemCreate cuMemRelease cuMemAddressReserve cuMemAddressFree cuMemMap cuMemUnmap cuMemSetAccess
cuMemRetainAllocationHandle
cuArrayCreate_v2 cuArray3DCreate_v2 cuArrayDestroy cuMipmappedArrayCreate cuMipmappedArrayDestroy
cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload cuModuleGetFunction
cuLibraryLoadData cuLibraryUnload cuLibraryGetKernel cuKernelGetFunction cuFuncGetParamInfo cuKernelGetParamInfo
cuLaunchKernel cuLaunchKernel_ptsz cuLaunchKernelEx cuLaunchKernelEx_ptsz
cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz
cuGraphCreate cuGraphDestroy cuGraphInstantiateWithFlags cuGraphLaunch cuGraphLaunch_ptsz cuGraphExecDestroy
cuGetProcAddress_v2 standin_read_usage
"""
RUNTIME_EXPORTS = """
cudaGetDeviceCount cudaGetDevice cudaSetDevice cudaDeviceReset cudaDeviceSynchronize cudaGetLastError
cudaGetErrorString cudaMemGetInfo
cudaMalloc cudaFree cudaMallocPitch cudaMalloc3D cudaMallocManaged
cudaMallocAsync cudaMallocAsync_ptsz cudaMallocFromPoolAsync cudaMallocFromPoolAsync_ptsz
cudaFreeAsync cudaFreeAsync_ptsz cudaDeviceGetDefaultMemPool
cudaMallocHost cudaHostAlloc cudaFreeHost cudaHostRegister cudaHostUnregister
cudaMallocArray cudaMalloc3DArray cudaFreeArray
cudaIpcGetMemHandle cudaIpcOpenMemHandle cudaIpcCloseMemHandle
cudaLaunchKernel cudaLaunchKernel_ptsz cudaLaunchKernelExC cudaLaunchCooperativeKernel cudaGetFuncBySymbol
__cudaRegisterFatBinary __cudaRegisterFatBinaryEnd __cudaUnregisterFatBinary __cudaRegisterFunction
"""
FAMILIES = {  # name: (layer, bytes of one object)
    "device": ("gpu", 250_000),
    "pitch": ("gpu", 1024 * 16),
    "volume": ("gpu", 1024 * 8 * 4),
    "managed": ("gpu", 130_000),
    "async": ("gpu", 65_000),
    "async_per_thread": ("gpu", 12_000),
    "pool": ("gpu", 33_000),
    "pinned": ("host", 50_000),
    "pinned_default": ("host", 40_000),
    "registered": ("host", 24_576),
    "array": ("gpu", 32_768),
    "array3d": ("gpu", 4_096),
    "driver_device": ("gpu", 70_000),
    "driver_async": ("gpu", 90_000),
    "vmm": ("gpu", 2 * MIB),
    "vmm_mapping": ("gpu", 2 * MIB),
    "driver_array": ("gpu", 8_192),
    "mipmap": ("gpu", 21_504),
}


def section(elf: ELFFile, name: str) -> Any:
    found = elf.get_section_by_name(name)
    assert found is not None
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_family_leaks_to_the_byte(family: str) -> None:
    layer, size_bytes = FAMILIES[family]
    report = run("cuda_leak", "--families", family, "--count", 3, "--churn", 5, "--failing", 0)
    assert report["leaked"] == {layer: {"objects": 3, "bytes": 3 * size_bytes}}
    assert [(site["function"], site["bytes"]) for site in report["sites"]] == [(f"leak_{family}", 3 * size_bytes)]
    assert report["churned"] == 15
    standin = report["standin"]
    assert standin["device_bytes"] - standin["pooled_bytes"] == (3 * size_bytes if layer == "gpu" else 0)
    assert standin["pinned_bytes"] == (3 * size_bytes if layer == "host" else 0)


def test_cuda_ipc_mapping_takes_no_device_memory() -> None:
    report = run("cuda_leak", "--families", "ipc", "--count", 3)
    assert report["leaked"] == {}
    assert (report["sites"][0]["kind"], report["sites"][0]["objects"]) == ("ipc", 3)
    assert report["standin"]["device_bytes"] == 0


def test_cuda_leak_of_all_families_adds_up_and_failing_calls_leak_nothing() -> None:
    with held("cuda_leak", "--count", 2, "--failing", 7) as report:
        gpu = sum(2 * size for layer, size in FAMILIES.values() if layer == "gpu")
        host = sum(2 * size for layer, size in FAMILIES.values() if layer == "host")
        assert report["leaked"]["gpu"] == {"objects": 30, "bytes": gpu}
        assert report["leaked"]["host"] == {"objects": 6, "bytes": host}
        assert report["failed_calls"] == 28
        standin = report["standin"]
        assert standin["device_bytes"] - standin["pooled_bytes"] == gpu
        assert standin["pinned_bytes"] == host
        # every block of device memory, pooled ones too, holds a kernel object made inside an ioctl
        assert standin["ioctls_held"] == standin["device_objects"] == 30 + 4
        assert descriptors(report["pid"], r"/dev/pts/\d+") == standin["ioctls_held"]


def test_device_limit_makes_calls_fail() -> None:
    done = subprocess.run(
        command("cuda_leak", "--families", "device", "--count", 5),
        capture_output=True,
        text=True,
        env={**os.environ, "STANDIN_GPU_BYTES": "1000000"},
    )
    assert done.returncode == 1
    assert done.stderr == "cudaMalloc(&memory, 250000) failed with CUDA error 2\n"


@pytest.mark.parametrize(("most", "held_now"), [("0", 0), ("5", 4)])  # one was the freed IPC exporter's
def test_ioctl_objects_are_bounded(most: str, held_now: int) -> None:
    report = run("cuda_leak", "--families", "device", "--count", 9, STANDIN_IOCTL_FDS=most)
    assert report["standin"]["ioctls_held"] == held_now
    assert report["leaked"]["gpu"]["bytes"] == 9 * 250_000


def test_cuda_threads_counts_are_exact() -> None:
    report = run("cuda_threads", "--count", 2000)
    assert (report["threads"], report["allocations"], report["frees"]) == (4, 8000, 7200)
    assert {s["function"]: (s["objects"], s["bytes"]) for s in report["sites"]} == {
        "retain_block": (600, 600 * 30_000),
        "retain_block_in_stream": (200, 200 * 20_000),
    }
    standin = report["standin"]
    assert standin["device_bytes"] - standin["pooled_bytes"] == 600 * 30_000 + 200 * 20_000


def test_end_of_a_context_frees_what_was_allocated_in_it() -> None:
    report = run("cuda_context", "--count", 5)
    assert report["leaked"] == {"gpu": {"objects": 5, "bytes": 500_000}}
    assert report["freed_with_context"] == {"objects": 81, "bytes": 8_100_000}
    assert (report["standin"]["device_objects"], report["standin"]["device_bytes"]) == (5, 500_000)


@pytest.mark.parametrize("name", ["demo_service", "service.py"])
def test_service_leaks_in_three_layers_and_its_caches_stop(name: str) -> None:
    # Given 250 requests, of which the first 50 also fill the caches
    with held(name, "--count", 250) as report:
        # Then every 11th, 13th and 17th leaked
        sites = {(s["function"], s["layer"]): (s["objects"], s["bytes"]) for s in report["sites"]}
        assert sites == {
            ("session_open_without_close", "kernel"): (23, 23 * 3000),
            ("response_buffer_map", "host"): (20, 20 * 64 * KIB),
            ("kv_block_alloc", "gpu"): (15, 15 * 256 * KIB),
        }
        cached = {(c["function"], c["layer"]): (c["objects"], c["bytes"]) for c in report["cached"]}
        assert cached[("prefix_cache_fill", "host")] == (2, 2 * MIB)
        assert cached[("prefix_cache_fill", "gpu")] == (2, 8 * MIB)
        pooled = cached.get(("connection_pool_fill", "kernel"), (0, 0))
        assert pooled == ((25, 75_000) if name == "demo_service" else (0, 0))
        assert descriptors(report["pid"], r"socket:") == 2 * (23 + pooled[0])
        # and each of the blocks on the device holds one kernel object
        assert descriptors(report["pid"], r"/dev/pts/\d+") == 15 + 2
        if name == "demo_service":
            assert report["standin"]["device_bytes"] == 15 * 256 * KIB + 8 * MIB
            assert report["standin"]["launches"] == 250


def test_the_fixed_service_keeps_its_cache_alone() -> None:
    with held("service.py", "--count", 250, "--fixed") as report:
        assert report["leaked"] == {} and [site["objects"] for site in report["sites"]] == [0, 0, 0]
        assert sum(thread["kv_blocks"] for thread in report["threads"]) == 15  # taken, and given back
        assert descriptors(report["pid"], r"socket:") == 0
        assert descriptors(report["pid"], r"/dev/pts/\d+") == 2  # a kernel object for each block of the prefix cache


@pytest.mark.parametrize(
    ("library", "exports"), [("libcuda.so.1", DRIVER_EXPORTS), ("libcudart.so.12", RUNTIME_EXPORTS)]
)
def test_standin_exports_the_abi(library: str, exports: str) -> None:
    with (BIN / library).open("rb") as file:
        elf = ELFFile(file)
        dynamic = {tag.entry.d_tag: tag for tag in section(elf, ".dynamic").iter_tags()}
        assert dynamic["DT_SONAME"].soname == library
        text = section(elf, ".text")
        code = text.data()
        entries = {
            symbol.name: code[symbol["st_value"] - text["sh_addr"] :][:5]
            for symbol in section(elf, ".dynsym").iter_symbols()
            if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_shndx"] != "SHN_UNDEF"
        }
    assert set(entries) == set(exports.split())
    # A uprobe on `push %rbp` (after endbr64, where gcc adds that) is cheap; trivial getters may lack it.
    if elf.get_machine_arch() == "x64":
        allocating = re.compile(
            "Alloc|Malloc|Free|Create|Destroy|Register(?!FatBinaryEnd)|Map|Release|OpenMem|CloseMem|Launch"
        )
        firsts = {
            name: code.removeprefix(b"\xf3\x0f\x1e\xfa")[0] for name, code in entries.items() if allocating.search(name)
        }
        assert set(firsts.values()) == {0x55}, firsts


def test_calls_within_calls_go_through_public_functions() -> None:
    """A uprobe on a public function sees an inner call only when that goes to the function itself."""
    called = {}
    for library in ("libcuda.so.1", "libcudart.so.12"):
        with (BIN / library).open("rb") as file:
            elf = ELFFile(file)
            symbols = section(elf, ".dynsym")
            plt = section(elf, ".rela.plt")
            called[library] = {
                symbols.get_symbol(relocation["r_info_sym"]).name for relocation in plt.iter_relocations()
            }
    assert "cuMemAlloc_v2" in called["libcuda.so.1"]  # a pool that grows
    assert {
        "cuMemAlloc_v2",
        "cuMemAllocAsync",
        "cuMemHostAlloc",
        "cuMemFree_v2",
        "cuLaunchKernel",
        "cuDevicePrimaryCtxRetain",
    } <= called["libcudart.so.12"]


def test_standin_semantics() -> None:
    """Address reuse, failures without a context, VMM references, look-up by name: in its own process."""
    script = r"""
import ctypes, json, sys
cuda = ctypes.CDLL(sys.argv[1])
size, u64 = ctypes.c_size_t, ctypes.c_ulonglong
def alloc(n):
    p = u64(); code = cuda.cuMemAlloc_v2(ctypes.byref(p), size(n)); return code, p.value
out = {"uninitialised": alloc(100)[0]}
cuda.cuInit(0)
out["no_context"] = alloc(100)[0]
context = ctypes.c_void_p(); cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
first, second = alloc(5000)[1], alloc(5000)[1]
out["distinct"] = first != second
out["free"] = cuda.cuMemFree_v2(u64(first))
out["double_free"] = cuda.cuMemFree_v2(u64(first))
out["reused"] = alloc(5000)[1] == first
def used():
    free, total = size(), size(); cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return total.value - free.value
base = used()
handle, again, address = u64(), u64(), u64(); n = size(1 << 21)
cuda.cuMemCreate(ctypes.byref(handle), n, None, u64(0))
cuda.cuMemAddressReserve(ctypes.byref(address), n, size(0), u64(0), u64(0))
cuda.cuMemMap(address, n, size(0), handle, u64(0))
cuda.cuMemRelease(handle)
out["vmm"] = [used() - base]
cuda.cuMemRetainAllocationHandle(ctypes.byref(again), ctypes.c_void_p(address.value))
cuda.cuMemUnmap(address, n)
out["vmm"].append(used() - base)
out["unmap_twice"] = cuda.cuMemUnmap(address, n)
cuda.cuMemRelease(again)
out["vmm"].append(used() - base)
function, status = ctypes.c_void_p(), ctypes.c_int()
def look_up(name, flags):
    code = cuda.cuGetProcAddress_v2(name, ctypes.byref(function), 12080, u64(flags), ctypes.byref(status))
    return [code, status.value, function.value]
def at(name):
    return ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value
out["look_up"] = [
    look_up(b"cuMemAlloc", 0) == [0, 0, at("cuMemAlloc_v2")],
    look_up(b"cuMemAllocAsync", 2) == [0, 0, at("cuMemAllocAsync_ptsz")],
    look_up(b"cuMemAllocAsync", 0) == [0, 0, at("cuMemAllocAsync")],
    look_up(b"cuNoSuchThing", 0) == [500, 1, None],
]
print(json.dumps(out))
"""
    done = subprocess.run([sys.executable, "-c", script, BIN / "libcuda.so.1"], capture_output=True, text=True)
    assert json.loads(done.stdout) == {
        "uninitialised": 3,
        "no_context": 201,
        "distinct": True,
        "free": 0,
        "double_free": 1,
        "reused": True,
        "vmm": [2 * MIB, 2 * MIB, 0],
        "unmap_twice": 1,
        "look_up": [True, True, True, True],
    }, done.stderr

"""The sample programs do what their reports say, checked against /proc and the stand-in's own count."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
BIN = SAMPLES / "bin"
KIB, MIB = 1024, 1024 * 1024

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


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    done = subprocess.run(["make", "-C", str(SAMPLES), "-j2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def command(name: str, *options: object) -> list[str]:
    python = [sys.executable, str(SAMPLES / name)] if name.endswith(".py") else [str(BIN / name)]
    return [*python, "--pause-us", "0", *map(str, options)]


def run(name: str, *options: object, **environment: str) -> Any:
    """The report of a sample that ran to its end."""
    done = subprocess.run(
        command(name, *options), capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def held(name: str, *options: object) -> Iterator[Any]:
    """The report of a sample that stays alive meanwhile."""
    with subprocess.Popen(command(name, *options, "--hold", 60), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            report = json.loads(process.stdout.readline())
            assert report["pid"] == process.pid
            yield report
        finally:
            process.kill()


def descriptors(pid: int, pattern: str) -> int:
    """Open descriptors of the process whose target matches."""
    return sum(bool(re.match(pattern, str(fd.readlink()))) for fd in Path(f"/proc/{pid}/fd").iterdir())


def mapped_bytes(pid: int, name: str = "") -> int:
    """Bytes of the process's maps of that name; '' = anonymous ones without a name."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if (fields[5] if len(fields) > 5 else "") == name and fields[4] == "0":
            start, end = (int(address, 16) for address in fields[0].split("-"))
            total += end - start
    return total


@pytest.mark.parametrize("name", ["leak_socketpair", "leak_socketpair.py"])
def test_socketpair_leaker_holds_two_sockets_a_pair(name: str) -> None:
    with held(name, "--count", 7, "--churn", 3) as report:
        assert report["leaked"] == {"kernel": {"objects": 7, "bytes": 7 * 3000}}
        assert report["sites"][0]["function"] == "open_session_and_forget"
        assert report["churned"] == 21
        assert descriptors(report["pid"], r"socket:") == 14


@pytest.mark.parametrize(
    ("name", "target", "function", "size_bytes"),
    [
        ("leak_eventfd", r"anon_inode:\[eventfd\]", "subscribe_and_forget", 0),
        ("leak_bpf_map", r"anon_inode:bpf-map", "load_policy_map_and_forget", 4096),
    ],
)
def test_descriptor_leakers_hold_what_they_report(name: str, target: str, function: str, size_bytes: int) -> None:
    if name == "leak_bpf_map" and os.geteuid():
        pytest.skip("bpf(2) needs root")
    with held(name, "--count", 11) as report:
        assert report["leaked"] == {"kernel": {"objects": 11, "bytes": 11 * size_bytes}}
        assert report["sites"][0]["function"] == function
        assert descriptors(report["pid"], target) == 11


def test_sysv_queues_outlive_the_leaker_until_cleaned() -> None:
    # Given an IPC namespace of our own, when the leaker has run twice and exited, and then cleans up
    script = f"{BIN}/leak_sysv_msg --count 3; {BIN}/leak_sysv_msg --count 2; cat /proc/sysvipc/msg; echo END; "
    script += f"{BIN}/leak_sysv_msg --clean 1; cat /proc/sysvipc/msg"
    unshare = ["unshare", "--ipc"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--ipc"]
    done = subprocess.run([*unshare, "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip("no namespaces here")
    before, after = (part.splitlines() for part in done.stdout.split("END\n"))

    # Then five queues of four messages of 2,000 bytes are left in between, and none at the end
    assert json.loads(before[0])["leaked"] == {"kernel": {"objects": 12, "bytes": 24_000}}
    assert json.loads(before[0])["queues"] == 3
    queues = [line.split() for line in before[3:]]
    assert [(fields[3], fields[4]) for fields in queues] == [("8000", "4")] * 5
    assert json.loads(after[0])["removed"] == 5
    assert after[2:] == []


def test_mmap_leaker_keeps_exactly_the_bytes_it_reports() -> None:
    with held("leak_mmap", "--count", 0) as empty, held("leak_mmap", "--count", 5) as report:
        sites = {site["function"]: site["bytes"] for site in report["sites"]}
        assert sites == {
            "map_whole_and_forget": 5 * 64 * KIB,
            "map_grow_and_forget": 5 * 48 * KIB,
            "map_trim_and_forget": 5 * 80 * KIB,
        }
        assert report["leaked"] == {"host": {"objects": 15, "bytes": 5 * 192 * KIB}}
        assert mapped_bytes(report["pid"]) - mapped_bytes(empty["pid"]) == 5 * 192 * KIB


def test_brk_leaker_extends_the_heap_by_exactly_what_it_reports() -> None:
    with held("leak_brk", "--count", 5) as report:
        assert report["leaked"] == {"host": {"objects": 5, "bytes": 5 * 64 * KIB}}
        assert mapped_bytes(report["pid"], "[heap]") == 5 * 64 * KIB


def test_heap_leaker_grows_heap_and_maps() -> None:
    with held("leak_heap", "--count", 0) as empty, held("leak_heap", "--count", 320) as report:
        assert {s["function"]: (s["objects"], s["bytes"]) for s in report["sites"]} == {
            "parse_record_and_forget": (320, 320_000),
            "load_document_and_forget": (20, 6_000_000),
        }
        # glibc maps each block of 300,000 bytes with a header of 16, in whole pages
        assert mapped_bytes(report["pid"]) - mapped_bytes(empty["pid"]) == 20 * 303_104
        assert 320_000 < mapped_bytes(report["pid"], "[heap]") < 640_000


def test_python_mmap_leaker_holds_its_maps() -> None:
    with held("leak_mmap.py", "--count", 0) as empty, held("leak_mmap.py", "--count", 160) as report:
        assert report["leaked"] == {"host": {"objects": 160, "bytes": 160 * 64 * KIB}}
        # mmap.mmap shares anonymous memory: the kernel shows it as /dev/zero
        growth = [mapped_bytes_of_python_maps(r["pid"]) for r in (empty, report)]
        assert growth == [0, 160 * 64 * KIB]


def mapped_bytes_of_python_maps(pid: int) -> int:
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("/dev/zero (deleted)"):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            total += end - start
    return total


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


@pytest.mark.parametrize("name", ["churn_epoll", "churn_timerfd", "churn_posix_timer", "churn_tcp", "churn_fork"])
def test_churn_leaves_nothing_behind(name: str) -> None:
    with held(name, "--count", 0) as idle, held(name, "--count", 50) as report:
        assert (report["leaked"], report["sites"], report["churned"]) == ({}, [], 50)
        assert descriptors(report["pid"], "") == descriptors(idle["pid"], "")
        assert mapped_bytes(report["pid"]) == mapped_bytes(idle["pid"])
        children = Path(f"/proc/{report['pid']}/task/{report['pid']}/children")
        assert not children.exists() or children.read_text() == ""


def test_cache_churn_stops_at_a_fifth() -> None:
    with held("churn_cache", "--count", 100) as report:
        assert report["leaked"] == {}
        assert report["cached"] == {"function": "cache_insert", "objects": 20, "host_bytes": 20 * 64 * KIB}
        assert descriptors(report["pid"], r"socket:") == 40


def test_wait_holds_a_sample_until_told() -> None:
    with subprocess.Popen(
        command("leak_eventfd", "--count", 3, "--wait"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert descriptors(process.pid, r"anon_inode:\[eventfd\]") == 0
        output, _ = process.communicate("go\n", timeout=60)
    assert json.loads(output)["leaked"]["kernel"]["objects"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--frobnicate", "1"], "leak_mmap: unknown option '--frobnicate'; see --help\n"),
        (["--count"], "leak_mmap: a value is missing after '--count'; see --help\n"),
        (["--count", "-1"], "leak_mmap: not a whole number >= 0: '-1'; see --help\n"),
        (["7"], "leak_mmap: unexpected argument '7'; see --help\n"),
    ],
)
def test_wrong_options_are_refused(options: list[str], message: str) -> None:
    done = subprocess.run([BIN / "leak_mmap", *options], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


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

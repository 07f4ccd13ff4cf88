"""CUDA allocations recorded by uprobes, exact to the byte against the programs' own reports."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from recording import BIN, Recorder, Recording, record, sample, shell, waiting

pytestmark = [pytest.mark.bpf, pytest.mark.usefixtures("bpf")]

LIBRARIES = [BIN / "libcuda.so.1", BIN / "libcudart.so.12"]
OBJECTS, CHURN, FAILING = 23, 2, 7
THREADS, ROUNDS = 4, 20_000
CONTEXTS, BLOCKS_A_CONTEXT, BLOCK_BYTES = 41, 16, 100_000
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY, cudaErrorMemoryAllocation
ON_DEVICE = "kind IN ('device', 'managed', 'async', 'vmm', 'array', 'ipc', 'pinned', 'registered')"


@pytest.fixture(scope="module")
def cuda(bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Three CUDA programs, one after another; their libraries are probed before any of them starts."""
    command = shell(
        sample("cuda_leak", "--count", OBJECTS, "--churn", CHURN, "--failing", FAILING, "--pause-us", 0),
        sample("cuda_context", "--count", CONTEXTS, "--pause-us", 0),
        sample("cuda_threads", "--count", ROUNDS),
    )
    libraries = [word for library in LIBRARIES for word in ("--library", library)]
    recording = record(tmp_path_factory.mktemp("cuda") / "all.lscope", command, *libraries)
    assert recording.code == 0, recording.stderr
    assert recording.losses("ring_drop") == recording.losses("call_map_full") == 0
    return recording


FAMILIES = [
    "device", "pitch", "volume", "managed", "async", "async_per_thread", "pool", "pinned", "pinned_default",
    "registered", "array", "array3d", "ipc", "driver_device", "driver_async", "vmm", "vmm_mapping", "driver_array",
    "mipmap",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_exact_by_site(cuda: Recording, family: str) -> None:
    # given what the program says that it leaked there
    report = cuda.reports["cuda_leak"]
    site = next(site for site in report["sites"] if site["function"] == f"leak_{family}")
    kind = {"registered": "registered"}.get(family, site["kind"])
    bytes_known = 0 if family == "ipc" else site["bytes"]  # the size of another's memory is not in the call
    # then exactly that is live, of this layer, kind and API, with the function in the stack
    where = f"pid = ? AND {ON_DEVICE} AND list_contains(functions, ?)"
    found = cuda.rows(
        f"""SELECT layer, kind, api, sum(sign)::BIGINT, sum(sign * size_bytes)::BIGINT, min(requested_bytes) > 0
            FROM events WHERE {where} GROUP BY ALL""",
        report["pid"], site["function"],
    )  # fmt: skip
    assert found == [(site["layer"], kind, site["api"], OBJECTS, bytes_known, family != "ipc")]
    # and the function called the API itself
    assert cuda.rows(f"SELECT DISTINCT functions[-2:] FROM events WHERE {where}", report["pid"], site["function"]) == [
        (innermost(family, site),)
    ]
    # while its healthy twin allocated as often as it should, and keeps nothing
    twin = cuda.rows(
        f"SELECT count(*) FILTER (op = 'alloc'), sum(sign)::BIGINT, sum(sign * size_bytes)::BIGINT FROM events "
        f"WHERE {where}",
        report["pid"], f"churn_{family}",
    )  # fmt: skip
    assert twin == [(OBJECTS * CHURN, 0, 0)]


def innermost(family: str, site: Any) -> list[str]:
    """The two innermost frames: an inlined helper is no frame, map_memory is one."""
    return ["map_memory" if family.startswith("vmm") else site["function"], site["api"]]


def test_no_other_device_memory_is_live(cuda: Recording) -> None:
    report = cuda.reports["cuda_leak"]
    for layer in ("gpu", "host"):
        live = cuda.live("layer", f"pid = ? AND layer = ? AND {ON_DEVICE}", report["pid"], layer)
        ipc_objects = OBJECTS if layer == "gpu" else 0
        leaked = report["leaked"][layer]
        assert live[layer] == (leaked["objects"] + ipc_objects, leaked["bytes"])
    # the stand-in counts what the device holds, in its own way
    held = report["standin"]["device_bytes"] - report["standin"]["pooled_bytes"]
    assert held == report["leaked"]["gpu"]["bytes"]


def test_failed_calls_are_calls_and_no_memory(cuda: Recording) -> None:
    report = cuda.reports["cuda_leak"]
    assert report["failed_calls"] == 4 * FAILING
    outermost = cuda.rows(
        "SELECT api, count(*), min(size_bytes), max(size_bytes) FROM calls "
        "WHERE pid = ? AND result = ? AND parent_id = 0 GROUP BY 1 ORDER BY 1",
        report["pid"], OUT_OF_MEMORY,
    )  # fmt: skip
    assert outermost == [
        (api, FAILING, 1 << 50, 1 << 50) for api in ("cuMemAlloc_v2", "cuMemCreate", "cudaMalloc", "cudaMallocAsync")
    ]
    # the calls within fail too
    nested = cuda.rows(
        "SELECT c.api, count(*) FROM calls c JOIN calls p ON p.id = c.parent_id "
        "WHERE c.pid = ? AND c.result = ? GROUP BY 1 ORDER BY 1",
        report["pid"], OUT_OF_MEMORY,
    )  # fmt: skip
    assert nested[0] == ("cuMemAllocAsync", FAILING)
    assert dict(nested)["cuMemAlloc_v2"] >= FAILING
    failed = "SELECT id FROM calls WHERE result <> 0"
    assert cuda.rows(f"SELECT count(*) FROM mem_events WHERE call_id IN ({failed})") == [(0,)]
    assert cuda.rows("SELECT max(size_bytes) < 1::BIGINT << 50 FROM mem_events WHERE layer = 'gpu'") == [(True,)]


def test_nested_calls_are_detail_of_the_outermost(cuda: Recording) -> None:
    pid = cuda.reports["cuda_leak"]["pid"]
    # every allocation belongs to a call of its own API that is not within another allocating call
    orphans = """SELECT count(*) FROM mem_events e LEFT JOIN calls c ON c.id = e.call_id
                 WHERE e.op = 'alloc' AND e.layer = 'gpu' AND (c.id IS NULL OR c.api <> e.api OR c.parent_id <> 0
                       OR c.tid <> e.tid OR e.ts_ns < c.enter_ns OR e.ts_ns > c.exit_ns)"""
    assert cuda.rows(orphans) == [(0,)]
    # and what the runtime calls in the driver lies within it, on its thread, and makes no memory
    pairs = cuda.rows(
        """SELECT p.api, c.api, count(*), bool_and(c.tid = p.tid AND c.enter_ns >= p.enter_ns
                  AND c.exit_ns <= p.exit_ns
                  AND c.id NOT IN (SELECT call_id FROM mem_events WHERE kind NOT LIKE 'mmap%'))
           FROM calls c JOIN calls p ON p.id = c.parent_id
           WHERE c.pid = ? AND c.result = 0 AND p.api IN ('cudaMallocPitch', 'cudaMallocManaged', 'cudaHostAlloc',
                 'cudaMallocArray') GROUP BY ALL ORDER BY 1""",
        pid,
    )
    each = OBJECTS * (1 + CHURN)
    assert pairs == [
        ("cudaHostAlloc", "cuMemHostAlloc", each, True),
        ("cudaMallocArray", "cuArrayCreate_v2", each, True),
        ("cudaMallocManaged", "cuMemAllocManaged", each, True),
        ("cudaMallocPitch", "cuMemAllocPitch_v2", each, True),
    ]


def test_no_nested_call_of_four_threads_is_missing(cuda: Recording) -> None:
    report = cuda.reports["cuda_threads"]
    assert (report["allocations"], report["frees"]) == (THREADS * ROUNDS, 72_000)
    pid = report["pid"]
    # given which calls are stream-ordered: those of every fourth ten (samples/cuda/cuda_threads.c)
    in_stream = sum(THREADS for i in range(ROUNDS) if i // 10 % 4 == 0)
    calls = dict(cuda.rows("SELECT api, count(*) FROM calls WHERE pid = ? AND result = 0 GROUP BY 1", pid))
    # then each call of the runtime is there, and the driver's call within it
    assert calls["cudaMalloc"] == THREADS * ROUNDS - in_stream
    assert calls["cudaMallocAsync"] == calls["cuMemAllocAsync"] == in_stream
    nested = cuda.rows(
        """SELECT count(*) FROM calls c JOIN calls p ON p.id = c.parent_id
           WHERE c.pid = ? AND c.api = 'cuMemAlloc_v2' AND p.api = 'cudaMalloc'""",
        pid,
    )
    assert nested == [(calls["cudaMalloc"],)]
    assert calls["cudaFree"] + calls["cudaFreeAsync"] == report["frees"] + cuda.rows(
        "SELECT count(*) FROM calls WHERE pid = ? AND api = 'cudaFree' AND addr = 0", pid
    )[0][0]  # fmt: skip
    assert cuda.rows("SELECT count(DISTINCT tid) FROM calls WHERE pid = ? AND api = 'cudaMalloc'", pid) == [(THREADS,)]
    # and what is live is exact by site, whichever thread freed the rest
    for site in report["sites"]:
        where = f"pid = ? AND {ON_DEVICE} AND list_contains(functions, ?)"
        live = cuda.live("kind || ' ' || api", where, pid, site["function"])
        assert live == {f"{site['kind']} {site['api']}": (site["objects"], site["bytes"])}
    leaked = report["leaked"]["gpu"]
    assert cuda.live("layer", "pid = ? AND layer = 'gpu'", pid) == {"gpu": (leaked["objects"], leaked["bytes"])}


def test_the_end_of_a_context_frees_what_was_allocated_in_it(cuda: Recording) -> None:
    report = cuda.reports["cuda_context"]
    pid = report["pid"]
    frees = cuda.rows(
        "SELECT cause, functions[-2], count(*), sum(size_bytes)::BIGINT FROM events "
        "WHERE pid = ? AND op = 'free' AND layer = 'gpu' GROUP BY ALL ORDER BY ALL",
        pid,
    )
    passing = CONTEXTS * BLOCKS_A_CONTEXT
    assert frees == [
        ("context", "allocate_in_passing_context", passing, passing * BLOCK_BYTES),
        ("context", "run_until_reset", 1, BLOCK_BYTES),
        ("exit", "allocate_in_lasting_context", CONTEXTS, CONTEXTS * BLOCK_BYTES),
    ]
    assert report["freed_with_context"] == {"objects": passing + 1, "bytes": (passing + 1) * BLOCK_BYTES}
    assert cuda.live("layer", "pid = ? AND layer = 'gpu'", pid) == {"gpu": (CONTEXTS, CONTEXTS * BLOCK_BYTES)}
    # every passing context had its own blocks, and the lasting one all that is kept
    contexts = cuda.rows(
        """SELECT n, count(*) FROM (
               SELECT context, count(*) AS n FROM calls c WHERE pid = ? AND api = 'cuMemAlloc_v2' AND parent_id = 0
               GROUP BY context, (SELECT count(*) FROM calls d WHERE d.pid = c.pid AND d.api = 'cuCtxDestroy_v2'
                                  AND d.exit_ns < c.enter_ns AND d.addr = c.context)
           ) GROUP BY 1 ORDER BY 1""",
        pid,
    )
    assert contexts == [(BLOCKS_A_CONTEXT, CONTEXTS), (CONTEXTS, 1)]


def test_kernel_objects_of_the_driver_are_nested_in_its_calls(cuda: Recording) -> None:
    # given the stand-in, which holds an ioctl's kernel objects for each device allocation
    report = cuda.reports["cuda_leak"]
    live = cuda.rows(
        """SELECT e.slab_cache, sum(e.sign)::BIGINT FROM events e ASOF JOIN
               (SELECT * FROM calls WHERE pid = $1 AND api LIKE 'cu%Alloc%' OR api LIKE 'cuMemCreate' ) c
               ON e.tid = c.tid AND e.ts_ns >= c.enter_ns
           WHERE e.pid = $1 AND e.layer = 'kernel' AND e.op = 'alloc' AND e.ts_ns <= c.exit_ns
                 AND list_contains(e.kernel_functions, '__x64_sys_ioctl') AND e.call_id = 0 GROUP BY 1""",
        report["pid"],
    )
    by_cache = dict(live)
    assert by_cache.get("filp", 0) >= report["leaked"]["gpu"]["objects"] / 2, by_cache


def test_attached_to_a_running_program_and_stopped_by_ctrl_c(bpf: None, tmp_path: Path) -> None:
    # given a CUDA program that runs already, and is recorded by PID alone
    with (
        waiting("cuda_leak", "--count", 11, "--pause-us", 0) as program,
        Recorder(tmp_path / "attached.lscope", "-p", program.pid, "--launches") as recorder,
    ):
        recorder.wait_ready()
        report = program.go()
        # when it is interrupted with all CUDA probes attached
        began = time.monotonic()
        recorder.signal(signal.SIGINT)
        recording = recorder.result()
        took = time.monotonic() - began
    # then the prompt is back within two seconds, and the capture is whole
    assert recording.code == 130, recording.stderr
    assert took <= 2.0
    assert recording.capture.manifest.complete and recording.capture.problems == []
    attached = recording.facts["functions_attached"]
    assert {Path(path).name for path in attached} == {library.name for library in LIBRARIES}
    assert min(attached.values()) >= 20
    leaked = report["leaked"]
    for layer, ipc in (("gpu", 11), ("host", 0)):
        live = recording.live("layer", f"layer = ? AND {ON_DEVICE}", layer)
        assert live == {layer: (leaked[layer]["objects"] + ipc, leaked[layer]["bytes"])}
    assert recording.rows("SELECT role FROM processes") == [("root",)]


LINKED_IN = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
/* A program with a CUDA runtime linked in: cudaMalloc hands out numbers, every third call fails. */
__attribute__((noipa)) int cudaMalloc(void **memory, size_t size)
{
    static size_t next = 4096, calls;
    if (++calls % 3 == 0)
        return 2;
    *memory = (void *)next;
    next += size;
    return 0;
}
__attribute__((noipa)) int cudaFree(void *memory) { return memory == 0; }
__attribute__((noipa)) void keep_block(void **memory) { cudaMalloc(memory, 7000); }
int main(void)
{
    void *memory = 0;
    char go;
    if (read(0, &go, 1) != 1)
        return 1;
    for (int i = 0; i < 30; i++)
        keep_block(&memory);
    cudaFree(memory);
    puts("done");
    fflush(stdout);
    return read(0, &go, 1) != 0;
}
"""


def test_single_uprobes_in_a_binary_with_cuda_linked_in(bpf: None, tmp_path: Path) -> None:
    # given a program of 20 allocations of 7,000 bytes, one of them freed, and 10 failures
    program = tmp_path / "linked_in"
    subprocess.run(
        ["gcc", "-O1", "-fno-omit-frame-pointer", "-x", "c", "-o", str(program), "-"],
        input=LINKED_IN, text=True, check=True,
    )  # fmt: skip
    process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    # when it is recorded as on kernels before 6.6, which have no multi links
    options = ("-p", process.pid, "--library", program)
    with Recorder(tmp_path / "single.lscope", *options, env={"LEAKSCOPE_UPROBES": "perf"}) as recorder:
        recorder.wait_ready()
        process.stdin.write("g")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        process.stdin.close()
        recording = recorder.result()
    assert process.wait() == 0
    # then each is told from the others
    assert recording.code == 0, recording.stderr
    probes = [name for name in recording.capture.manifest.sources[0].probes if name.startswith("uprobe:")]
    assert probes == [f"uprobe:{program} (2 functions, a perf event each)"]
    assert recording.live("functions[-2:]", "layer = 'gpu'") == {("keep_block", "cudaMalloc"): (19, 19 * 7000)}
    calls = recording.rows("SELECT api, result, count(*) FROM calls GROUP BY ALL ORDER BY ALL")
    assert calls == [("cudaFree", 0, 1), ("cudaMalloc", 0, 20), ("cudaMalloc", OUT_OF_MEMORY, 10)]

"""Nsight Systems SQLite exports (``nsys export --type sqlite``), every schema from 2020 on.

Layout: NVIDIA's exporter schema reference, and what real exports show. Times in an export are ns since the start of
the capture, and may be negative. They become the target's clock where the export has ``systemClockNs`` (2025.6 and
later), else UTC, else they stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.arrow import build_table, not_empty
from nsight_parsers.interning import StackInterner
from nsight_parsers.nsys.activity import KERNEL, NVTX, RUNTIME, Calls, read_calls, read_launches, read_marks
from nsight_parsers.nsys.database import Export
from nsight_parsers.nsys.memory import POOL, USAGE, Memory, read_memory
from nsight_parsers.nsys.threads import pids
from nsight_parsers.recognise import read_sample
from nsight_parsers.sniffing import LFS_POINTER, SQLITE_MAGIC

EXPORT_COMMAND = "nsys export --type sqlite"
CAPTURE_SETTINGS = ("COLLECT_GPU_MEMORY_USAGE", "CUDA_SKIP_SOME_API_CALLS", "COLLECT_CUDA_TRACE", "COLLECT_NVTX_TRACE")
COUNTED = (RUNTIME, KERNEL, USAGE, POOL, NVTX, "CUDA_CALLCHAINS", "SAMPLING_CALLCHAINS", "OSRT_CALLCHAINS", "PROCESSES")
EXPORT_TABLES = ("META_DATA_EXPORT", "EXPORT_META_DATA")

LIMITS = [
    "API calls carry no arguments: no sizes, no addresses, only that they were made, when, by whom, with what result",
    "memory that a context or process takes with it when it ends is not seen to be freed",
    "memory usage counts requests to CUDA: less than the driver reports for the process",
]


def parse_nsys(path: Path | str, *, progress: Callable[[int, int], None] | None = None) -> ParsedReport:
    """Reads an export. ``progress(done, total)`` counts its parts.

    Raises ReportError for a file that is none, is damaged or hostile, or must be exported first.
    """
    path = Path(path)
    sample = read_sample(path)
    if sample.head.startswith(LFS_POINTER):
        raise ReportError(f"{path}: a Git LFS pointer, not the file itself: run 'git lfs pull' where it came from")
    if not sample.head.startswith(SQLITE_MAGIC):
        output = path.with_suffix(".sqlite").name
        raise ReportError(f"{path}: a raw report; run '{EXPORT_COMMAND} -o {output} {path.name}' and import {output}")
    tell = progress or (lambda done, total: None)
    try:
        with Export(path) as export:
            return _parse(export, tell)
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    except (pa.ArrowException, OverflowError, ValueError) as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(f"{path}: damaged: a number is out of range") from error


def _parse(export: Export, tell: Callable[[int, int], None]) -> ParsedReport:
    if not export.tables.keys() & {*EXPORT_TABLES, "StringIds", RUNTIME, USAGE}:
        raise ReportError(f"{export.path}: an SQLite database, but not an export of Nsight Systems")
    rows = {table: export.rows(table) for table in COUNTED if table in export.tables}
    clock, offset_ns, clock_facts = _clock(export)
    stacks = StackInterner()
    tell(1, 6)
    marks = read_marks(export, offset_ns)
    tell(2, 6)
    calls = read_calls(export, offset_ns, stacks)
    tell(3, 6)
    launches = read_launches(export, offset_ns, calls, marks)
    tell(4, 6)
    memory = read_memory(export, offset_ns, calls, marks, stacks)
    tell(5, 6)
    tables = {
        "mem_events": memory.events,
        "calls": calls.table,
        "launches": launches.table,
        "marks": marks.table,
        "samples": memory.samples,
        **stacks.tables(),
    }
    tables["processes"] = _processes(export, tables)
    settings = export.settings("META_DATA_CAPTURE", CAPTURE_SETTINGS)
    report = ParsedReport(not_empty(tables), tool="Nsight Systems", version=_version(export, "PRODUCT"), clock=clock)
    report.facts = {
        "schema": _version(export, "SCHEMA"),
        "rows": rows,
        **clock_facts,
        "settings": settings,
        "gpus": _gpus(export),
        "processes": sorted({int(pid) for pid in tables["processes"]["pid"].to_numpy()}),
        "allocation_calls": calls.allocations(),
        "free_calls": calls.frees(),
        "static_memory": memory.static,
    }
    report.findings = [
        *_memory_findings(memory, calls, settings),
        *_activity_findings(export, rows, calls, launches.without_call, launches.without_kernel, marks.never_closed),
    ]
    report.limits = [*LIMITS, *_limits(clock, settings)]
    tell(6, 6)
    return report


def _clock(export: Export) -> tuple[str, int, dict[str, Any]]:
    """(clock, what to add to times of the export, facts)."""
    column = export.ints("TARGET_INFO_SESSION_START_TIME", "utcEpochNs", "systemClockNs")
    utc, system = ((int(column[name][0]) if len(column[name]) else 0) for name in ("utcEpochNs", "systemClockNs"))
    facts = {"session_start_utc_ns": utc, "session_start_system_clock_ns": system}
    limit = 1 << 62  # so that sums stay in 64 bits
    if 0 < system < limit:
        return "monotonic", system, facts
    if 0 < utc < limit:
        return "utc", utc, facts
    return "relative", 0, facts


def _version(export: Export, what: str) -> str:
    for table in EXPORT_TABLES:
        found = export.settings(table, [f"EXPORT_{what}_VERSION"])
        if found:
            return next(iter(found.values()))[:40]
    return ""


def _gpus(export: Export) -> list[dict[str, Any]]:
    wanted = ("id", "name", "uuid", "totalMemory")
    return [
        {
            "id": int(number) if number.isdecimal() else None,
            "name": name,
            "uuid": uuid,
            "memory_bytes": int(memory) if memory.isdecimal() else None,
        }
        for number, name, uuid, memory in export.texts("TARGET_INFO_GPU", *wanted)[:64]
    ]


def _processes(export: Export, tables: dict[str, pa.Table]) -> pa.Table:
    """The processes that did something, by the base name of their program. The rest of the host is not ours to keep."""
    active = {
        int(pid)
        for name in ("mem_events", "calls", "launches", "marks")
        for pid in tables[name]["pid"].unique().to_pylist()
    }
    named: dict[int, str] = {}
    column = export.ints("PROCESSES", "globalPid")
    texts = export.text_column("PROCESSES", "name") or [""] * len(column["globalPid"])
    for pid, name in zip(pids(column["globalPid"]).tolist(), texts, strict=True):
        if pid in active:
            named.setdefault(pid, (name or "").rsplit("/", 1)[-1].rsplit("\\", 1)[-1])
    ordered = sorted(active)
    return build_table(
        "processes", len(ordered), pid=np.array(ordered, np.int64), role="root",
        name=pa.array([named.get(pid, "") for pid in ordered], pa.string()),
    )  # fmt: skip


def _memory_findings(memory: Memory, calls: Calls, settings: dict[str, str]) -> list[str]:
    if not memory.recorded:
        visible = sum(calls.allocations().values())
        seen = (
            f"; its {visible:,} allocating calls are visible, without sizes, addresses and what was freed"
            if visible
            else ""
        )
        return [f"no GPU memory in it: it was captured without --cuda-memory-usage=true{seen}"]
    found = []
    if not memory.rows:
        found.append("GPU memory usage was to be collected, but there is no event of it")
    if memory.broken:
        found.append(f"a broken capture: {memory.broken}; its memory events are left out, nothing is a leak by them")
    if memory.static:
        total = sum(s["bytes"] for s in memory.static.values())
        count = sum(s["variables"] for s in memory.static.values())
        found.append(
            f"{count:,} static variables of modules hold {total:,} bytes: listed apart, they are never released"
        )
    if memory.unknown_frees:
        found.append(f"{memory.unknown_frees:,} deallocations of memory that was allocated before the capture")
    if memory.replaced:
        found.append(f"{memory.replaced:,} addresses were handed out again although no deallocation was seen")
    if memory.unknown_kind:
        found.append(f"{memory.unknown_kind:,} memory events of an unknown kind, taken for device memory")
    if memory.unknown_operation:
        found.append(f"{memory.unknown_operation:,} memory events are neither allocation nor deallocation: left out")
    if memory.without_call and not memory.broken:
        found.append(f"{memory.without_call:,} memory events without their API call: thread and stack are unknown")
    return found


def _activity_findings(
    export: Export, rows: dict[str, int], calls: Calls, without_call: int, without_kernel: int, never_closed: int
) -> list[str]:
    found = []
    if RUNTIME not in rows:
        found.append("no CUDA API calls in it: nothing of CUDA was traced, or the program never used it")
    if calls.failed:
        found.append(f"{calls.failed:,} CUDA calls failed")
    if calls.unnamed:
        found.append(f"{calls.unnamed:,} CUDA functions have no name in it")
    if calls.repeated_keys:
        found.append(f"{calls.repeated_keys:,} correlation ids are used twice in a process; the first call counts")
    if without_call:
        found.append(f"{without_call:,} kernels without their API call: their times are those of the GPU")
    if without_kernel:
        found.append(f"{without_kernel:,} launching calls without a kernel")
    if never_closed:
        found.append(f"{never_closed:,} NVTX ranges were never closed")
    if rows.get("CUDA_CALLCHAINS", 0) == 0 and rows.get(RUNTIME):
        found.append("no call stacks of CUDA calls in it: they need --cudabacktrace=all (or memory)")
    if export.ignored:
        found.append(
            f"tables that are no tables (views, virtual or computed) are not read: {', '.join(sorted(export.ignored))}"
        )
    if export.too_long:
        found.append(f"{export.too_long:,} texts of more than 4 MiB are left out")
    return found


def _limits(clock: str, settings: dict[str, str]) -> list[str]:
    limits = []
    if any(name.endswith("CUDA_SKIP_SOME_API_CALLS") and value == "true" for name, value in settings.items()):
        limits.append("nsys was allowed to skip API calls: that a call is missing proves nothing")
    if clock == "monotonic":
        limits.append(
            "its clock is the target's system clock: the one of a recording on the same boot, if the host never slept"
        )
    elif clock == "utc":
        limits.append("exports before 2025.6 only know UTC: joined with a recording through its wall-clock anchors")
    else:
        limits.append("it does not say when it started: its times are relative")
    return limits

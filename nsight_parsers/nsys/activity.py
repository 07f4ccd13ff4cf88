"""What threads did, from an export: CUDA API calls, kernel launches, NVTX ranges.

Rows come out in the order of their start, with ids from 1 in that order. Times are shifted by ``offset_ns`` onto the
clock of the report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nsight_parsers.arrow import Coded, Interned, build_table
from nsight_parsers.interning import StackInterner
from nsight_parsers.intervals import enclosing, innermost
from nsight_parsers.nsys.chains import read_chains, stack_ids
from nsight_parsers.nsys.database import NO_END, Export, Ints
from nsight_parsers.nsys.threads import correlation_key, pids, rows_of_keys, tids

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
NVTX = "NVTX_EVENTS"
PUSH_POP, START_END, MARK, DOMAIN = 59, 60, 34, 75
"""``NVTX_EVENTS.eventType``."""

_VERSION = re.compile(r"_(v\d+|ptsz|ptds)$")
LAUNCH = re.compile(
    r"cu(da)?(LaunchKernel|LaunchKernelEx|LaunchKernelExC|LaunchCooperativeKernel|GraphLaunch|LaunchGrid)"
)
_ALLOC = re.compile(r"cu(da)?(Mem)?(Malloc|Alloc|HostAlloc|Create$|HostRegister)\w*")
_FREE = re.compile(r"cu(da)?(Mem)?(Free|Release$|HostUnregister)\w*")


def strip_version(name: str) -> str:
    """``cudaMalloc_v3020`` → ``cudaMalloc``: the suffix is the version of the ABI, not another function."""
    while (shorter := _VERSION.sub("", name)) != name:
        name = shorter
    return name


@dataclass
class Marks:
    """NVTX ranges with their table; the arrays are parallel to it."""

    table: pa.Table
    thread: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    start: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    end: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    on_thread: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, bool))  # push/pop
    never_closed: int = 0

    def open_at(self, thread: Ints, at: Ints) -> Ints:
        """Ids of the innermost push/pop ranges open at times of threads; 0 for none."""
        rows = np.flatnonzero(self.on_thread)
        found = innermost(self.thread[rows], self.start[rows], self.end[rows], thread, at)
        return np.where(found >= 0, rows[found] + 1, 0) if len(rows) else np.zeros(len(at), np.int64)


def read_marks(export: Export, offset_ns: int) -> Marks:
    """NVTX ranges and marks. A range that was never closed has ``end_ns`` 0; a mark ends when it starts."""
    names = ("start", "end", "eventType", "globalTid", "textId", "domainId")
    column = export.ints(NVTX, *names, nulls={"end": NO_END})
    texts = export.text_column(NVTX, "text") or [None] * len(column["start"])
    kind = column["eventType"]
    domains = _domains(export, column, texts)
    rows = np.flatnonzero(np.isin(kind, (PUSH_POP, START_END, MARK)))
    rows = rows[np.lexsort((-column["end"][rows], column["start"][rows]))]
    if not len(rows):
        return Marks(build_table("marks", 0))
    start, thread, kind = column["start"][rows], column["globalTid"][rows], kind[rows]
    end = np.where(kind == MARK, start, column["end"][rows])
    text_ids = column["textId"][rows]
    known = export.strings(np.unique(text_ids))
    own = [texts[i] for i in rows.tolist()]
    named = [text if text is not None else known.get(i, "") for text, i in zip(own, text_ids.tolist(), strict=True)]
    pid, domain = pids(thread), column["domainId"][rows]
    words = Interned("")
    codes = [words.code(domains.get(key, "")) for key in zip(pid.tolist(), domain.tolist(), strict=True)]
    on_thread = kind == PUSH_POP
    parent = np.zeros(len(rows), np.int64)
    stacked = np.flatnonzero(on_thread)
    # Ranges nest within a domain of a thread; one number for both.
    _, group = np.unique(np.stack([thread[stacked], domain[stacked]]), axis=1, return_inverse=True)
    above = enclosing(np.ravel(group), start[stacked], end[stacked])
    parent[stacked] = np.where(above >= 0, stacked[above] + 1, 0)
    never_closed = end == NO_END
    table = build_table(
        "marks",
        len(rows),
        id=np.arange(1, len(rows) + 1),
        parent_id=parent,
        pid=pid,
        tid=tids(thread),
        start_ns=start + offset_ns,
        end_ns=np.where(never_closed, 0, np.where(never_closed, 0, end) + offset_ns),
        domain=Coded(np.array(codes, np.int64), words.words),
        name=pa.array(named, pa.string()),
    )
    return Marks(table, thread, start, end, on_thread, int(never_closed.sum()))


def _domains(export: Export, column: dict[str, Ints], texts: list[str | None]) -> dict[tuple[int, int], str]:
    """(pid, domain id) → name."""
    rows = np.flatnonzero(column["eventType"] == DOMAIN)
    known = export.strings(column["textId"][rows])
    pid = pids(column["globalTid"][rows])
    return {
        (p, d): texts[i] or known.get(t, "")
        for i, p, d, t in zip(
            rows.tolist(), pid.tolist(), column["domainId"][rows].tolist(), column["textId"][rows].tolist(), strict=True
        )
    }


@dataclass
class Calls:
    """CUDA API calls; the arrays are parallel to the table."""

    table: pa.Table
    start: Ints
    thread: Ints  # globalTid
    key: Ints  # correlation_key
    api: Ints  # index into apis
    apis: list[str]
    stack: Ints
    failed: int = 0
    unnamed: int = 0
    repeated_keys: int = 0

    def matching(self, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
        """Which calls have a function that ``pattern`` matches whole."""
        hit = np.array([pattern.fullmatch(name) is not None for name in self.apis], bool)
        return hit[self.api] if len(hit) else np.zeros(len(self.api), bool)

    def counts(self, pattern: re.Pattern[str]) -> dict[str, int]:
        """Successful calls by function, of those that ``pattern`` matches whole."""
        succeeded = self.table["result"].to_numpy() == 0
        count = np.bincount(self.api[succeeded], minlength=len(self.apis))
        return {n: int(c) for n, c in sorted(zip(self.apis, count, strict=True)) if c and pattern.fullmatch(n)}

    def allocations(self) -> dict[str, int]:
        """Successful allocating calls by function."""
        return self.counts(_ALLOC)

    def frees(self) -> dict[str, int]:
        """Successful freeing calls by function."""
        return self.counts(_FREE)


def read_calls(export: Export, offset_ns: int, stacks: StackInterner) -> Calls:
    """Runtime and driver API calls, a driver call inside a runtime call with that one as its parent."""
    names = ("start", "end", "globalTid", "correlationId", "nameId", "returnValue", "callchainId")
    column = export.ints(RUNTIME, *names, nulls={"end": NO_END})
    order = np.lexsort((-column["end"], column["start"]))
    column = {name: values[order] for name, values in column.items()}
    start, thread = column["start"], column["globalTid"]
    end = np.where(column["end"] == NO_END, start, column["end"])
    unique, position = np.unique(column["nameId"], return_inverse=True)
    text = export.strings(unique)
    apis = Interned()
    code_of_name = np.array([apis.code(strip_version(text.get(i, ""))) for i in unique.tolist()], np.int64)
    api = code_of_name[np.ravel(position)] if len(unique) else np.empty(0, np.int64)
    chains = read_chains(export, "CUDA_CALLCHAINS", np.unique(column["callchainId"]), stacks)
    stack = stack_ids(chains, column["callchainId"])
    key = correlation_key(pids(thread), column["correlationId"])
    parent = enclosing(thread, start, end)
    table = build_table(
        "calls",
        len(start),
        id=np.arange(1, len(start) + 1),
        parent_id=parent + 1,
        pid=pids(thread),
        tid=tids(thread),
        api=Coded(api, apis.words),
        enter_ns=start + offset_ns,
        exit_ns=end + offset_ns,
        result=np.clip(column["returnValue"], -(1 << 31), (1 << 31) - 1),
        user_stack=stack,
    )
    used = key[key != 0]
    return Calls(
        table, start, thread, key, api, apis.words, stack,
        failed=int((column["returnValue"] != 0).sum()),
        unnamed=sum(1 for i in unique.tolist() if i not in text),
        repeated_keys=len(used) - len(np.unique(used)),
    )  # fmt: skip


@dataclass
class Launches:
    """Kernel launches. ``without_call``: kernels whose API call is not in the export."""

    table: pa.Table
    without_call: int = 0
    without_kernel: int = 0


def read_launches(export: Export, offset_ns: int, calls: Calls, marks: Marks) -> Launches:
    """One row a kernel, at the time and thread of the API call that launched it.

    Where that call is missing the time is that of the kernel on the GPU, and the thread is unknown (0). Where the
    export has no kernels, one row a launching call without a name.
    """
    names = (
        "start", "globalPid", "correlationId", "demangledName", "shortName", "contextId", "streamId",
        "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ",
    )  # fmt: skip
    column = export.ints(KERNEL, *names)
    launching = calls.matching(LAUNCH)
    if export.has(KERNEL, "start", "correlationId"):
        key = correlation_key(pids(column["globalPid"]), column["correlationId"])
        call = rows_of_keys(calls.key, key)
        with_kernel = np.zeros(len(launching), bool)
        with_kernel[call[call >= 0]] = True
        without_kernel = int((launching & ~with_kernel).sum())
    else:
        call = np.flatnonzero(launching)
        column = {name: np.zeros(len(call), np.int64) for name in names}
        without_kernel = 0
    known = call >= 0
    start, pid, thread = column["start"].copy(), pids(column["globalPid"]), np.zeros(len(call), np.int64)
    start[known], thread[known] = calls.start[call[known]], calls.thread[call[known]]
    pid[known] = pids(thread[known])
    stack, api = np.zeros(len(call), np.int64), np.full(len(call), len(calls.apis), np.int64)
    stack[known], api[known] = calls.stack[call[known]], calls.api[call[known]]
    order = np.argsort(start, kind="stable")
    name_id = np.where(column["demangledName"] > 0, column["demangledName"], column["shortName"])[order]
    text = export.strings(np.unique(name_id))
    table = build_table(
        "launches",
        len(order),
        id=np.arange(1, len(order) + 1),
        ts_ns=start[order] + offset_ns,
        pid=pid[order],
        tid=tids(thread[order]),
        api=Coded(api[order], [*calls.apis, ""]),
        grid=_triples(column, "grid", order),
        block=_triples(column, "block", order),
        stream=column["streamId"][order],
        context=column["contextId"][order],
        user_stack=stack[order],
        kernel=pa.array([text.get(i, "") for i in name_id.tolist()], pa.string()),
        mark_id=marks.open_at(thread[order], start[order]),
    )
    return Launches(table, int((~known).sum()), without_kernel)


def _triples(column: dict[str, Ints], what: str, order: Ints) -> pa.Array:
    values = np.stack([column[f"{what}{axis}"][order] for axis in "XYZ"], axis=1).ravel()
    offsets = pa.array(np.arange(0, len(values) + 1, 3), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values, pa.int32()))

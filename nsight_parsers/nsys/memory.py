"""GPU memory in an export: usage events (``--cuda-memory-usage=true``) and stream-ordered pools."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from nsight_parsers.arrow import Coded, build_table
from nsight_parsers.interning import Frame, StackInterner
from nsight_parsers.intervals import lifetimes
from nsight_parsers.nsys.activity import Calls, Marks
from nsight_parsers.nsys.database import Export, Ints
from nsight_parsers.nsys.threads import correlation_key, pids, rows_of_keys, tids

USAGE = "CUDA_GPU_MEMORY_USAGE_EVENTS"
POOL = "CUDA_GPU_MEMORY_POOL_EVENTS"

KINDS = {
    "pageable": ("host", "heap"),
    "pinned": ("host", "pinned"),
    "device": ("gpu", "device"),
    "array": ("gpu", "array"),
    "managed": ("gpu", "managed"),
    "device static": ("gpu", "static"),
    "managed static": ("gpu", "static"),
    "unknown": ("gpu", "device"),
}
"""Label of ENUM_CUDA_MEM_KIND → layer and kind. Static memory belongs to loaded modules: it has no release and is never
a mem_event."""
KIND_LABELS = ("pageable", "pinned", "device", "array", "managed", "device static", "managed static", "unknown")
OPERATION_LABELS = ("allocation", "deallocation")
"""Labels by id, for exports without the ENUM tables; the ids have been the same in all versions."""

POOL_COUNTERS = {
    "localMemoryPoolSize": "gpu_pool_reserved",
    "localMemoryPoolUtilizedSize": "gpu_pool_used",
    "localMemoryPoolReleaseThreshold": "gpu_pool_release_threshold",
}


@dataclass
class Memory:
    """What the export says of memory. ``broken`` says why its events cannot be used; then there are none."""

    events: pa.Table
    samples: pa.Table
    recorded: bool = False
    broken: str = ""
    rows: int = 0
    allocations: int = 0
    frees: int = 0
    unknown_frees: int = 0
    replaced: int = 0
    without_call: int = 0
    unknown_kind: int = 0
    unknown_operation: int = 0
    static: dict[str, dict[str, int]] = field(default_factory=dict)


def read_memory(export: Export, offset_ns: int, calls: Calls, marks: Marks, stacks: StackInterner) -> Memory:
    """Usage events as mem_events, keyed by (process, context, address); pool figures as samples.

    The thread, stack and call of an event come from the API call of the same (process, correlation id). Where no
    call chain was collected, the program counter of the event is its stack.
    """
    names = (
        "start", "globalPid", "deviceId", "contextId", "address", "pc", "bytes", "memKind", "memoryOperationType",
        "correlationId", "localMemoryPoolAddress", *POOL_COUNTERS,
    )  # fmt: skip
    column = export.ints(USAGE, *names, nulls=dict.fromkeys(POOL_COUNTERS, -1))
    order = np.argsort(column["start"], kind="stable")
    column = {name: values[order] for name, values in column.items()}
    samples = _pool_samples(export, column, offset_ns)
    memory = Memory(build_table("mem_events", 0), samples, USAGE in export.tables, rows=len(order))
    operation = _labels(export, "ENUM_CUDA_DEV_MEM_EVENT_OPER", OPERATION_LABELS, column["memoryOperationType"])
    kind = _labels(export, "ENUM_CUDA_MEM_KIND", KIND_LABELS, column["memKind"])
    is_alloc, is_free = operation == "allocation", operation == "deallocation"
    memory.unknown_operation = int((~is_alloc & ~is_free).sum())
    memory.broken = _broken(column["start"], is_alloc, is_free, kind, calls)
    memory.static = _static(kind, is_alloc, column["bytes"])
    known = np.array([label in KINDS for label in kind], bool)
    memory.unknown_kind = int((~known | (kind == "unknown")).sum())
    rows = np.flatnonzero((is_alloc | is_free) & ~np.isin(kind, ("device static", "managed static")))
    if memory.broken or not len(rows):
        return memory
    memory.events = _events(
        memory, {n: v[rows] for n, v in column.items()}, is_alloc[rows], kind[rows], offset_ns, calls, marks, stacks
    )
    return memory


def _events(
    memory: Memory, column: dict[str, Ints], is_alloc: np.ndarray, kind: np.ndarray, offset_ns: int, calls: Calls,
    marks: Marks, stacks: StackInterner,
) -> pa.Table:  # fmt: skip
    pid, start = pids(column["globalPid"]), column["start"]
    call = rows_of_keys(calls.key, correlation_key(pid, column["correlationId"]))
    has_call = call >= 0
    thread, stack, api = np.zeros(len(pid), np.int64), np.zeros(len(pid), np.int64), np.full(len(pid), len(calls.apis))
    thread[has_call], stack[has_call], api[has_call] = (
        a[call[has_call]] for a in (calls.thread, calls.stack, calls.api)
    )
    bare = np.flatnonzero((stack == 0) & (column["pc"] != 0) & is_alloc)
    counters, position = np.unique(column["pc"][bare], return_inverse=True)
    at_pc = [stacks.add([Frame("", offset=pc & 0xFFFF_FFFF_FFFF_FFFF)]) for pc in counters.tolist()]
    stack[bare] = np.array(at_pc, np.int64)[np.ravel(position)] if len(bare) else stack[bare]
    life = lifetimes(is_alloc, column["address"], column["contextId"], pid)
    ended = life.alloc_of >= 0
    own = np.where(ended, life.alloc_of, np.arange(len(pid)))
    pooled = (column["localMemoryPoolAddress"] != 0) & (kind == "device")
    labels, label = np.unique(np.where(pooled, "async", kind), return_inverse=True)
    words = [("gpu", "async") if name == "async" else KINDS.get(name, ("gpu", "device")) for name in labels.tolist()]
    label = np.ravel(label)
    marked = marks.open_at(thread, start)
    # A free that nobody saw, made visible where the address comes back.
    reuse = life.replaced
    rows = np.concatenate([np.arange(len(pid)), reuse])
    at = np.concatenate([start, start[life.replaced_by]])
    alloc = np.concatenate([is_alloc, np.zeros(len(reuse), bool)])
    source = np.concatenate([own, reuse])  # the row that an event takes size, kind and stacks from
    freed = np.concatenate([ended, np.ones(len(reuse), bool)])
    order = np.lexsort((np.arange(len(rows)) < len(pid), at))  # an implicit free comes before what replaced it
    rows, at, alloc, source, freed = rows[order], at[order], alloc[order], source[order], freed[order]
    explicit = order < len(pid)
    has_stack = alloc | freed
    memory.allocations, memory.frees = int(is_alloc.sum()), int((~is_alloc).sum())
    memory.unknown_frees, memory.replaced = int((~is_alloc & ~ended).sum()), len(reuse)
    memory.without_call = int((~has_call).sum())
    own_call = np.where(explicit & has_call[rows], call[rows] + 1, 0)
    return build_table(
        "mem_events",
        len(rows),
        ts_ns=at + offset_ns,
        pid=pid[rows],
        tid=np.where(explicit, tids(thread[rows]), 0),
        op=Coded(np.where(alloc, 0, 1), ["alloc", "free"]),
        cause=Coded(np.where(explicit, 0, 1), ["call", "reuse"]),
        layer=Coded(label[source], [layer for layer, _ in words]),
        kind=Coded(label[source], [name for _, name in words]),
        api=Coded(api[source], [*calls.apis, ""]),  # of the allocation: identity of the site, in its free as well
        addr=column["address"][rows].astype(np.uint64),
        size_bytes=column["bytes"][source],
        requested_bytes=column["bytes"][source],
        user_stack=np.where(has_stack, stack[source], 0),
        weight=1,
        call_id=own_call,
        alloc_ts_ns=np.where(freed & ~alloc, start[source] + offset_ns, 0),
        mark_id=np.where(has_stack, marked[source], 0),
    )


def _labels(export: Export, table: str, usual: tuple[str, ...], ids: Ints) -> np.ndarray:
    """Labels of enumerated values in lower case, '' for unknown ones; from the export's own ENUM table if there."""
    labels = dict(enumerate(usual))
    for number, label in export.texts(table, "id", "label"):
        if number.isdecimal():
            labels[int(number)] = label.lower()
    unique, position = np.unique(ids, return_inverse=True)
    return np.array([labels.get(i, "") for i in unique.tolist()] or [""], object)[np.ravel(position)].astype(str)


def _broken(start: Ints, is_alloc: np.ndarray, is_free: np.ndarray, kind: np.ndarray, calls: Calls) -> str:
    """Why the events cannot be used; '' when they can.

    Captures have been reported with every ``start`` 0 and with allocations only. A program that leaks everything looks
    like the latter too, so the calls decide: more frees than the one cudaFree(0) by which programs create a context.
    """
    moving = ~np.isin(kind, ("device static", "managed static"))
    allocations, frees = int((is_alloc & moving).sum()), int((is_free & moving).sum())
    if allocations + frees >= 2 and len(np.unique(start[moving])) == 1:
        return f"all {allocations + frees:,} memory events have the same time"
    called = sum(calls.frees().values())
    processes = len(np.unique(calls.thread >> 24))
    if allocations and not frees and called > 2 * processes:
        return f"it has {allocations:,} allocations and no deallocation, although {called:,} calls freed memory"
    return ""


def _static(kind: np.ndarray, is_alloc: np.ndarray, size: Ints) -> dict[str, dict[str, int]]:
    result = {}
    for label in ("device static", "managed static"):
        rows = (kind == label) & is_alloc
        if rows.any():
            result[label] = {"variables": int(rows.sum()), "bytes": int(size[rows].sum())}
    return result


def _pool_samples(export: Export, usage: dict[str, Ints], offset_ns: int) -> pa.Table:
    """Size, use and release threshold of pools over time. ``scope_id`` is the device, with the pool's address where a
    device has several."""
    pool = export.ints(
        POOL, "start", "deviceId", "address", "minBytesToKeep", *POOL_COUNTERS, nulls=dict.fromkeys(POOL_COUNTERS, -1)
    )
    times = np.concatenate([usage["start"], pool["start"]])
    device = np.concatenate([usage["deviceId"], pool["deviceId"]])
    address = np.concatenate([usage["localMemoryPoolAddress"], pool["address"]])
    pieces = []
    pools, of_row = np.unique(np.stack([device, address]), axis=1, return_inverse=True)
    of_row = np.ravel(of_row)
    several = {d for d in pools[0].tolist() if len({a for e, a in pools.T.tolist() if e == d and a}) > 1}
    names = [f"{d}:{a & 0xFFFF_FFFF_FFFF_FFFF:#x}" if d in several else str(d) for d, a in pools.T.tolist()]
    for column, counter in POOL_COUNTERS.items():
        values = np.concatenate([usage[column], pool[column]])
        rows = np.flatnonzero((values >= 0) & (address != 0))
        pieces.append(
            build_table(
                "samples",
                len(rows),
                ts_ns=times[rows] + offset_ns,
                scope="device",
                scope_id=Coded(of_row[rows], names),
                counter=counter,
                value=values[rows].astype(np.float64),
            )
        )
    return pa.concat_tables(pieces).sort_by("ts_ns")

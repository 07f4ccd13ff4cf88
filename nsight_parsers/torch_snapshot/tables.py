"""The tables of a snapshot, made of its collected columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from nsight_parsers.arrow import Coded, Interned, build_table
from nsight_parsers.intervals import lifetimes
from nsight_parsers.torch_snapshot.collect import ALLOCS, FREES, SEGMENT_COLUMNS, Collected


class Events(NamedTuple):
    """mem_events, the times of the first and last row in ns, frees of unknown allocations, allocations never freed."""

    table: pa.Table
    first_ns: int = 0
    last_ns: int = 0
    unknown_frees: int = 0
    never_freed: int = 0


def events(of: Collected) -> Events:
    """The trace. A free has the size, kind and stacks of its allocation."""
    if not of.trace:
        return Events(build_table("mem_events", 0))
    column = {name: np.concatenate([piece[name] for piece in of.trace]) for name in of.trace[0]}
    if of.without_time:
        time_ns = np.arange(1, len(column["addr"]) + 1)
    else:
        time_ns = column["time_us"] * 1000
        order = np.argsort(time_ns, kind="stable")
        column, time_ns = {name: values[order] for name, values in column.items()}, time_ns[order]
    words = of.kind_code.words
    families = np.array([(ALLOCS.get(w) or FREES[w])[1] for w in words], np.int8)
    kinds = Interned()
    kind_codes = np.array([kinds.code((ALLOCS.get(w) or FREES[w])[0]) for w in words], np.int16)
    is_alloc = column["is_alloc"]
    life = lifetimes(is_alloc, column["addr"], families[column["action"]], column["slot"])
    ended = life.alloc_of >= 0
    own = np.where(ended, life.alloc_of, np.arange(len(is_alloc)))
    has_stack = is_alloc | ended
    table = build_table(
        "mem_events",
        len(is_alloc),
        ts_ns=time_ns,
        pid=of.pid,
        op=Coded(np.where(is_alloc, 0, 1), ["alloc", "free"]),
        cause="call",
        layer="gpu",
        kind=Coded(kind_codes[column["action"][own]], kinds.words),
        api=Coded(column["action"][own], words),  # of the allocation, in its free as well
        addr=column["addr"],
        size_bytes=column["size"][own],
        requested_bytes=column["size"][own],
        user_stack=np.where(has_stack, column["native"][own], 0),
        python_stack=np.where(has_stack, column["python"][own], 0),
        weight=1,
        alloc_ts_ns=np.where(ended, time_ns[own], 0),
    )
    unknown, never = int((~is_alloc & ~ended).sum()), int(is_alloc.sum() - ended.sum())
    return Events(table, int(time_ns.min()), int(time_ns.max()), unknown, never)


def segments(of: Collected, at_ns: int) -> pa.Table:
    """One row a block."""
    columns = {name: np.array(of.segments[name], dtype) for name, dtype in SEGMENT_COLUMNS.items() if dtype}
    texts = {name: of.segments[name] for name, dtype in SEGMENT_COLUMNS.items() if dtype is None}
    rows = len(of.segments["addr"])
    return build_table("segments", rows, ts_ns=at_ns, pid=of.pid, **columns, **texts)


def fragmentation(of: Collected, blocks: pa.Table) -> dict[int, dict[str, int]]:
    """Figures of each device in bytes. ``inactive_split``: free pieces of segments that are partly in use."""
    import pandas as pd

    states = blocks["state"].cast(pa.string()).to_pandas()
    frame = pd.DataFrame(
        {
            "device": blocks["device"].to_numpy(),
            "segment": blocks["segment_addr"].to_numpy(),
            "bytes": blocks["size_bytes"].to_numpy(),
            "requested": blocks["requested_bytes"].to_numpy(),
            "allocated": (states == "active_allocated").to_numpy(),
            "inactive": (states == "inactive").to_numpy(),
        }
    )
    used = ~frame["inactive"]
    frame["partly_used"] = used.groupby([frame["device"], frame["segment"]]).transform("any")
    result = {}
    for device in sorted(of.segment_count):
        here = frame[frame["device"] == device]
        inactive = here[here["inactive"]]
        result[int(device)] = {
            "segments": of.segment_count[device],
            "blocks": len(here),
            "reserved_bytes": of.reserved[device],
            "allocated_bytes": int(here.loc[here["allocated"], "bytes"].sum()),
            "active_bytes": int(here.loc[~here["inactive"], "bytes"].sum()),
            "requested_bytes": int(here.loc[~here["inactive"], "requested"].sum()),
            "inactive_bytes": int(inactive["bytes"].sum()),
            "inactive_split_bytes": int(inactive.loc[inactive["partly_used"], "bytes"].sum()),
            "largest_inactive_block_bytes": int(inactive["bytes"].max()) if len(inactive) else 0,
        }
    return result


def marks(annotations: Any, pid: int) -> tuple[pa.Table, int]:
    """Ranges of ``external_annotations``: a START and the next END of the same name and device. Also how many were
    never closed."""
    rows: list[tuple[str, int, int]] = []
    waiting: dict[tuple[str, int], list[int]] = {}
    for note in annotations if isinstance(annotations, list) else []:
        key = (str(note["name"])[:1024], int(note.get("device", 0)))
        at_ns = int(note["time_us"]) * 1000
        if note["stage"] == "START":
            waiting.setdefault(key, []).append(len(rows))
            rows.append((key[0], at_ns, 0))
        elif waiting.get(key):
            index = waiting[key].pop()
            rows[index] = (key[0], rows[index][1], at_ns)
    table = build_table(
        "marks",
        len(rows),
        id=np.arange(1, len(rows) + 1),
        pid=pid,
        start_ns=np.array([start for _, start, _ in rows], np.int64),
        end_ns=np.array([end for _, _, end in rows], np.int64),
        domain="torch",
        name=pa.array([name for name, _, _ in rows], pa.string()),
    )
    return table, sum(end == 0 for _, _, end in rows)


def samples(figures_of: dict[int, dict[str, int]], at_ns: int) -> pa.Table:
    """The counters of each device at the time of the snapshot, named as in samples of a recording."""
    counters = {
        "gpu_reserved": "reserved_bytes",
        "gpu_allocated": "allocated_bytes",
        "gpu_active": "active_bytes",
        "gpu_requested": "requested_bytes",
        "gpu_inactive": "inactive_bytes",
        "gpu_inactive_split": "inactive_split_bytes",
        "gpu_largest_inactive_block": "largest_inactive_block_bytes",
    }
    rows = [
        (str(device), counter, float(figures[key]))
        for device, figures in figures_of.items()
        for counter, key in counters.items()
    ]
    device, counter, value = zip(*rows, strict=True) if rows else ((), (), ())
    return build_table(
        "samples", len(rows), ts_ns=at_ns, scope="device", scope_id=pa.array(device, pa.string()),
        counter=pa.array(counter, pa.string()), value=np.array(value, np.float64),
    )  # fmt: skip

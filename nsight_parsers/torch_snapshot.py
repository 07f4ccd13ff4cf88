"""PyTorch's CUDA memory snapshots: what ``torch.cuda.memory._dump_snapshot`` pickles.

``device_traces`` become ``mem_events``, ``segments`` and their blocks the table ``segments``, the state of each device
``samples``, annotations ``marks``. The dictionary is documented in PyTorch's ``torch/cuda/memory.py`` (``_snapshot``);
it holds plain data only, and a pickle with anything else is refused (:mod:`nsight_parsers.plain_pickle`).

Two levels of the same memory are in it. Blocks, which tensors use, are kind ``pool_block``: shown, and never added to
the layer. Segments, which the caching allocator took from the driver (cudaMalloc), are kind ``device``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.arrow import Coded, Interned, build_table, not_empty
from nsight_parsers.interning import Frame, StackInterner
from nsight_parsers.intervals import lifetimes
from nsight_parsers.plain_pickle import PickleRefusedError, PlainPickle

MAX_JSON_BYTES = 256 << 20
MAX_OOM_FACTS = 100
MIN_ROW_BYTES = 8
"""Least bytes of file for each row: shared lists must not multiply into more rows than the file can hold."""

ALLOCS = {"alloc": ("pool_block", 0), "segment_alloc": ("device", 1), "segment_map": ("vmm", 2)}
FREES = {"free_completed": ("pool_block", 0), "segment_free": ("device", 1), "segment_unmap": ("vmm", 2)}
"""Action → kind of memory and the family within which addresses pair. ``free_requested`` only announces a free: the
block returns to the pool with ``free_completed``, when the streams that use it are done."""

NATIVE_SUFFIXES = (".cpp", ".cc", ".c", ".cu", ".h", ".hpp", ".cuh", ".so")

LIMITS = [
    "the file names neither process, thread, host nor GPU: --pid says which process it is of",
    "it shows the allocator's view: a live tensor is no leak by itself, growth across equal iterations is",
    "the trace is a ring buffer: memory allocated before its first row shows in the segments only",
    "sizes of the trace are those that were asked for, before the allocator's rounding",
    "its clock is Unix time that PyTorch derives from the CPU's cycle counter: expect a small skew",
]


def parse_torch_snapshot(
    path: Path | str, *, pid: int = 0, progress: Callable[[int, int], None] | None = None
) -> ParsedReport:
    """Reads a snapshot, pickled or as JSON.

    ``pid`` is the process that it is of, 0 = unknown. ``progress(done_bytes, total_bytes)``. Pickles are read in one
    pass in memory of about the size of the file. Raises ReportError for a file that is damaged, cut short or hostile.
    """
    path = Path(path)
    snapshot: _Snapshot
    try:
        total = path.stat().st_size
        snapshot = _Snapshot(total, pid)
        with path.open("rb") as file:
            if file.peek(1)[:1] == b"\x80":
                tell = (lambda done: progress(done, total)) if progress else (lambda done: None)
                reader = PlainPickle(file, snapshot.append, tell)
                snapshot.forget, snapshot.is_shared = reader.forget, reader.is_shared
                top = reader.load()
            else:
                top = _load_json(path, total)
                snapshot.add_json(top)
        return snapshot.report(top)
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None
    except PickleRefusedError as error:
        raise ReportError(f"{path}: {error}") from None
    except _WrongShapeError as error:
        raise ReportError(f"{path}: not a PyTorch memory snapshot: {error}") from None
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError, pa.ArrowException) as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(f"{path}: damaged: a value of the snapshot has the wrong type or is out of range") from error


class _WrongShapeError(ValueError):
    pass


def _load_json(path: Path, size: int) -> Any:
    if size > MAX_JSON_BYTES:
        raise ReportError(f"{path}: {size:,} bytes of JSON; pickle a snapshot of this size, its reader streams")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ReportError(f"{path}: damaged or cut short: not valid JSON") from None


class _Snapshot:
    """Collects columns; lists of rows come in any order and in pieces."""

    def __init__(self, size_bytes: int, pid: int) -> None:
        self.pid = pid
        self.max_rows = 1000 + size_bytes // MIN_ROW_BYTES
        self.rows = 0
        self.actions: Counter[str] = Counter()
        self.trace: list[dict[str, np.ndarray]] = []  # one dictionary of columns a piece
        self.trace_slots: dict[int, int] = {}  # id() of a device's list → its number in the order of appearance
        self.trace_lists: list[list[Any]] = []  # keeps them alive, so that no id() is used twice
        self.oom: list[dict[str, int]] = []
        self.snapshot_us = 0
        self.last_us = 0
        self.kind_code = Interned()
        self.stacks = StackInterner()
        self.known_frames: dict[int, tuple[Any, tuple[int, int]]] = {}
        self.frame_ids: dict[tuple[str, str, int], tuple[int, bool]] = {}
        self.segments: dict[str, list[Any]] = {name: [] for name in _SEGMENT_COLUMNS}
        self.segment_count: Counter[int] = Counter()
        self.reserved: Counter[int] = Counter()
        self.without_time = False
        self.forget: Callable[[Any], None] = lambda _: None
        self.is_shared: Callable[[Any], bool] = lambda _: True  # json.loads keeps everything until the end

    def append(self, target: list[Any], items: list[Any]) -> bool:
        """Takes trace rows and segments out of the pickle as they come."""
        first = items[0]
        if type(first) is not dict:
            return False
        if "action" in first:
            if id(target) not in self.trace_slots:
                self.trace_slots[id(target)] = len(self.trace_lists)
                self.trace_lists.append(target)
            self.add_trace(self.trace_slots[id(target)], items)
        elif "blocks" in first:
            self.add_segments(items)
        else:
            return False
        for item in items:
            self.forget(item)
        return True

    def add_json(self, top: Any) -> None:
        """The rows of a snapshot that is in memory already."""
        segments = top if isinstance(top, list) else top.get("segments", []) if isinstance(top, dict) else []
        self.add_segments(segments)
        for device, rows in enumerate(top.get("device_traces", []) if isinstance(top, dict) else []):
            self.trace_slots[id(rows)] = device
            self.add_trace(device, rows)

    def add_trace(self, slot: int, rows: list[Any]) -> None:
        """Rows of one device's trace, in its order."""
        self._count(len(rows))
        action: list[int] = []
        alloc: list[bool] = []
        columns: dict[str, list[Any]] = {name: [] for name in ("addr", "size", "time", "python", "native")}
        addr, size, time, python, native = columns.values()
        for row in rows:
            what = row["action"]
            if type(what) is not str:
                raise _WrongShapeError("an action that is no text")
            self.actions[what[:40]] += 1
            found = ALLOCS.get(what) or FREES.get(what)
            at = row.get("time_us")
            if at is None:
                self.without_time = True
            elif at > self.last_us:
                self.last_us = at
            if what == "oom" and len(self.oom) < MAX_OOM_FACTS:
                self.oom.append(
                    {"device": slot, "time_us": int(at or 0), "requested_bytes": int(row["size"]),
                     "device_free_bytes": int(row.get("device_free", row.get("addr", 0)))}
                )  # fmt: skip
            elif what == "snapshot":
                self.snapshot_us = max(self.snapshot_us, int(at or 0))
            if found is None:
                continue
            action.append(self.kind_code.code(what))
            alloc.append(what in ALLOCS)
            addr.append(row["addr"])
            size.append(row["size"])
            time.append(at or 0)
            ids = self._stacks_of(row.get("frames"))
            python.append(ids[0])
            native.append(ids[1])
        if len(self.actions) > 1000:
            raise _WrongShapeError("more kinds of actions than PyTorch has")
        if action:
            self.trace.append(
                {
                    "slot": np.full(len(action), slot, np.int32),
                    "action": np.array(action, np.int16),
                    "is_alloc": np.array(alloc, bool),
                    "addr": np.array(addr, np.uint64),
                    "size": np.array(size, np.int64),
                    "time_us": np.array(time, np.int64),
                    "python": np.array(python, np.int32),
                    "native": np.array(native, np.int32),
                }
            )

    def add_segments(self, segments: Iterable[Any]) -> None:
        """Segments with their blocks, one row a block."""
        columns = self.segments
        for segment in segments:
            device, total = int(segment.get("device", 0)), int(segment["total_size"])
            self.segment_count[device] += 1
            self.reserved[device] += total
            blocks = segment["blocks"]
            self._count(1 + len(blocks))
            kind, pool = segment.get("segment_type", ""), segment.get("segment_pool_id", (0, 0))
            if segment.get("is_expandable"):
                kind = "expandable"
            fixed = (device, segment["address"], total, str(kind)[:40], _pool(pool), segment.get("stream", 0))
            address = segment["address"]
            for block in blocks:
                python, native = self._stacks_of(block.get("frames") or _history_frames(block))
                size = block["size"]
                at = block.get("address", address)  # snapshots of 2022 leave it out: blocks follow each other
                address = at + size
                values = (*fixed, at, size, block.get("requested_size", size), str(block["state"])[:40], native, python)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)

    def _count(self, rows: int) -> None:
        self.rows += rows
        if self.rows > self.max_rows:
            raise _WrongShapeError("more rows than a file of its size can hold")

    def _stacks_of(self, frames: Any) -> tuple[int, int]:
        """Ids of the Python and the native stack of a list of frames, innermost first."""
        if not frames:
            return 0, 0
        key = id(frames)
        known = self.known_frames.get(key)
        if known is not None:
            return known[1]
        python: list[int] = []
        native: list[int] = []
        for frame in reversed(frames):
            name, file, line = frame["name"], frame["filename"], frame["line"]
            if type(name) is not str or type(file) is not str:
                raise _WrongShapeError("a frame without a name")
            identity = (name[:1024], file[:1024], int(line))
            found = self.frame_ids.get(identity)
            if found is None:
                found = self.frame_ids[identity] = self._frame(*identity)
            (python if found[1] else native).append(found[0])
        ids = self.stacks.add_ids(python), self.stacks.add_ids(native)
        if self.is_shared(frames):
            self.known_frames[key] = (frames, ids)
        return ids

    def _frame(self, name: str, file: str, line: int) -> tuple[int, bool]:
        is_python = file not in ("??", "") and not file.endswith(NATIVE_SUFFIXES)
        if is_python:
            return self.stacks.frame_id(Frame(name, file, line, kind="python")), True
        return self.stacks.frame_id(Frame(name, "" if file == "??" else file, line)), False

    # What follows runs once, when everything is read.

    def report(self, top: Any) -> ParsedReport:
        """The parsed report. ``top`` is the outermost object, without what was taken out of it."""
        if not isinstance(top, dict | list) or (isinstance(top, dict) and not {"segments", "device_traces"} & set(top)):
            raise _WrongShapeError("neither segments nor device_traces in it")
        top = top if isinstance(top, dict) else {}
        traces = top.get("device_traces", [])
        devices = {
            self.trace_slots[id(rows)]: device for device, rows in enumerate(traces) if id(rows) in self.trace_slots
        }
        events, first_ns, last_ns = self._events(devices)
        at_ns = int(self.snapshot_us or self.last_us) * 1000
        segments = self._segments(at_ns)
        fragmentation = self._fragmentation(segments)
        marks, open_marks = self._marks(top.get("external_annotations", []))
        tables = {
            "mem_events": events,
            "segments": segments,
            "samples": _samples(fragmentation, at_ns),
            "marks": marks,
            **self.stacks.tables(),
        }
        if self.pid:
            tables["processes"] = build_table("processes", 1, pid=self.pid, role="root")
        for oom in self.oom:
            oom["device"] = devices.get(oom["device"], oom["device"])
        settings = top.get("allocator_settings")
        report = ParsedReport(not_empty(tables), tool="PyTorch", limits=list(LIMITS))
        report.clock = "none" if self.without_time or not at_ns else "utc"
        report.facts = {
            "pid": self.pid,
            "actions": dict(sorted(self.actions.items())),
            "devices": sorted(fragmentation),
            "fragmentation": {str(device): figures for device, figures in sorted(fragmentation.items())},
            "out_of_memory": self.oom,
            "trace_start_ns": first_ns,
            "trace_end_ns": last_ns,
            "allocator_settings": _plain_settings(settings),
        }
        report.findings = self._findings(events, fragmentation, open_marks)
        return report

    def _events(self, devices: dict[int, int]) -> tuple[pa.Table, int, int]:
        """mem_events, and the times of the first and last row in ns."""
        if not self.trace:
            return build_table("mem_events", 0), 0, 0
        column = {name: np.concatenate([piece[name] for piece in self.trace]) for name in self.trace[0]}
        if self.without_time:
            time_ns = np.arange(1, len(column["addr"]) + 1)
        else:
            time_ns = column["time_us"] * 1000
            order = np.argsort(time_ns, kind="stable")
            column, time_ns = {name: values[order] for name, values in column.items()}, time_ns[order]
        words = self.kind_code.words
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
            pid=self.pid,
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
        self.unknown_frees = int((~is_alloc & ~ended).sum())
        self.never_freed = int(is_alloc.sum() - ended.sum())
        return table, int(time_ns.min()), int(time_ns.max())

    unknown_frees = 0
    never_freed = 0

    def _segments(self, at_ns: int) -> pa.Table:
        columns = {name: np.array(self.segments[name], dtype) for name, dtype in _SEGMENT_COLUMNS.items() if dtype}
        texts = {name: self.segments[name] for name, dtype in _SEGMENT_COLUMNS.items() if dtype is None}
        rows = len(self.segments["addr"])
        return build_table("segments", rows, ts_ns=at_ns, pid=self.pid, **columns, **texts)

    def _fragmentation(self, segments: pa.Table) -> dict[int, dict[str, int]]:
        """Figures of each device in bytes. ``inactive_split``: free pieces of segments that are partly in use."""
        import pandas as pd

        states = segments["state"].cast(pa.string()).to_pandas()
        frame = pd.DataFrame(
            {
                "device": segments["device"].to_numpy(),
                "segment": segments["segment_addr"].to_numpy(),
                "bytes": segments["size_bytes"].to_numpy(),
                "requested": segments["requested_bytes"].to_numpy(),
                "allocated": (states == "active_allocated").to_numpy(),
                "inactive": (states == "inactive").to_numpy(),
            }
        )
        used = ~frame["inactive"]
        frame["partly_used"] = used.groupby([frame["device"], frame["segment"]]).transform("any")
        result = {}
        for device in sorted(self.segment_count):
            of = frame[frame["device"] == device]
            inactive = of[of["inactive"]]
            result[int(device)] = {
                "segments": self.segment_count[device],
                "blocks": len(of),
                "reserved_bytes": self.reserved[device],
                "allocated_bytes": int(of.loc[of["allocated"], "bytes"].sum()),
                "active_bytes": int(of.loc[~of["inactive"], "bytes"].sum()),
                "requested_bytes": int(of.loc[~of["inactive"], "requested"].sum()),
                "inactive_bytes": int(inactive["bytes"].sum()),
                "inactive_split_bytes": int(inactive.loc[inactive["partly_used"], "bytes"].sum()),
                "largest_inactive_block_bytes": int(inactive["bytes"].max()) if len(inactive) else 0,
            }
        return result

    def _marks(self, annotations: Any) -> tuple[pa.Table, int]:
        """Ranges of ``external_annotations``: a START and the next END of the same name and device."""
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
            pid=self.pid,
            start_ns=np.array([start for _, start, _ in rows], np.int64),
            end_ns=np.array([end for _, _, end in rows], np.int64),
            domain="torch",
            name=pa.array([name for name, _, _ in rows], pa.string()),
        )
        return table, sum(end == 0 for _, _, end in rows)

    def _findings(self, events: pa.Table, fragmentation: dict[int, dict[str, int]], open_marks: int) -> list[str]:
        found = []
        if not self.actions:
            found.append(
                "no allocation history in it (torch.cuda.memory._record_memory_history was off): a state, no growth"
            )
        elif self.without_time:
            found.append("written by a PyTorch of 2023 without times: rows are in order, rates have no meaning")
        if self.unknown_frees:
            found.append(f"{self.unknown_frees:,} frees of memory that was allocated before the first row of the trace")
        if self.never_freed:
            found.append(f"{self.never_freed:,} allocations are not freed inside the trace")
        for device, figures in fragmentation.items():
            failed = [oom for oom in self.oom if oom["device"] == device]
            if not failed:
                continue
            wanted = failed[-1]["requested_bytes"]
            largest, inactive = figures["largest_inactive_block_bytes"], figures["inactive_bytes"]
            text = (
                f"device {device} ran out of memory: {wanted:,} bytes asked for, {failed[-1]['device_free_bytes']:,} "
                f"free on the device; the pool holds {inactive:,} bytes in free blocks, the largest {largest:,}"
            )
            found.append(text + (": fragmentation" if largest < wanted <= inactive else ""))
        if open_marks:
            found.append(f"{open_marks:,} annotations were never closed")
        if self.stacks.cut:
            found.append(f"{self.stacks.cut:,} stacks were cut to their innermost 1,024 frames")
        return found


_SEGMENT_COLUMNS: dict[str, Any] = {
    "device": np.int32,
    "segment_addr": np.uint64,
    "segment_bytes": np.int64,
    "segment_type": None,
    "pool": None,
    "stream": np.uint64,
    "addr": np.uint64,
    "size_bytes": np.int64,
    "requested_bytes": np.int64,
    "state": None,
    "user_stack": np.int32,
    "python_stack": np.int32,
}


def _pool(pool: Any) -> str:
    """``0,0`` is the default pool, others belong to a graph capture or to the user."""
    if isinstance(pool, tuple | list) and len(pool) == 2:
        return f"{int(pool[0])},{int(pool[1])}"
    return ""


def _history_frames(block: dict[str, Any]) -> Any:
    """Snapshots of 2022 and 2023 keep the frames of a block in its ``history``, the newest entry first."""
    history = block.get("history")
    return history[0].get("frames") if isinstance(history, list) and history else None


def _samples(fragmentation: dict[int, dict[str, int]], at_ns: int) -> pa.Table:
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
        for device, figures in fragmentation.items()
        for counter, key in counters.items()
    ]
    device, counter, value = zip(*rows, strict=True) if rows else ((), (), ())
    return build_table(
        "samples", len(rows), ts_ns=at_ns, scope="device", scope_id=pa.array(device, pa.string()),
        counter=pa.array(counter, pa.string()), value=np.array(value, np.float64),
    )  # fmt: skip


def _plain_settings(settings: Any) -> dict[str, Any]:
    """Numbers and switches only: the configuration text comes from the environment."""
    if not isinstance(settings, dict):
        return {}
    kept = {str(k)[:64]: v for k, v in settings.items() if isinstance(v, bool | int | float)}
    return dict(list(kept.items())[:64])

"""Collecting the rows of a snapshot as columns, in whatever pieces they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from nsight_parsers.arrow import Interned
from nsight_parsers.interning import Frame, StackInterner

MAX_OOM_FACTS = 100
MIN_ROW_BYTES = 8
"""Least bytes of file for each row: shared lists must not multiply into more rows than the file can hold."""

ALLOCS = {"alloc": ("pool_block", 0), "segment_alloc": ("pool_segment", 1), "segment_map": ("pool_segment", 2)}
FREES = {"free_completed": ("pool_block", 0), "segment_free": ("pool_segment", 1), "segment_unmap": ("pool_segment", 2)}
"""Action → kind of memory and the family within which addresses pair. ``free_requested`` only announces a free: the
block returns to the pool with ``free_completed``, when the streams that use it are done."""

NATIVE_SUFFIXES = (".cpp", ".cc", ".c", ".S", ".cu", ".h", ".hpp", ".cuh", ".so")


class WrongShapeError(Exception):
    """Not the structure that PyTorch writes."""


class Collected:
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
        self.segments: dict[str, list[Any]] = {name: [] for name in SEGMENT_COLUMNS}
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
                raise WrongShapeError("an action that is no text")
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
            raise WrongShapeError("more kinds of actions than PyTorch has")
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
            raise WrongShapeError("more rows than a file of its size can hold")

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
                raise WrongShapeError("a frame without a name")
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


SEGMENT_COLUMNS: dict[str, Any] = {
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

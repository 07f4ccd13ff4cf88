"""Synthetic captures for tests: say what a program did, get the capture that a recorder would have made of
it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from leakscope.capture import CaptureWriter
from leakscope.model.manifest import Manifest, Source
from leakscope.model.tables import MAX_PART_ROWS, TABLES

START_NS = 1_000_000_000
PID = 100


class SyntheticCapture:
    """Collects rows and writes them as a capture. Times are seconds since the start of the capture.

    Frames are written as text: ``main`` (module app), ``libc.so.6!mmap`` (a module), ``k:ksys_write``
    (kernel), ``py:serve@app.py:7`` (Python). Stacks are lists of them, outermost first.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.options: dict[str, Any] = {}  # of the recording, in the manifest
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        self._frames: dict[str, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._next_addr = 0x10_0000
        self._next_call = 1

    def ns(self, at_s: float) -> int:
        """Seconds since the start on the clock of the capture."""
        return START_NS + round(at_s * 1e9)

    def frame(self, text: str) -> int:
        """The id of a frame, interned."""
        if text not in self._frames:
            row: dict[str, Any] = {"id": len(self._frames) + 1, "module": "app", "kind": "native"}
            if text.startswith("k:"):
                row |= {"function": text[2:], "module": "", "kind": "kernel"}
            elif text.startswith("py:"):
                function, place = text[3:].split("@")
                file, line = place.rsplit(":", 1)
                row |= {"function": function, "file": file, "line": int(line), "module": "", "kind": "python"}
            elif "!" in text:
                module, function = text.split("!")
                row |= {"function": function, "module": module}
            else:
                row["function"] = text
            self._frames[text] = row["id"]
            self.rows["frames"].append(row)
        return self._frames[text]

    def stack(self, frames: Iterable[str]) -> int:
        """The id of a stack, interned; 0 for none."""
        ids = tuple(self.frame(f) for f in frames)
        if not ids:
            return 0
        if ids not in self._stacks:
            self._stacks[ids] = len(self._stacks) + 1
            self.rows["stacks"].append({"id": self._stacks[ids], "frames": list(ids)})
        return self._stacks[ids]

    def process(self, pid: int = PID, role: str = "root", start_s: float = 0.0, exit_s: float | None = None) -> None:
        """A process; ``exit_s`` None = alive at the end."""
        exit_ns = 0 if exit_s is None else self.ns(exit_s)
        self.rows["processes"].append(
            {"pid": pid, "start_ns": self.ns(start_s), "exit_ns": exit_ns, "name": f"p{pid}", "role": role}
        )

    def alloc(
        self,
        at_s: float,
        size: int,
        *,
        layer: str = "kernel",
        kind: str = "kmalloc",
        api: str = "kmalloc",
        cache: str = "",
        user: Iterable[str] = (),
        kernel: Iterable[str] = (),
        python: Iterable[str] = (),
        pid: int = PID,
        tid: int | None = None,
        weight: int = 1,
        call_id: int = 0,
        addr: int | None = None,
    ) -> dict[str, Any]:
        """An allocation; give the row that comes back to :meth:`free`."""
        kernel = list(kernel)
        if addr is None:
            self._next_addr += 0x1000
            addr = self._next_addr
        row = {
            "ts_ns": self.ns(at_s),
            "pid": pid,
            "tid": pid if tid is None else tid,
            "op": "alloc",
            "cause": "call",
            "layer": layer,
            "kind": kind,
            "api": api,
            "slab_cache": cache,
            "addr": addr,
            "size_bytes": size,
            "requested_bytes": size,
            "call_site": self.frame(kernel[-1]) if kernel else 0,
            "kernel_stack": self.stack(kernel[-1:] if weight == 0 else kernel),
            "user_stack": 0 if weight == 0 else self.stack(user),
            "python_stack": 0 if weight == 0 else self.stack(python),
            "weight": weight,
            "call_id": call_id,
        }
        self.rows["mem_events"].append(row)
        return row

    def free(self, allocation: dict[str, Any], at_s: float, cause: str = "call") -> None:
        """The free of ``allocation``; it carries the identity of its allocation."""
        freed = {"op": "free", "cause": cause, "ts_ns": self.ns(at_s), "alloc_ts_ns": allocation["ts_ns"]}
        self.rows["mem_events"].append(allocation | freed)

    def unknown_free(self, at_s: float, size: int = 64, pid: int = PID) -> None:
        """A free whose allocation was never seen."""
        row = self.alloc(at_s, size, pid=pid)
        row |= {"op": "free", "alloc_ts_ns": 0}

    def call(self, api: str, enter_s: float, exit_s: float, *, parent: int = 0, pid: int = PID, result: int = 0) -> int:
        """A call of a probed function; returns its id."""
        call = self._next_call
        self._next_call += 1
        self.rows["calls"].append(
            {
                "id": call, "parent_id": parent, "pid": pid, "tid": pid, "api": api, "result": result,
                "enter_ns": self.ns(enter_s), "exit_ns": self.ns(exit_s),
            }
        )  # fmt: skip
        return call

    def sample(self, at_s: float, counter: str, value: float, scope: str = "host", scope_id: str = "") -> None:
        """One reading of a counter."""
        self.rows["samples"].append(
            {"ts_ns": self.ns(at_s), "scope": scope, "scope_id": scope_id, "counter": counter, "value": value}
        )

    def loss(self, probe: str, what: str, count: int) -> None:
        """A loss."""
        self.rows["losses"].append({"ts_ns": self.ns(self.seconds), "probe": probe, "what": what, "count": count})

    def churn(
        self,
        rounds: int,
        size: int,
        *,
        hold_s: float = 0.001,
        start_s: float = 0.0,
        end_s: float | None = None,
        **how: Any,
    ) -> None:
        """``rounds`` allocations, each freed ``hold_s`` later, spread evenly over the time."""
        end = self.seconds - 2 * hold_s if end_s is None else end_s
        for i in range(rounds):
            at = start_s + (end - start_s) * i / rounds
            self.free(self.alloc(at, size, **how), at + hold_s)

    def leak(self, count: int, size: int, *, start_s: float = 0.0, end_s: float | None = None, **how: Any) -> None:
        """``count`` allocations that are never freed, spread evenly over the time."""
        end = self.seconds if end_s is None else end_s
        for i in range(count):
            self.alloc(start_s + (end - start_s) * (i + 0.5) / count, size, **how)

    def table(self, name: str) -> pa.Table:
        """The rows of a table, sorted by time, with 0 and '' where nothing was said."""
        schema = TABLES[name]
        rows = sorted(self.rows[name], key=lambda row: row.get("ts_ns", 0))

        def default(field: pa.Field) -> Any:
            if pa.types.is_list(field.type):
                return []
            return "" if pa.types.is_string(field.type) or pa.types.is_dictionary(field.type) else 0

        columns = [
            pa.array([row.get(field.name, default(field)) for row in rows]).cast(
                field.type.value_type if pa.types.is_dictionary(field.type) else field.type
            )
            if rows
            else pa.array([], field.type)
            for field in schema
        ]
        return pa.table(columns, names=schema.names).cast(schema)

    def write(self, path: Path) -> Path:
        """Write the capture to ``path`` and return it."""
        source = Source(
            id=0, kind="recording", name="synthetic", clock="monotonic",
            start_ns=START_NS, end_ns=self.ns(self.seconds), command=["./app"], options=self.options,
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = CaptureWriter.create(path, Manifest(sources=[source]))
        for name in TABLES:
            table = self.table(name)
            for at in range(0, len(table), MAX_PART_ROWS):
                writer.write(name, table.slice(at, MAX_PART_ROWS))
        writer.finish()
        return path

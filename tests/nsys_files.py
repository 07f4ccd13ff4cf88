"""Hand-made Nsight Systems exports: memory usage, pools, CUDA call chains, which no public file shows; hostile ones.

Tables and columns are those of NVIDIA's exporter schema; contents are made up here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PID, TID, OTHER_TID = 4242, 4242, 4243
SYSTEM_CLOCK_NS, UTC_NS = 5_000_000_000_000, 1_790_000_000_000_000_000
DEVICE, PINNED, MANAGED, DEVICE_STATIC = 2, 1, 4, 5
ALLOC, FREE = 0, 1

SCHEMA = """
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT);
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT, systemClockNs INTEGER);
"""
TABLES = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start end deviceId contextId streamId correlationId globalPid demangledName shortName "
        "gridX gridY gridZ blockX blockY blockZ"
    ),
    "CUDA_GPU_MEMORY_USAGE_EVENTS": (
        "start globalPid deviceId contextId address pc bytes memKind memoryOperationType name correlationId streamId "
        "localMemoryPoolAddress localMemoryPoolReleaseThreshold localMemoryPoolSize localMemoryPoolUtilizedSize"
    ),
    "CUDA_GPU_MEMORY_POOL_EVENTS": (
        "start globalPid deviceId address operationType poolType correlationId minBytesToKeep "
        "localMemoryPoolReleaseThreshold localMemoryPoolSize localMemoryPoolUtilizedSize"
    ),
    "CUDA_CALLCHAINS": "id symbol module unresolved originalIP stackDepth",
    "NVTX_EVENTS": "start end eventType globalTid text textId domainId",
}


def global_tid(pid: int = PID, tid: int = TID) -> int:
    """globalTid as nsys packs it, of virtual machine 1."""
    return 1 << 48 | pid << 24 | tid


class NsysFile:
    """Collects rows; :meth:`write` makes the export. Tables appear with their first row, as in real exports."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.settings = {"COLLECT_GPU_MEMORY_USAGE": "true"}
        self.extra_sql = ""
        self.utc_ns = UTC_NS
        self._correlation = 0

    def string(self, text: str) -> int:
        """The id of a text in StringIds."""
        return self.strings.setdefault(text, len(self.strings) + 1)

    def add(self, table: str, **values: Any) -> None:
        """A row."""
        self.rows.setdefault(table, []).append(values)

    def call(
        self, start: int, end: int, name: str, *, pid: int = PID, tid: int = TID, result: int = 0, chain: int = 0
    ) -> int:
        """An API call; returns its correlation id."""
        self._correlation += 1
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, eventClass=0, globalTid=global_tid(pid, tid),
            correlationId=self._correlation, nameId=self.string(name), returnValue=result, callchainId=chain or None,
        )  # fmt: skip
        return self._correlation

    def memory(
        self, start: int, operation: int, address: int, size: int, *, kind: int = DEVICE, correlation: int = 0,
        pid: int = PID, context: int = 1, pc: int = 0, pool: tuple[int, int, int, int] | None = None,
    ) -> None:  # fmt: skip
        """A memory usage event. ``pool``: address, release threshold, size, utilised size."""
        names = ("Address", "ReleaseThreshold", "Size", "UtilizedSize")
        figures = {f"localMemoryPool{name}": value for name, value in zip(names, pool or (None,) * 4, strict=True)}
        self.add(
            "CUDA_GPU_MEMORY_USAGE_EVENTS", start=start, globalPid=global_tid(pid, 0), deviceId=0, contextId=context,
            address=address, pc=pc, bytes=size, memKind=kind, memoryOperationType=operation, correlationId=correlation,
            **figures,
        )  # fmt: skip

    def chain(self, number: int, frames: Sequence[tuple[str, str]]) -> None:
        """A call chain, innermost frame first: (symbol, module)."""
        for depth, (symbol, module) in enumerate(frames):
            unresolved = int(symbol.startswith("0x"))
            self.add(
                "CUDA_CALLCHAINS", id=number, symbol=self.string(symbol), module=self.string(module),
                unresolved=unresolved, originalIP=0x7F00_0000 + 0x100 * number + depth, stackDepth=depth,
            )  # fmt: skip

    def write(self, path: Path, *, tables: Iterable[str] = ()) -> Path:
        """The SQLite file. ``tables`` are created even without rows."""
        connection = sqlite3.connect(path)
        connection.executescript(SCHEMA)
        connection.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PRODUCT_VERSION', '2026.9.9.1')")
        connection.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.99.0')")
        connection.execute(
            "INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, '', '', ?)", [self.utc_ns, SYSTEM_CLOCK_NS]
        )
        connection.executemany("INSERT INTO META_DATA_CAPTURE VALUES (?, ?)", list(self.settings.items()))
        connection.execute(
            "INSERT INTO PROCESSES VALUES (?, ?, '/home/somebody/bin/server')", [global_tid(PID, 0), PID]
        )
        for table in {*self.rows, *tables}:
            columns = TABLES[table].split()
            declared = ", ".join(f'"{column}" {"TEXT" if column == "text" else "INTEGER"}' for column in columns)
            connection.execute(f"CREATE TABLE {table} ({declared})")
            places = ", ".join("?" * len(columns))
            rows = [[row.get(column) for column in columns] for row in self.rows.get(table, [])]
            connection.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, text) for text, i in self.strings.items()])
        connection.executescript(self.extra_sql)
        connection.commit()
        connection.close()
        return path


def leaky_export(path: Path, steps: int = 40) -> Path:
    """A server that keeps 1 MiB a step in 'handle' and frees another 4 MiB of 'scratch'; stacks, NVTX, a static."""
    export = NsysFile()
    export.chain(1, [("cudaMalloc", "libcudart.so"), ("handle", "server"), ("main", "server")])
    export.chain(2, [("cudaMalloc", "libcudart.so"), ("scratch", "server"), ("main", "server")])
    static = {"kind": DEVICE_STATIC, "context": 0}
    export.memory(0, ALLOC, 0x100, 4096, **static)
    for step in range(steps):
        at = 1_000_000 + step * 10_000_000
        export.add(
            "NVTX_EVENTS", start=at - 100, end=at + 5_000_000, eventType=59, globalTid=global_tid(),
            textId=export.string("request"), domainId=0,
        )  # fmt: skip
        kept = export.call(at, at + 1000, "cudaMalloc_v3020", chain=1)
        export.memory(at + 500, ALLOC, 0x10_0000_0000 + step * (1 << 20), 1 << 20, correlation=kept)
        used = export.call(at + 2000, at + 3000, "cudaMalloc_v3020", chain=2)
        export.memory(at + 2500, ALLOC, 0x20_0000_0000, 4 << 20, correlation=used)
        freed = export.call(at + 4000, at + 5000, "cudaFree_v3020", tid=OTHER_TID)
        export.memory(at + 4500, FREE, 0x20_0000_0000, 4 << 20, correlation=freed)
    return export.write(path)

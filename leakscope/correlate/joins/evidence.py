"""The tables of one source that joins look at, read from a capture: small ones whole, kernel events in batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.stacks import Frame, Stacks
from leakscope.model.manifest import Manifest, Source

if TYPE_CHECKING:
    import duckdb

SITE_IDENTITY = ("layer", "kind", "api", "slab_cache", "kernel_stack", "user_stack", "python_stack")
MAX_ROWS = 20_000_000
"""Rows of a small table (device memory, calls, launches, ranges, profiles) beyond which a source is not joined."""
BATCH_ROWS = 1 << 20
DUCKDB_VECTOR = 2048

_ALLOCATIONS = f"""
    SELECT {", ".join(SITE_IDENTITY)}, pid, tid, ts_ns, addr, size_bytes, call_id, mark_id FROM mem_events
    WHERE source_id = ? AND op = 'alloc' AND result = 0 AND layer <> 'kernel'
          AND (layer = 'gpu' OR kind IN ('pinned', 'registered')) ORDER BY ts_ns, addr
"""
_TABLES = {
    "calls": "SELECT id, parent_id, pid, tid, api, enter_ns, exit_ns, result FROM calls",
    "launches": """SELECT id, parent_id, ts_ns, pid, tid, api, kernel, grid, block, result, user_stack, mark_id
                   FROM launches""",
    "marks": "SELECT id, parent_id, pid, tid, start_ns, end_ns, domain, name FROM marks",
    "kernel_profiles": """SELECT id, pid, tid, api_call_id, created_s, kernel, mangled, grid, block, ranges,
                          user_stack, writable_bytes FROM kernel_profiles""",
    "segments": """SELECT DISTINCT ts_ns, pid, device, segment_type, segment_addr AS addr,
                   segment_bytes AS size_bytes FROM segments""",
    "frees": "SELECT pid, addr, ts_ns, alloc_ts_ns FROM mem_events",
    "processes": "SELECT pid, namespace_pid, start_ns, exit_ns, name FROM processes",
}
_ORDER = {
    "calls": "enter_ns, id", "launches": "ts_ns, id", "marks": "start_ns, id", "kernel_profiles": "id",
    "segments": "addr", "processes": "start_ns, pid", "frees": "ts_ns, addr",
}  # fmt: skip
_WHERE = {"frees": "AND op = 'free' AND result = 0 AND layer = 'gpu' AND alloc_ts_ns > 0"}


@dataclass
class Batch:
    """Kernel allocations: parallel arrays; ``group`` indexes :attr:`Evidence.kernel_groups`."""

    pid: npt.NDArray[np.int64]
    tid: npt.NDArray[np.int64]
    ts_ns: npt.NDArray[np.int64]
    group: npt.NDArray[np.int64]


class Evidence:
    """One source of one capture. ``capture`` is the number of the capture among the inputs."""

    def __init__(self, con: duckdb.DuckDBPyConnection, capture: int, source: Source) -> None:
        self.con = con
        self.capture = capture
        self.source = source
        self._tables: dict[str, pd.DataFrame] = {}

    @property
    def name(self) -> str:
        """What the source is called in print."""
        return self.source.name or f"source {self.source.id}"

    def table(self, name: str) -> pd.DataFrame:
        """One of ``allocations`` (device and pinned memory), frees (of device memory), calls, launches, marks,
        kernel_profiles, segments, processes; rows in the order of time. Raises MemoryError for one of more than
        MAX_ROWS rows."""
        if name not in self._tables:
            where = f"source_id = ? {_WHERE.get(name, '')}"
            sql = _ALLOCATIONS if name == "allocations" else f"{_TABLES[name]} WHERE {where} ORDER BY {_ORDER[name]}"
            found = self.con.execute(f"{sql} LIMIT {MAX_ROWS + 1}", [self.source.id]).df()
            if len(found) > MAX_ROWS:
                raise MemoryError(f"{self.name}: more than {MAX_ROWS:,} rows of {name}")
            self._tables[name] = found
        return self._tables[name]

    def stacks(self, ids: pd.Series) -> dict[int, list[Frame]]:
        """The frames of stacks, outermost first."""
        wanted = [int(i) for i in ids.unique() if i]
        stacks = Stacks(self.con, wanted)
        return {stack: stacks[stack] for stack in wanted}

    def kernel_groups(self) -> pd.DataFrame:
        """The distinct site identities of kernel allocations with stacks of their own: a row each, by number."""
        self._group_table()
        return self.con.execute(f"SELECT {', '.join(SITE_IDENTITY)} FROM kernel_groups ORDER BY number").df()

    def kernel_batches(self, pids: list[int]) -> Iterator[Batch]:
        """Kernel allocations of processes that have stacks of their own, a batch at a time."""
        self._group_table()
        self.con.register("join_pids", pd.DataFrame({"pid": pids}, dtype="int32"))
        self.con.execute(
            f"""
            SELECT pid, tid, ts_ns, number FROM mem_events
                   JOIN kernel_groups USING ({", ".join(SITE_IDENTITY)})
            WHERE source_id = ? AND layer = 'kernel' AND op = 'alloc' AND result = 0 AND weight > 0
                  AND pid IN (SELECT pid FROM join_pids)
            """,
            [self.source.id],
        )
        while len(chunk := self.con.fetch_df_chunk(BATCH_ROWS // DUCKDB_VECTOR)):
            yield Batch(*(chunk[name].to_numpy(np.int64) for name in ("pid", "tid", "ts_ns", "number")))
        self.con.unregister("join_pids")

    def _group_table(self) -> None:
        columns = ", ".join(SITE_IDENTITY)
        self.con.execute(
            f"""
            CREATE OR REPLACE TEMP TABLE kernel_groups AS
            SELECT (row_number() OVER (ORDER BY {columns}) - 1)::BIGINT AS number, * FROM (
                SELECT DISTINCT {columns} FROM mem_events
                WHERE source_id = {int(self.source.id)} AND layer = 'kernel' AND op = 'alloc' AND result = 0
                      AND weight > 0
            )
            """
        )


def evidence_of(con: duckdb.DuckDBPyConnection, manifest: Manifest, capture: int) -> list[Evidence]:
    """One evidence a source of the capture."""
    return [Evidence(con, capture, source) for source in manifest.sources]

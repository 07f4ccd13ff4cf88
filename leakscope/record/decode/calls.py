"""Call records → `mem_events`, `calls`, `launches`, and the ends of processes and contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from leakscope.model.tables import CALLS, LAUNCHES
from leakscope.record import records
from leakscope.record.decode.columns import (
    CAUSE_CODES,
    KIND_CODES,
    LAYER_CODES,
    OP_CODES,
    EventColumns,
    Words,
)
from leakscope.record.decode.device_maps import device_maps
from leakscope.record.decode.exits import Exits
from leakscope.record.decode.mappings import Mappings, ProcessEnd
from leakscope.record.decode.marks import mark_ids
from leakscope.record.kernel.bpf import Map
from leakscope.record.probes import functions
from leakscope.record.probes.functions import FUNCTIONS
from leakscope.record.symbols.stack_numbers import StackNumbers

_ROLES = np.array([p.role for p in FUNCTIONS], np.int16)
_LAYERS = np.array([LAYER_CODES[p.layer] for p in FUNCTIONS], np.int16)
_KINDS = np.array([KIND_CODES[p.kind] for p in FUNCTIONS], np.int16)
LIVE_BATCH = 1 << 14
"""Live ranges that are in memory at once when a process or context ends: 1.5 MB."""
_LOGGED = np.array([p.group != "heap" for p in FUNCTIONS])


@dataclass
class DecodedCalls:
    """Tables of one batch, any of them empty, and the processes that ended or were replaced in it."""

    mem_events: list[pa.Table] = field(default_factory=list)
    calls: pa.Table | None = None
    launches: pa.Table | None = None
    device_maps: pa.Table | None = None
    exits: dict[int, int] = field(default_factory=dict)  # pid: ts_ns
    execs: dict[int, int] = field(default_factory=dict)


class Calls:
    """Decodes batches of CALL_RECORD; keeps the `exits` of the whole recording up to date."""

    def __init__(
        self,
        columns: EventColumns,
        numbers: StackNumbers,
        live_ranges: Map,
        exits: Exits,
        kernel_names: Callable[[np.ndarray], pa.Array] | None = None,
        min_size: int = 0,
    ) -> None:
        self._columns = columns
        self._numbers = numbers
        self._live = live_ranges
        self._kernel_names = kernel_names
        self._exits = exits
        self.mappings = Mappings(columns, min_size)
        self._apis = np.array([columns.apis.code(p.api) for p in FUNCTIONS], np.int16)
        self._call_apis = Words(tuple(p.api for p in FUNCTIONS))
        self._primary_contexts: dict[tuple[int, int], int] = {}
        self._context_ended_ns: dict[tuple[int, int], list[int]] = {}  # (pid, context): ends, oldest first

    def decode(self, batch: np.ndarray) -> DecodedCalls:
        """All rows of a batch. The ends of contexts and processes also give the frees that they imply."""
        result = DecodedCalls()
        kind = batch["type"]
        for name, target in (("CALL_EXIT", result.exits), ("CALL_EXEC", result.execs)):
            for record in batch[kind == getattr(records, name)]:
                target[int(record["pid"])] = int(record["exit_ns"])
        self._exits.add(result.exits)
        called = batch[kind == records.CALL_FUNCTION]
        ends = self._context_ends(called)
        tables = [
            self._allocations(called),
            self._frees(batch[kind == records.CALL_FREE]),
            self._map_events(batch[kind == records.CALL_MAP], result),
            *ends,
            *([self._end_ranges(result.exits, "exit", None)] if result.exits else []),
            *([self._end_ranges(result.execs, "exec", None)] if result.execs else []),
        ]
        for ends_ns in self._context_ended_ns.values():
            del ends_ns[:-1]  # what is decoded from now on is younger
        result.mem_events = [table for table in tables if table.num_rows]
        result.calls = self._calls_table(called[_LOGGED[called["function"]]])
        result.device_maps = device_maps(called, self._columns.source_id)
        result.launches = self._launches_table(batch[kind == records.CALL_LAUNCH])
        return result

    def _allocations(self, called: np.ndarray) -> pa.Table:
        role = _ROLES[called["function"]]
        made = (role == functions.ALLOC) | (role == functions.REALLOC)
        own = called[
            made & (called["result"] == 0) & ((called["flags"] & records.CALL_NESTED) == 0) & (called["addr"] != 0)
        ]
        function = own["function"]
        self._numbers.count_calls(own, 1)
        return self._columns.table(
            len(own),
            ts_ns=own["exit_ns"],
            pid=own["pid"],
            tid=own["tid"],
            cpu=own["cpu"],
            layer=_LAYERS[function],
            kind=_KINDS[function],
            api=self._apis[function],
            addr=own["addr"],
            size_bytes=own["size_bytes"],
            requested_bytes=own["requested_bytes"],
            user_stack=self._numbers.stacks(own["user_stack"]),
            python_stack=self._numbers.python_stacks(own["python_stack"]),
            weight=1,
            call_id=np.where(_LOGGED[function], own["id"].astype(np.int64), 0),
            mark_id=mark_ids(own["pid"], own["mark"]),
        )

    def _frees(self, ended: np.ndarray) -> pa.Table:
        """Frees with the identity of their allocation (records CALL_FREE, and live ranges that ended otherwise)."""
        mapped = ended["arg1"] == records.SPACE_MAPPED
        ended = ended[~mapped]
        function = ended["function"]
        causes, times = self._causes(ended)
        table = self._columns.table(
            len(ended),
            ts_ns=times,
            pid=ended["pid"],
            tid=ended["tid"],
            cpu=ended["cpu"],
            op=OP_CODES["free"],
            cause=causes,
            layer=_LAYERS[function],
            kind=_KINDS[function],
            api=self._apis[function],
            addr=ended["addr"],
            size_bytes=ended["size_bytes"],
            requested_bytes=ended["requested_bytes"],
            user_stack=self._numbers.stacks(ended["user_stack"]),
            python_stack=self._numbers.python_stacks(ended["python_stack"]),
            weight=1,
            call_id=ended["id"].astype(np.int64),
            alloc_ts_ns=ended["alloc_ts_ns"],
            mark_id=mark_ids(ended["pid"], ended["mark"]),
        )
        self._numbers.count_calls(ended, -1)
        return table

    def _causes(self, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(cause codes, times) of frees. An address may be handed out again before the end of its context is decoded:
        that end was the free, not the reuse."""
        causes, times = ended["cause"].astype(np.int16), ended["exit_ns"].astype(np.int64)
        for i in np.flatnonzero(causes == CAUSE_CODES["reuse"]) if self._context_ended_ns else ():
            owner = int(ended["pid"][i]), int(ended["context"][i])
            for end_ns in self._context_ended_ns.get(owner, ()):
                if ended["alloc_ts_ns"][i] < end_ns <= times[i]:
                    causes[i], times[i] = CAUSE_CODES["context"], end_ns
                    break
        return causes, times

    def _map_events(self, batch: np.ndarray, ended: DecodedCalls) -> pa.Table:
        ends = [
            ProcessEnd(ts_ns, pid, cause)
            for cause, times in (("exit", ended.exits), ("exec", ended.execs))
            for pid, ts_ns in times.items()
        ]
        user_stacks = self._numbers.stacks(batch["user_stack"])
        python_stacks = self._numbers.python_stacks(batch["python_stack"])
        return self.mappings.table(self.mappings.rows(batch, user_stacks, python_stacks, ends))

    def _context_ends(self, called: np.ndarray) -> list[pa.Table]:
        """Destroying a context, or resetting its device, frees what was allocated in it (cause `context`)."""
        tables: list[pa.Table] = []
        roles = _ROLES[called["function"]]
        interesting = np.isin(roles, (functions.CONTEXT_RETAIN, functions.CONTEXT_DESTROY, functions.DEVICE_RESET))
        for record in called[interesting & (called["result"] == 0)]:
            role, pid = _ROLES[record["function"]], int(record["pid"])
            if role == functions.CONTEXT_RETAIN:
                self._primary_contexts[pid, int(record["arg1"]) & 0xFFFFFFFF] = int(record["addr"])
                continue
            if role == functions.CONTEXT_DESTROY:
                contexts = {int(record["arg0"])}
            elif FUNCTIONS[record["function"]].api == "cudaDeviceReset":
                contexts = {int(record["context"]), 0}
            else:
                contexts = {self._primary_contexts.get((pid, int(record["arg0"]) & 0xFFFFFFFF), 0)}
            for context in contexts:
                self._context_ended_ns.setdefault((pid, context), []).append(int(record["enter_ns"]))
            tables.append(self._end_ranges({pid: int(record["enter_ns"])}, "context", contexts))
        return tables

    def _end_ranges(self, ended: dict[int, int], cause: str, contexts: set[int] | None) -> pa.Table:
        """Free the live objects of processes that are older than a time: of some CUDA contexts, or (None) all."""
        pids = np.array(sorted(ended), np.int64)
        times = np.array([ended[int(pid)] for pid in pids], np.int64)
        found = [(np.empty(0, records.RANGE_KEY), np.empty(0, records.LIVE_RANGE))]
        for raw_keys, raw_values in self._live.batches(LIVE_BATCH):
            keys, values = raw_keys.view(records.RANGE_KEY).reshape(-1), raw_values.view(records.LIVE_RANGE).reshape(-1)
            position = np.minimum(np.searchsorted(pids, keys["pid"]), len(pids) - 1)
            mine = (pids[position] == keys["pid"]) & (values["ts_ns"].astype(np.int64) < times[position])
            if contexts is not None:
                of_calls = np.isin(keys["space"], (records.SPACE_MEMORY, records.SPACE_ARRAY, records.SPACE_HANDLE))
                mine &= of_calls & np.isin(values["context"], np.array(sorted(contexts), np.uint64))
            found.append((keys[mine], values[mine]))
        keys, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
        for key in keys:  # afterwards: where entries go meanwhile, a batch may go back to what was read
            self._live.delete(key.tobytes())
        counted = keys["space"] != records.SPACE_MAPPED
        keys, values = keys[counted], values[counted]
        end_ns = times[np.searchsorted(pids, keys["pid"])]
        synthetic = np.zeros(len(keys), records.CALL_RECORD)
        for name in ("size_bytes", "requested_bytes", "context", "user_stack", "python_stack", "function"):
            synthetic[name] = values[name]
        synthetic["mark"] = values["mark"]
        synthetic["addr"], synthetic["pid"], synthetic["alloc_ts_ns"] = keys["addr"], keys["pid"], values["ts_ns"]
        synthetic["enter_ns"] = synthetic["exit_ns"] = end_ns
        synthetic["arg0"], synthetic["arg1"] = values["call_id"], keys["space"]
        synthetic["cause"], synthetic["type"] = CAUSE_CODES[cause], records.CALL_FREE
        return self._frees(synthetic)

    def _calls_table(self, called: np.ndarray) -> pa.Table:
        columns = {
            "source_id": np.full(len(called), self._columns.source_id, np.int16),
            **{name: called[name] for name in ("id", "parent_id", "pid", "tid", "enter_ns", "exit_ns", "result")},
            **{name: called[name] for name in ("context", "addr", "size_bytes")},
            "user_stack": self._numbers.stacks(called["user_stack"]),
        }
        arrays = [
            self._call_apis.array(called["function"])
            if f.name == "api"
            else pa.array(np.ascontiguousarray(columns[f.name]).astype(f.type.to_pandas_dtype()))
            for f in CALLS
        ]
        return pa.Table.from_arrays(arrays, schema=CALLS)

    def _launches_table(self, launched: np.ndarray) -> pa.Table:
        """Launches: grid and block are packed in size_bytes, requested_bytes, arg0; the stream in context."""

        def low(name: str) -> np.ndarray:
            return (launched[name] & 0xFFFFFFFF).astype(np.int32)

        def high(name: str) -> np.ndarray:
            return (launched[name] >> np.uint64(32)).astype(np.int32)

        triples = {
            "grid": np.stack([low("size_bytes"), high("size_bytes"), low("requested_bytes")], axis=1),
            "block": np.stack([high("requested_bytes"), low("arg0"), high("arg0")], axis=1),
        }
        offsets = np.arange(len(launched) + 1, dtype=np.int32) * 3
        plain = {
            "source_id": np.full(len(launched), self._columns.source_id, np.int16),
            "id": launched["id"],
            "parent_id": launched["parent_id"],
            "ts_ns": launched["enter_ns"], "pid": launched["pid"], "tid": launched["tid"],
            "function": launched["addr"], "stream": launched["context"], "result": launched["result"],
            "user_stack": self._numbers.stacks(launched["user_stack"]),
            "mark_id": mark_ids(launched["pid"], launched["mark"]),
            "context": launched["arg1"],
        }  # fmt: skip
        arrays = []
        for f in LAUNCHES:
            if f.name == "api":
                arrays.append(self._call_apis.array(launched["function"]))
            elif f.name in triples:
                arrays.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(triples[f.name].reshape(-1))))
            elif f.name == "kernel" and self._kernel_names:
                arrays.append(self._kernel_names(launched))
            elif f.name in plain:
                arrays.append(pa.array(np.ascontiguousarray(plain[f.name]).astype(f.type.to_pandas_dtype())))
            else:
                empty = pa.scalar("" if f.type == pa.string() else 0, f.type)
                arrays.append(pa.repeat(empty, len(launched)))
        return pa.Table.from_arrays(arrays, schema=LAUNCHES)

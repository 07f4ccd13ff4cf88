"""Hot records (kernel objects and pages) → `mem_events`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from leakscope.record import records
from leakscope.record.decode.columns import CAUSE_CODES, KIND_CODES, LAYER_CODES, EventColumns
from leakscope.record.decode.exits import Exits
from leakscope.record.decode.marks import mark_ids
from leakscope.record.decode.sites import Sites
from leakscope.record.symbols.interner import Interner
from leakscope.record.symbols.stack_numbers import StackNumbers

_SLAB_GROWTH = (
    "allocate_slab",
    "new_slab",
    "alloc_slab_page",
    "___slab_alloc",
    "___kmalloc_large_node",
    "__kmalloc_large_node",
)
"""Functions that allocate pages for slabs and large kmallocs (mm/slub.c): these back objects counted already."""


class KernelObjects:
    """Decodes batches of MEM_RECORD."""

    def __init__(
        self, columns: EventColumns, sites: Sites, interner: Interner, numbers: StackNumbers, exits: Exits
    ) -> None:
        self._columns = columns
        self._sites = sites
        self._interner = interner
        self._numbers = numbers
        self._exits = exits
        self._page_kinds: dict[int, int] = {}

    def table(self, batch: np.ndarray) -> pa.Table:
        """`mem_events` rows of a batch of MEM_RECORD, in the order of the batch."""
        identity = self.identities(batch)
        self._numbers.count(batch)
        object_bytes = identity.pop("object_bytes")
        requested = np.where(batch["requested_bytes"] > 0, batch["requested_bytes"], object_bytes)
        return self._columns.table(
            len(batch),
            ts_ns=batch["ts_ns"],
            pid=batch["pid"],
            tid=batch["tid"],
            cpu=batch["cpu"],
            op=batch["op"],
            cause=self._causes(batch),
            layer=LAYER_CODES["kernel"],
            addr=batch["addr"],
            requested_bytes=requested,
            alloc_ts_ns=batch["alloc_ts_ns"],
            mark_id=mark_ids(batch["pid"], batch["mark"]),
            **identity,
        )

    def identities(self, batch: np.ndarray) -> dict[str, np.ndarray]:
        """Who allocated, for each record of a batch: kind, api, slab_cache (codes), size_bytes, object_bytes,
        call_site, stacks and weight."""
        sites = self._sites.rows(batch["site"])
        kernel_stack, user_stack = self._stacks(batch, sites)
        kind = sites["kind"]
        pages = kind == KIND_CODES["page"]
        if pages.any():
            kind[pages] = self._kinds_of_pages(kernel_stack[pages])
        return {
            **{name: sites[name] for name in ("api", "slab_cache", "size_bytes", "object_bytes", "call_site")},
            "kind": kind,
            "kernel_stack": kernel_stack,
            "user_stack": user_stack,
            "python_stack": self._numbers.python_stacks(batch["python_stack"]),
            "weight": batch["weight"],
        }

    def _causes(self, batch: np.ndarray) -> np.ndarray:
        causes = batch["cause"].astype(np.int16)
        frees = np.flatnonzero(batch["op"] == records.OP_FREE)
        began = self._exits.times(batch["pid"][frees])
        ended = (began > 0) & (batch["ts_ns"][frees].astype(np.int64) >= began)
        ended &= batch["alloc_ts_ns"][frees].astype(np.int64) < began
        causes[frees[ended]] = CAUSE_CODES["exit"]
        return causes

    def _stacks(self, batch: np.ndarray, sites: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        own = self._numbers.stacks(batch["kernel_stack"])
        kernel_stack = np.where(own > 0, own, sites["stack"])
        return kernel_stack, self._numbers.stacks(batch["user_stack"])

    def _kinds_of_pages(self, kernel_stacks: np.ndarray) -> np.ndarray:
        """page_slab for pages that back slabs or whose stack was not taken (they cannot be told apart), else page."""
        distinct_stacks, group = np.unique(kernel_stacks, return_inverse=True)
        for stack in distinct_stacks.tolist():
            if stack not in self._page_kinds:
                functions = self._interner.functions(stack)
                backs_slab = not functions or any(name in _SLAB_GROWTH for name in functions)
                self._page_kinds[stack] = KIND_CODES["page_slab" if backs_slab else "page"]
        return np.array([self._page_kinds[stack] for stack in distinct_stacks.tolist()], np.int16)[group]

"""The kernel's allocation sites: what the site number in a hot record stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from leakscope.record import records
from leakscope.record.decode.columns import KIND_CODES, EventColumns
from leakscope.record.kernel.bpf import Map
from leakscope.record.symbols.interner import Interner

KMALLOC_CACHE_MAX_BYTES = 8192
"""Largest kmalloc size that a slab cache serves (KMALLOC_MAX_CACHE_SIZE, two pages); larger ones are pages."""

SLAB_BOOKKEEPING = frozenset(
    {"alloc_slab_obj_exts", "memcg_alloc_slab_cgroups", "alloc_empty_sheaf", "__alloc_empty_sheaf", "alloc_full_sheaf"}
)
"""Functions of mm/slub.c and mm/memcontrol.c that allocate for the allocator itself: accounting vectors of a new slab,
arrays of cached objects. They fall to whoever happens to need a new slab and go with it."""

SITE_ROW = np.dtype(
    [
        ("kind", "i2"), ("api", "i2"), ("slab_cache", "i2"), ("size_bytes", "i8"), ("object_bytes", "i8"),
        ("call_site", "i4"), ("stack", "i4"),
    ]
)  # fmt: skip

CacheOfAddress = Callable[[int], tuple[str, int] | None]


class Sites:
    """Site numbers → kind, api, slab cache, size and call site. Reads the `sites` map when it meets a new number."""

    def __init__(
        self,
        sites_map: Map,
        interner: Interner,
        columns: EventColumns,
        cache_of: CacheOfAddress,
        gfp_account: Callable[[], int],
    ) -> None:
        self._map = sites_map
        self._interner = interner
        self._columns = columns
        self._cache_of = cache_of
        self._gfp_account = functools.cache(gfp_account)
        self._row_of = np.empty(0, np.int32)  # by site number, which are dense; -1 = not known yet
        self._rows = np.empty(0, SITE_ROW)
        self._fields: dict[str, np.ndarray] = {}
        self.caches_by_size_and_flags = 0  # kmalloc sites whose cache name is inferred, not asked for

    def rows(self, site_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Columns of SITE_ROW for site numbers; unknown ones (lost with a full map) give kind kmalloc, size 0."""
        if len(site_ids) and (site_ids.max() >= len(self._row_of) or self._row_of[site_ids].min() < 0):
            self._read_new(np.unique(site_ids))
        rows = self._row_of[site_ids]
        # One gather a column: a gather of whole structured rows takes three times as long.
        return {name: column[rows] for name, column in self._fields.items()}

    def _read_new(self, wanted: np.ndarray) -> None:
        keys, values = self._map.read_all()
        site_keys = keys.view(records.SITE_KEY).reshape(-1)
        infos = values.view(records.SITE_INFO).reshape(-1)
        places = np.concatenate([infos["id"], wanted]).astype(np.int64)
        grown = np.full(max(int(places.max()) + 1, len(self._row_of)), -1, np.int32)
        grown[: len(self._row_of)] = self._row_of
        self._row_of = grown
        rows: list[tuple[int, ...]] = []
        for place, key, info in zip(places, site_keys, infos, strict=False):
            if self._row_of[place] < 0:
                self._row_of[place] = len(self._rows) + len(rows)
                rows.append(self._describe(key, info))
        for place in places[len(infos) :]:
            if self._row_of[place] < 0:
                self._row_of[place] = len(self._rows) + len(rows)
                rows.append((KIND_CODES["kmalloc"], 0, 0, 0, 0, 0, 0))
        self._rows = np.concatenate([self._rows, np.array(rows, SITE_ROW)])
        self._fields = {name: np.ascontiguousarray(self._rows[name]) for name in SITE_ROW.names or ()}

    def _describe(self, key: np.void, info: np.void) -> tuple[int, ...]:
        code = self._columns.slab_caches.code
        frame = self._interner.kernel_frame(int(key["call_site"])) if key["call_site"] else 0
        stack = self._interner.call_site_stack(frame)
        size = int(info["size_bytes"])
        if info["kind"] == records.SITE_PAGE:
            api = self._columns.apis.code("mm_page_alloc")
            return KIND_CODES["page"], api, code(""), size, size, frame, stack
        if info["kind"] == records.SITE_SLAB:
            api = self._columns.apis.code("kmem_cache_alloc")
            name = bytes(info["cache"]).split(b"\0", 1)[0].decode("ascii", "replace")
            return KIND_CODES["slab"], api, code(name), size, int(info["object_bytes"]), frame, stack
        api = self._columns.apis.code("kmalloc")
        name = self._kmalloc_cache(int(info["first_addr"]), size, int(key["what"]) >> 32)
        bookkeeping = not SLAB_BOOKKEEPING.isdisjoint(self._interner.functions(stack))
        kind = "slab_meta" if bookkeeping else "kmalloc"
        return KIND_CODES[kind], api, code(name), size, 0, frame, stack

    def _kmalloc_cache(self, address: int, size: int, gfp: int) -> str:
        if size > KMALLOC_CACHE_MAX_BYTES:
            return "kmalloc-large"
        asked = self._cache_of(address)
        # The object may be gone and its slab serve another cache by now: the size must agree.
        if asked is not None and asked[1] == size:
            return asked[0]
        self.caches_by_size_and_flags += 1
        prefix = "kmalloc-cg-" if gfp & self._gfp_account() else "kmalloc-"
        return prefix + (f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else str(size))

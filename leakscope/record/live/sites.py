"""Running sums of live bytes by site, for a view: kept up in the thread that decodes, copied by the one that shows.

A site here is who allocates what: layer, kind, api, slab cache and the three stacks. Sums are of what is live now: what
the end of a process freed is gone. (`attribute` judges that another way: the end of a process gives nothing back.)
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from leakscope.model.words import KINDS, KINDS_NOT_ADDED, LAYERS, OPS

IntArray = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

IDENTITY = ("layer", "kind", "api", "slab_cache", "kernel_stack", "user_stack", "python_stack")
"""What makes a site, as codes and ids."""
MOST_SITES = 1 << 16
"""Sites that are told apart; what others keep is in the layers' sums alone."""
SAMPLED_KINDS = ("kmalloc", "slab", "heap")
"""Kinds that --sample-bytes takes by chance (pages and maps are recorded whole)."""

_FIRST_PLACES = 1 << 12
_ADDED = np.array([kind not in KINDS_NOT_ADDED for kind in KINDS])
_ALLOC, _FREE = OPS.index("alloc"), OPS.index("free")
_SAMPLED = np.array([kind in SAMPLED_KINDS for kind in KINDS])


class SiteSums(NamedTuple):
    """Sites at one moment: ``keys`` (uint64[n]) are the same for a site at all times.

    ``identities`` (int64[n, 7]: IDENTITY), ``marks`` (int64[n]: the range of the latest allocation, 0 = none), ``kept``
    (int64[n] live bytes that are attributed to the site, sampled stacks counted by what they stand for), ``by_layer``
    (int64[layers] live bytes of the kinds that add up).
    """

    keys: Keys
    identities: IntArray
    marks: IntArray
    kept: IntArray
    by_layer: IntArray


def site_keys(identities: Mapping[str, Any] | IntArray, rows: int) -> Keys:
    """A 64-bit mix of the columns of IDENTITY, never 0. Two of 65,536 sites share one with a chance of 1 in 10¹⁰."""
    columns = [identities[name] for name in IDENTITY] if isinstance(identities, Mapping) else list(identities.T)
    layer, kind, api, cache, kernel, user, python = (np.asarray(column).astype(np.uint64) for column in columns)
    fixed = (layer << np.uint64(60)) | (kind << np.uint64(52)) | (api << np.uint64(40)) | (cache << np.uint64(24))
    mixed = fixed ^ (kernel * np.uint64(0x9E3779B97F4A7C15))
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ ((user << np.uint64(32)) | python)) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.broadcast_to(np.maximum(mixed, np.uint64(1)), (rows,))


def scale_of_sample(size_bytes: np.ndarray, sample_bytes: int) -> np.ndarray:
    """How many objects one of `size_bytes` stands for where one in `sample_bytes` bytes is taken: 1 / (1 - e^(-s/N)),
    as in correlate/changes.py."""
    return 1.0 / -np.expm1(-np.maximum(size_bytes, 1) / sample_bytes)


class SiteTable:
    """Sums of a stream of events. :meth:`add` serves one thread, :meth:`sums` any."""

    def __init__(self, *, weighted: bool, sample_bytes: int = 0) -> None:
        """:param weighted: stacks are sampled: an event counts as often as its weight says, 0 for those without."""
        self._weighted = weighted
        self._sample_bytes = sample_bytes
        self._lock = threading.Lock()  # sums and identities; held for a few milliseconds at most
        self._place_keys: Keys = np.zeros(_FIRST_PLACES, np.uint64)  # open addressing: 0 = free
        self._place_sites = np.zeros(_FIRST_PLACES, np.int64)
        self._count = 1  # site 0: all beyond MOST_SITES
        self._keys: Keys = np.zeros(1024, np.uint64)
        self._identities = np.zeros((1024, len(IDENTITY)), np.int64)
        self._marks = np.zeros(1024, np.int64)
        self._kept = np.zeros(1024, np.int64)
        self._by_layer = np.zeros(len(LAYERS), np.int64)
        self._error: Exception | None = None

    def add(self, rows: int, columns: Mapping[str, Any]) -> None:
        """Add `rows` events of decoded columns (arrays or scalars, text as codes, missing ones 0).

        Never raises: the recording goes on without sums, and :meth:`sums` raises what went wrong.
        """
        if rows and self._error is None:
            try:
                self._add(rows, columns)
            except Exception as error:
                self._error = error

    def _add(self, rows: int, columns: Mapping[str, Any]) -> None:
        op, size, allocated = (np.asarray(columns.get(name, 0)) for name in ("op", "size_bytes", "alloc_ts_ns"))
        made = op == _ALLOC
        # In float64 sums below 2^53 are exact, and bincount takes nothing else.
        sign = made.astype(np.float64) - ((op == _FREE) & (allocated > 0))
        change = np.broadcast_to(sign * size, (rows,))
        kind = np.asarray(columns.get("kind", 0))
        if self._sample_bytes:
            change = change * np.where(_SAMPLED[kind], scale_of_sample(size, self._sample_bytes), 1.0)
        attributed = change * columns["weight"] if self._weighted else change
        identity = {name: columns.get(name, 0) for name in IDENTITY}
        sites = self._sites(site_keys(identity, rows), identity)
        kept = np.bincount(sites, attributed, self._count).astype(np.int64)
        added = change * _ADDED[kind]
        layer = np.asarray(columns.get("layer", 0))
        if layer.ndim:
            by_layer = np.bincount(layer, added, len(LAYERS)).astype(np.int64)
        else:
            by_layer = (np.arange(len(LAYERS)) == layer) * int(added.sum())
        marks = np.broadcast_to(np.asarray(columns.get("mark_id", 0)), (rows,))
        ranged = np.flatnonzero(marks * made) if marks.any() else ()
        with self._lock:
            self._kept[: self._count] += kept
            self._by_layer += by_layer
            if len(ranged):
                self._marks[sites[ranged]] = marks[ranged]

    def sums(self) -> SiteSums:
        """All sites as they are now. Raises what :meth:`add` could not."""
        if self._error is not None:
            raise self._error
        with self._lock:
            of = slice(1, self._count)
            return SiteSums(
                self._keys[of].copy(),
                self._identities[of].copy(),
                self._marks[of].copy(),
                self._kept[of].copy(),
                self._by_layer.copy(),
            )

    def _sites(self, keys: Keys, identity: Mapping[str, Any]) -> IntArray:
        """The site of each row; those that are new get the next numbers."""
        mask = np.uint64(len(self._place_keys) - 1)
        at = (keys & mask).astype(np.int64)
        rows = np.flatnonzero(self._place_keys[at] != keys)
        while len(rows):
            free = rows[self._place_keys[at[rows]] == 0]
            if len(free) and self._count >= MOST_SITES:
                rows = rows[self._place_keys[at[rows]] != 0]  # the others' place is that of no site: site 0
            elif len(free):
                fresh, first = np.unique(keys[free], return_index=True)
                self._open(fresh[: MOST_SITES - self._count], free[first], identity)
                if len(self._place_keys) - 1 != int(mask):  # there are more places: all have moved
                    return self._sites(keys, identity)
            rows = rows[self._place_keys[at[rows]] != keys[rows]]
            taken = rows[self._place_keys[at[rows]] != 0]
            at[taken] = (at[taken] + 1) & int(mask)
        return self._place_sites[at]

    def _open(self, keys: Keys, rows: IntArray, identity: Mapping[str, Any]) -> None:
        with self._lock:
            first, self._count = self._count, self._count + len(keys)
            while self._count > len(self._keys):
                for name in ("_keys", "_identities", "_marks", "_kept"):
                    old = getattr(self, name)
                    setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
            of = slice(first, self._count)
            self._keys[of] = keys
            for column, name in enumerate(IDENTITY):
                values = np.asarray(identity[name])
                self._identities[of, column] = values if values.ndim == 0 else values[rows[: len(keys)]]
        if 2 * self._count > len(self._place_keys):
            size = len(self._place_keys)
            while 2 * self._count > size:
                size *= 4
            self._place_keys, self._place_sites = np.zeros(size, np.uint64), np.zeros(size, np.int64)
            self._settle(range(1, self._count))
        else:
            self._settle(range(first, self._count))

    def _settle(self, sites: range) -> None:
        places, mask = self._place_keys, len(self._place_keys) - 1
        for site in sites:
            place = int(self._keys[site]) & mask
            while places[place]:
                place = (place + 1) & mask
            places[place], self._place_sites[place] = self._keys[site], site


class CensusSums:
    """The sums of a census, as its last readout left them."""

    def __init__(self, *, weighted: bool, sample_bytes: int = 0) -> None:
        self._weighted = weighted
        self._sample_bytes = sample_bytes
        self._error: Exception | None = None
        empty = np.empty(0, np.int64)
        self._sums = SiteSums(empty.view(np.uint64), empty.reshape(0, 7), empty, empty, np.zeros(len(LAYERS), np.int64))

    def publish(self, identities: Mapping[str, IntArray], live_bytes: IntArray) -> None:
        """Take the sites of a readout: columns of IDENTITY, `size_bytes` (0 where objects differ) and `weight`, and
        what is live of each. Rows may share an identity. Never raises, as in :meth:`SiteTable.add`."""
        try:
            self._publish(identities, live_bytes)
        except Exception as error:
            self._error = error

    def _publish(self, identities: Mapping[str, IntArray], live_bytes: IntArray) -> None:
        kind = identities["kind"]
        scaled = live_bytes.astype(np.float64)
        if self._sample_bytes:
            scale = scale_of_sample(identities["size_bytes"], self._sample_bytes)
            scaled = scaled * np.where(_SAMPLED[kind] & (identities["size_bytes"] > 0), scale, 1.0)
        attributed = scaled * identities["weight"] if self._weighted else scaled
        keys, first, group = np.unique(site_keys(identities, len(kind)), return_index=True, return_inverse=True)
        self._sums = SiteSums(
            keys,
            np.stack([identities[name][first] for name in IDENTITY], axis=1),
            np.zeros(len(keys), np.int64),
            np.bincount(group, attributed, len(keys)).astype(np.int64),
            np.bincount(identities["layer"], scaled * _ADDED[kind], len(LAYERS)).astype(np.int64),
        )

    def sums(self) -> SiteSums:
        """All sites as of the last readout. Raises what :meth:`publish` could not."""
        if self._error is not None:
            raise self._error
        return self._sums

"""One recording's figures of this moment, put together in the thread of whoever shows them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from leakscope.capture import CaptureWriter
from leakscope.model.live import GrowingSite, LiveFrame, LiveReading, Stack
from leakscope.model.recording import Loss
from leakscope.model.words import KINDS, LAYERS
from leakscope.record.decode.columns import EventColumns
from leakscope.record.decode.marks import Marks
from leakscope.record.live.sites import IDENTITY, SAMPLED_KINDS, CensusSums, SiteTable
from leakscope.record.live.window import GrowthWindow
from leakscope.record.options import RecordOptions
from leakscope.record.rings import Rings
from leakscope.record.symbols.interner import Interner

WINDOW_S = 60.0
STEADY_WINDOW_S = 3600.0
"""The window of growth, and that of a soak. A census that is read out more rarely has one of WINDOW_READOUTS."""
WINDOW_READOUTS = 12
NOT_LISTED = frozenset({"page_slab", "page_user", "slab_meta", "mmap_reserve", "ipc", "registered"})
"""Kinds whose bytes other sites have, or nobody."""


class Observer(Protocol):
    """Who watches a recording. Both are called in the thread of the recorder and must return at once."""

    def begin(self, readings: LiveReadings) -> None:
        """Everything is attached and the command, if any, runs."""

    def end(self) -> None:
        """The recording ends: `readings` must not be read after this returns. May be called twice."""


class LiveReadings:
    """:meth:`read` serves one thread, not the recorder's; it takes no lock that the reader of the rings needs."""

    def __init__(
        self,
        options: RecordOptions,
        writer: CaptureWriter,
        columns: EventColumns,
        interner: Interner,
        marks: Marks,
        rings: Rings,
        losses: Callable[[], list[Loss]],
        events: Callable[[], int],
    ) -> None:
        """:param losses: what is known to be lost so far, asked in the thread of :meth:`read`.
        :param events: how many were read so far.
        """
        self._options = options
        self._writer = writer
        self._columns = columns
        self._interner = interner
        self._marks = marks
        self._rings = rings
        self._losses = losses
        self._events = events
        self._began = time.monotonic()
        census = options.mode == "census"
        self._weighted = options.stacks == "sampled"
        sums = CensusSums if census else SiteTable
        self.sums: CensusSums | SiteTable = sums(weighted=self._weighted, sample_bytes=options.sample_bytes)
        span_s = STEADY_WINDOW_S if options.steady else WINDOW_S
        self._window = GrowthWindow(max(span_s, WINDOW_READOUTS * options.interval_s) if census else span_s)
        # Where malloc is recorded, its callers have the bytes of the maps that it makes.
        hidden = NOT_LISTED | ({"heap_backing"} if options.malloc else set())
        self._listed = np.array([kind not in hidden for kind in KINDS])
        self._parts = 0
        self._part_bytes = 0

    def read(self, most_sites: int) -> LiveReading:
        """The figures of now, with at most so many sites of each layer: those that gained most, if anything."""
        elapsed_s = time.monotonic() - self._began
        sums = self.sums.sums()
        growth, window_s = self._window.growth(elapsed_s, sums.keys, sums.kept)
        ranked = np.where(self._listed[sums.identities[:, 1]], growth, 0)
        of_layers = [np.where(sums.identities[:, 0] == layer, ranked, 0) for layer in range(len(LAYERS))]
        best = np.concatenate([np.argsort(-gained, kind="stable")[:most_sites] for gained in of_layers])
        best = np.unique(best[ranked[best] > 0])
        best = best[np.argsort(-ranked[best], kind="stable")]
        sites = [
            self._site(key, row, mark, kept, gained, window_s)
            for key, row, mark, kept, gained in zip(
                sums.keys[best].tolist(),
                sums.identities[best].tolist(),
                sums.marks[best].tolist(),
                sums.kept[best].tolist(),
                growth[best].tolist(),
                strict=True,
            )
        ]
        return LiveReading(
            elapsed_s=elapsed_s,
            events=self._events(),
            live_bytes=dict(zip(LAYERS, sums.by_layer.tolist(), strict=True)),
            sites=tuple(sites),
            losses=tuple(self._losses()),
            ring_fill=self._rings.fill_share(),
            disk_bytes=self._disk_bytes(),
        )

    def _site(self, key: int, row: list[int], mark: int, kept: int, growth: int, window_s: float) -> GrowingSite:
        code = dict(zip(IDENTITY, row, strict=True))
        layer, kind = LAYERS[code["layer"]], KINDS[code["kind"]]
        return GrowingSite(
            key=key,
            layer=layer,
            kind=kind,
            api=self._columns.apis.word(code["api"]),
            slab_cache=self._columns.slab_caches.word(code["slab_cache"]),
            user=self._frames(code["user_stack"]),
            python=self._frames(code["python_stack"]),
            kernel=self._frames(code["kernel_stack"]),
            kept_bytes=kept,
            growth_bytes=growth,
            window_s=window_s,
            sampled=(self._weighted and layer == "kernel")
            or (self._options.sample_bytes > 0 and kind in SAMPLED_KINDS),
            range=self._marks.name_of(mark) if mark else "",
        )

    def _frames(self, stack: int) -> Stack:
        return tuple(LiveFrame(*frame) for frame in self._interner.frames(stack))

    def _disk_bytes(self) -> int:
        """Each part is asked for its size once."""
        parts = self._writer.manifest.parts
        for part in parts[self._parts :]:
            with contextlib.suppress(OSError):
                self._part_bytes += (self._writer.path / part.path).stat().st_size
        self._parts = len(parts)
        return self._part_bytes

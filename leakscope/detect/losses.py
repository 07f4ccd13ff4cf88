"""What losses mean for a verdict: how many kept objects of a layer might be frees that nobody saw."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.sites import Holdings
from leakscope.model.manifest import Source
from leakscope.model.words import LAYERS

HIDES_FREES = frozenset({"ring_drop", "recursion_miss", "live_map_full", "live_map_busy"})
"""Losses after which a free may be unseen: its record was dropped, its program was skipped, or its allocation
was never entered in the live map."""
NO_FREE_PROBE = re.compile(r"kfree|kmem_cache_free|page_free|munmap")
"""Probes without which no free of their layer is seen; those that failed to attach withhold every verdict."""
ALL_FREES = 1 << 60
BURST = 10.0
"""Skipped frees come in bursts (a softirq frees many objects of one kind): a site may have lost this many times its
share of them."""

# Which layers a probe serves, by words in its name; a probe that none of these knows serves all.
_LAYERS_OF_PROBE = (
    (re.compile(r"kmalloc|kmem|kfree|slab|page|mem_"), ("kernel",)),
    (re.compile(r"mmap|munmap|mremap|brk|madvise|map_call"), ("host",)),
    (re.compile(r"function|cuda|libcu"), ("gpu", "host")),
    (re.compile(r"call"), ("host", "gpu")),
)
_ALLOCATES_ONLY = re.compile(r"kmalloc|alloc(?!.*free)")


@dataclass(frozen=True)
class Loss:
    """A row of the ``losses`` table, summed over its times."""

    probe: str
    what: str
    count: int
    detail: str = ""


def layers_of(probe: str) -> tuple[str, ...]:
    """The layers whose events the program, ring or map named ``probe`` carries."""
    return next((layers for pattern, layers in _LAYERS_OF_PROBE if pattern.search(probe)), LAYERS)


def hidden_frees(losses: Iterable[Loss], repaired: dict[str, int]) -> dict[str, int]:
    """Upper bound, by layer, on the frees that were lost and not noticed later.

    ``repaired``: by layer, the implicit frees (reuse of an address) of sites whose frees are otherwise seen:
    each mends one skipped free. A program that only allocates loses allocations, which hide no leak's end.
    """
    dropped = dict.fromkeys(LAYERS, 0)
    skipped = dict.fromkeys(LAYERS, 0)
    for loss in losses:
        if loss.what == "attach_failed" and NO_FREE_PROBE.search(loss.probe):
            for layer in layers_of(loss.probe):
                dropped[layer] = ALL_FREES
        if loss.what not in HIDES_FREES:
            continue
        if loss.what == "recursion_miss" and _ALLOCATES_ONLY.search(loss.probe):
            continue
        for layer in layers_of(loss.probe):
            (skipped if loss.what == "recursion_miss" else dropped)[layer] += loss.count
    return {layer: dropped[layer] + max(0, skipped[layer] - repaired.get(layer, 0)) for layer in LAYERS}


def at_risk(held: Holdings, lives: pd.DataFrame, sources: Iterable[Source], sites: int) -> npt.NDArray[np.float64]:
    """Upper bound, by site number, on kept objects whose free fell into a stretch of lost events.

    Only what was alive in such a stretch can have been freed in it, and no more than was lost there: what is
    allocated later and kept is certain. The stretches are those that files beside the events state.
    """
    hidden = np.zeros(sites)
    spans = [span for source in sources if source.kind == "events_meta" for span in source.facts.get("lost", [])]
    if not spans or not len(held.curve_rows):
        return hidden
    rows = held.table.iloc[held.curve_rows]
    windows = (
        lives.drop_duplicates("life").set_index("life").loc[rows["life"], ["from_ns", "bin_ns"]].to_numpy(np.int64)
    )
    bins = held.kept_objects.shape[1]
    for _, until, count in spans:
        bin_ = np.clip((int(until) - windows[:, 0]) // windows[:, 1], 0, bins - 1)
        alive = held.kept_objects[np.arange(len(rows)), bin_]
        np.add.at(hidden, rows["site"].to_numpy(np.int64), np.minimum(alive, float(count)))
    return hidden


def hidden_frees_of_sites(
    sites: pd.DataFrame, losses: Iterable[Loss], hidden: dict[str, int]
) -> npt.NDArray[np.float64]:
    """Upper bound, by row of ``sites``, on its frees that nobody saw.

    A site had at most as many frees as allocations. It lost them at the rate of its layer, or at the rate that
    addresses of its slab cache were handed out again without a free, whichever is higher, times :data:`BURST`; never
    more than all that were lost. ``sites`` has layer, slab_cache, visible, alloc_objects, call_objects, reuse_objects.
    """
    unmatched = sum(loss.count for loss in losses if loss.what == "address_only_free")
    ends = sites["call_objects"] + sites["reuse_objects"]
    seen = ends.groupby(sites["layer"]).sum().to_dict()
    total = np.array([hidden.get(layer, 0) for layer in sites["layer"]], np.float64)
    frees = np.array(
        [seen.get(layer, 0) + (unmatched if layer == "kernel" else 0) for layer in sites["layer"]], np.float64
    )
    rate = np.divide(total, total + frees, out=np.zeros(len(sites)), where=total > 0)
    # Sites whose frees can never be seen say nothing of those that were skipped.
    of_cache = [sites["layer"], sites["slab_cache"]]
    reused = sites["reuse_objects"].where(sites["visible"], 0).groupby(of_cache).transform("sum").to_numpy(np.float64)
    ended = ends.where(sites["visible"], 0).groupby(of_cache).transform("sum").to_numpy(np.float64)
    cache_rate = np.divide(reused, ended, out=np.zeros(len(sites)), where=ended > 0)
    share = np.minimum(1.0, BURST * np.maximum(rate, cache_rate))
    return np.where(total >= ALL_FREES, total, np.minimum(total, sites["alloc_objects"].to_numpy() * share))

"""What losses mean for a verdict: how many kept objects of a layer might be frees that nobody saw."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from leakscope.model.words import LAYERS

HIDES_FREES = frozenset({"ring_drop", "recursion_miss", "live_map_full", "live_map_busy"})
"""Losses after which a free may be unseen: its record was dropped, its program was skipped, or its allocation
was never entered in the live map."""
NO_FREE_PROBE = re.compile(r"kfree|kmem_cache_free|page_free|munmap")
"""Probes without which no free of their layer is seen; those that failed to attach withhold every verdict."""
ALL_FREES = 1 << 60

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

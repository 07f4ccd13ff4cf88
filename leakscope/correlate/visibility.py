"""Sites whose frees cannot be seen: freed through paths that fire no tracepoint (kfree_rcu and its like).

Such a site looks like a leak to anyone who subtracts frees from allocations. Nothing here knows a function
by name: a site is untraceable because its objects are seen to end only by the reuse of their addresses, or
because its slab cache did not grow by what it seems to keep, and nobody frees the same kind of object visibly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

MAX_FREE_SEEN_SHARE = 0.05
MIN_REUSED = 5
MIN_REUSED_SHARE = 0.01
"""Reuses of a site that never frees visibly before it counts as untraceable: objects and share of
allocated. A true leak has none, as its addresses are never handed out again."""
MIN_CHECKED_OBJECTS = 100
MIN_CACHE_SHARE = 0.1
"""What a site keeps must be this share of its cache before the cache can disprove it: in a large shared cache
what others free hides what one site keeps."""
MAX_GROWN_SHARE = 0.5
"""A cache that grew by less than this share of what one site seems to keep disproves the site's kept
bytes."""

MIN_FREED_SHARE = 0.5
"""Objects of the same kernel function and cache that end this often by a visible free prove that its frees are seen:
then no counter disproves a site. SLUB counts free objects of a CPU's own slabs as active, hundreds of small ones a
CPU, so that a cache into which others freed before may not grow at all while as many are kept."""


def frees_visible(
    sites: pd.DataFrame,
    kept_when_sampled: npt.NDArray[np.float64],
    cache_growth: npt.NDArray[np.float64],
    cache_before: npt.NDArray[np.float64],
) -> npt.NDArray[np.bool_]:
    """For each site, whether its frees can be seen.

    ``sites``: of :func:`leakscope.correlate.sites.merge_sites`. ``kept_when_sampled``: bytes kept between the
    first and the last slab sample, by site. ``cache_growth`` and ``cache_before``: growth of the site's cache
    between the same samples and its bytes at the first, NaN where it was not sampled. All float64[len(sites)].
    """
    kernel = (sites["layer"] == "kernel").to_numpy()
    share = sites["free_seen_share"].to_numpy(np.float64)
    hardly_seen = np.isnan(share) | (share <= MAX_FREE_SEEN_SHARE)
    reused = sites["reuse_objects"].to_numpy(np.float64)
    by_reuse = reused >= np.maximum(MIN_REUSED, MIN_REUSED_SHARE * sites["alloc_objects"].to_numpy())
    enough = sites["live_objects"].to_numpy() >= MIN_CHECKED_OBJECTS
    with np.errstate(invalid="ignore"):
        enough &= (kept_when_sampled > 0) & (kept_when_sampled >= MIN_CACHE_SHARE * cache_before)
        disproved = enough & (cache_growth < MAX_GROWN_SHARE * kept_when_sampled)
    return ~(kernel & hardly_seen & (by_reuse | (disproved & ~_freed_elsewhere(sites))))


def _freed_elsewhere(sites: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """For each site, whether others see their frees of what the same kernel function allocated from the same cache."""
    function = [sites["call_site"], sites["slab_cache"]]
    seen = (sites["call_objects"] + sites["context_objects"]).groupby(function).transform("sum").to_numpy(np.float64)
    reused = sites["reuse_objects"].groupby(function).transform("sum").to_numpy(np.float64)
    known = (sites["call_site"] > 0).to_numpy()
    return np.asarray(known & (seen >= MIN_REUSED) & (seen >= MIN_FREED_SHARE * (seen + reused)), dtype=bool)

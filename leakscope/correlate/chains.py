"""Chains: from application frames through calls and syscalls to the bytes, each link with how it is known."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from leakscope.correlate.nesting import Nesting
from leakscope.correlate.sites import folded_cache
from leakscope.correlate.stacks import Frame, Stacks
from leakscope.correlate.wrappers import allocating, entry_of
from leakscope.model.results import Chain, ChainLink, Site

MIN_NESTED_SHARE = 0.5
"""A kernel site gets a CUDA call as link when at least this share of its allocations lies inside such
calls."""
MAX_DETAIL = 8
RANGE_WRAPPERS = ("/nvtx/nvtx.py",)
"""Files whose frames only open a range around the caller's code."""


def build_chain(site: Site, row: pd.Series, stacks: Stacks, nested: Nesting, ranges: Sequence[ChainLink] = ()) -> Chain:
    """The chain of ``site``; ``row`` is its row of :func:`leakscope.correlate.sites.merge_sites`, ``ranges`` are
    the links of the NVTX ranges around it (:func:`leakscope.correlate.marks.range_links`).

    Counts and bytes of a link are those of the site's kept objects, and for calls the number of calls.
    """
    rule, confidence = ("apportioned", _own_share(row)) if site.stack_sampled else ("stack", 1.0)

    def link(what: str, name: str, how: str = rule, sure: float = confidence) -> ChainLink:
        return ChainLink(what, name, how, sure, site.live_objects, site.live_bytes)

    python, user = stacks[row["python_stack"]], stacks[row["user_stack"]]
    kernel = stacks[row["kernel_stack"]]
    calls = _calls(site, row, nested)
    entry = entry_of(kernel)
    inner = [] if site.layer == "kernel" else [site.api, *(call.name for call in calls)]
    frames = _without_calls([*python, *user], {entry, *inner})
    if ranges:  # they say it already
        frames = [frame for frame in frames if not frame.file.endswith(RANGE_WRAPPERS)]
    links = [link("frame", frame.text) for frame in frames]
    if site.layer == "kernel" and calls:  # the call is one of the frames: it takes that frame's place
        at = next((i for i, frame in enumerate(frames) if frame.function == calls[0].name), len(frames))
        links[at : at + 1] = calls
    else:
        links += calls
    if entry:
        links.append(link("syscall", entry))
    elif site.layer == "host" and not calls:
        links.append(link("syscall", site.api, "event", 1.0))
    if caller := allocating(kernel):
        links.append(link("frame", caller.text))
    end = {"kernel": "slab_cache" if site.slab_cache else "kind", "host": "map", "gpu": "device"}[site.layer]
    links.append(link(end, site.slab_cache or site.kind, "event", 1.0))
    return Chain(site.id, (*ranges, *links, *_launches(site)), _detail(row, stacks, nested))


APPROXIMATE_TOUCH = 0.5
"""Confidence of a touch by a word that may be no argument."""


def _launches(site: Site) -> list[ChainLink]:
    """The kernels that got pointers into what the site keeps: launches, and bytes of what they touched."""
    return [
        ChainLink(
            "launches",
            kernel.kernel or "unknown kernel",
            "argument",
            1.0 if kernel.exact else APPROXIMATE_TOUCH,
            kernel.launches,
            kernel.bytes,
        )
        for kernel in (site.touches.kernels if site.touches else ())
    ]


def _own_share(row: pd.Series) -> float:
    """How far the sampled stacks can be trusted: 1 minus the relative standard error, at least 0."""
    return max(0.0, 1.0 - float(row["standard_error_bytes"]) / max(1.0, float(row["live_bytes"])))


def _without_calls(frames: list[Frame], apis: set[str]) -> list[Frame]:
    """The frames without an innermost tail that only repeats the calls and the syscall named after it."""
    while frames:
        own = len(frames) - 1  # the innermost frame with code of its own
        while own > 0 and frames[own].inlined:
            own -= 1
        if frames[own].function not in apis:
            break
        frames = frames[:own]
    return frames


def _calls(site: Site, row: pd.Series, nested: Nesting) -> list[ChainLink]:
    """The links of the calls around or of the site, outermost first."""
    if site.layer == "kernel":
        same = nested.above[
            (nested.above["kind"] == site.kind)
            & (nested.above["slab_cache"].map(folded_cache) == site.slab_cache)
            & (nested.above["kernel_stack"] == row["kernel_stack"])
            & (nested.above["user_stack"] == row["user_stack"])
            & (nested.above["python_stack"] == row["python_stack"])
        ]
        own = max(1, int(row["own_objects"]))
        inside = int(same["allocations"].sum())
        if inside < MIN_NESTED_SHARE * own:
            return []
        by_api = same.groupby("api")["allocations"].sum().sort_values(ascending=False, kind="stable")
        share = min(1.0, inside / own)
        api = str(by_api.index[0])
        return [ChainLink("call", api, "nesting", share, inside, site.live_bytes)]
    links = []
    of_site = nested.calls[nested.calls["site"] == row["site"]]
    for depth, group in of_site.groupby("depth", sort=True):
        for api, count in zip(group["api"], group["calls"], strict=True):
            share = min(1.0, count / max(1, int(row["alloc_objects"])))
            how = "event" if depth == 0 else "nesting"
            links.append(ChainLink("call", str(api), how, share, int(count), site.live_bytes))
    if not links and site.layer == "gpu":
        links = [ChainLink("call", site.api, "event", 1.0, site.allocated_objects, site.live_bytes)]
    return links


def _detail(row: pd.Series, stacks: Stacks, nested: Nesting) -> tuple[ChainLink, ...]:
    """Kernel memory allocated inside the site's calls: the syscall and slab cache, kept objects and bytes."""
    below = nested.below[nested.below["site"] == row["site"]]
    if not len(below):
        return ()
    named = below.assign(
        entry=[entry_of(stacks[stack]) for stack in below["kernel_stack"]],
        name=[folded_cache(cache) or kind for cache, kind in zip(below["slab_cache"], below["kind"], strict=True)],
    )
    sums = named.groupby("name", sort=True)[["allocations", "live_objects", "live_bytes"]].sum().reset_index()
    sums = sums.sort_values(["live_bytes", "name"], ascending=[False, True], kind="stable")
    links = [
        ChainLink("syscall", entry, "nesting", 1.0, int(group["allocations"].sum()), int(group["live_bytes"].sum()))
        for entry, group in named.groupby("entry", sort=True)
        if entry
    ]
    caches = zip(sums["name"], sums["live_objects"], sums["live_bytes"], strict=True)
    links += [ChainLink("slab_cache", str(n), "nesting", 1.0, int(o), int(b)) for n, o, b in caches]
    return tuple(links[:MAX_DETAIL])

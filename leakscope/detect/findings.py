"""Findings: judged holdings merged by culprit, classed, ranked, and put into words."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from leakscope.correlate.wrappers import DEFERRED_CACHES, RECLAIMABLE_CACHES
from leakscope.detect.judge import State
from leakscope.model.results import Culprit, Growth, Verdict

MAP_ENTRIES = frozenset({"mmap", "mremap", "brk", "munmap", "madvise", "page fault"})
"""Ways into the kernel whose allocations (VMAs, page tables) are a consequence of mapping memory."""
ONE_KEPT_SHARE = 0.9
"""A site that keeps this share of all it allocated frees (nearly) nothing."""
MIN_CONTAINER_SHARE = 0.5
MIN_ERROR_SHARE = 0.02
"""Objects of which a steady part is never freed, the rest always: two ways out of the same code."""
REQUEST = re.compile(r"request|session|completion|conversation|prompt", re.IGNORECASE)
MATERIAL_SHARE = 0.1
"""An unclear growth makes a verdict inconclusive when it is this share of what its layer keeps."""
COUNTERS = {"kernel": "slab_live", "host": "maps_live", "gpu": "gpu_live"}


class Names(NamedTuple):
    """What a site's stacks say: of its culprit frame, and how it was allocated."""

    culprit: str
    stack: tuple[str, ...]
    application: bool = False  # the culprit is no plumbing
    entry: str = ""  # syscall or page fault, '' for none
    in_cuda_call: bool = False  # a kernel allocation made by a CUDA call
    of_slabs: bool = False  # the slab allocator allocated it for itself
    allocator: bool = False  # malloc or operator new is on the stack
    container: bool = False  # the growth of a container is among the innermost frames
    thread_stack: bool = False
    deferred: bool = False  # the kernel frees it by itself, long after its use
    function: str = ""  # the culprit without its line, where functions rather than lines are told apart
    kinds: tuple[str, ...] = ()  # of the frames of ``stack`` (leakscope.model.stack_tree.FRAME_KINDS)

    @property
    def cause(self) -> str:
        """What sites of one cause have in common."""
        return self.function or self.culprit


def find(judged: pd.DataFrame, rows: pd.DataFrame, names: dict[int, Names], lives: pd.DataFrame) -> list[Verdict]:
    """Findings of one capture, ranked: leaks by rate, then what is unclear, then what is no leak after all.

    ``judged``: of :func:`leakscope.detect.judge.judge`. ``rows``: the holdings table. ``names``: by site
    number, of every site judged to grow. ``lives``: with a column ``source_start_ns``. Sites in the results
    are named by their number as text; the caller gives them their ids.
    """
    grown = judged[judged["state"] >= State.UNCLEAR].copy()
    detail = rows.set_index("holding").loc[grown["holding"]]
    for column in ("layer", "kind", "slab_cache", "live_bytes", "live_objects", "alloc_bytes", "alloc_objects",
                   "smallest_bytes", "largest_bytes", "sampled", "first_ns", "outlives_bytes"):  # fmt: skip
        grown[column] = detail[column].to_numpy()
    grown["culprit"] = [names[site].cause for site in grown["site"]]
    leaks = grown[grown["state"] == State.LEAK]
    owner, consequence = _consequences(leaks, names)
    findings = [
        _leak(group, names, lives, consequence.get((str(layer), str(frame)), []))
        for (layer, frame), group in leaks[~owner].groupby(["layer", "culprit"], sort=True)
    ]
    findings.sort(key=lambda f: (f.verdict != "leak", -(f.growth.bytes_per_s if f.growth else 0.0), f.layer))
    found = set(zip(leaks.loc[~owner, "layer"], leaks.loc[~owner, "culprit"], strict=True))
    unclear = grown[grown["state"] == State.UNCLEAR]
    return findings + [
        _unclear(group, names, lives)
        for key, group in _material(unclear, rows).groupby(["layer", "culprit"], sort=True)
        if key not in found
    ]


def holdings_of(findings: Sequence[Verdict], judged: pd.DataFrame, ids: dict[int, str]) -> pd.Series:
    """Which holdings :func:`find` made a finding of: its first site, by holding. ``findings`` have the ids of sites."""
    kept = judged[judged["state"] >= State.UNCLEAR].drop_duplicates("holding")
    found: dict[int, str] = {}
    for finding in reversed(findings):  # of two that name a site the leading one has it
        state = State.UNCLEAR if finding.verdict == "inconclusive" else State.LEAK
        named = kept["site"].map(ids).isin(finding.sites) & (kept["state"] == state)
        found |= dict.fromkeys(kept.loc[named, "holding"].astype(int), finding.sites[0] if finding.sites else "")
    return pd.Series(found, dtype=object)


def _consequences(leaks: pd.DataFrame, names: dict[int, Names]) -> tuple[pd.Series, dict[tuple[str, str], list[int]]]:
    """Kernel sites that only follow from maps, GPU memory or slab objects of the same process.

    Returns which rows of ``leaks`` they are, and (layer, culprit) of the cause → their site numbers.
    """
    followers: set[Hashable] = set()
    caused: dict[tuple[str, str], list[int]] = {}
    ranked = leaks.sort_values("rate", ascending=False, kind="stable")
    others = ranked[ranked["layer"] != "kernel"]
    of_slabs = np.array([names[site].of_slabs for site in ranked["site"]], dtype=bool)
    objects = ranked[(ranked["layer"] == "kernel").to_numpy() & ~of_slabs]
    for index, row in leaks[leaks["layer"] == "kernel"].iterrows():
        name = names[row["site"]]
        causes = others[others["life"] == row["life"]]
        same = causes[causes["culprit"] == row["culprit"]]
        if name.of_slabs:
            followers.add(index)  # whatever grew, it was not the slab allocator's own doing
            cause = objects[objects["life"] == row["life"]]
        elif name.in_cuda_call or name.entry == "ioctl":
            cause = same[same["layer"] == "gpu"]
            cause = cause if len(cause) else same[same["kind"] == "pinned"]
        elif name.entry in MAP_ENTRIES:
            cause = same[same["layer"] == "host"]
            if not len(cause):  # who touches, merges or splits a map need not be who mapped it
                cause = causes[causes["layer"] == "host"]
        else:
            continue
        if len(cause):
            first = cause.iloc[0]
            followers.add(index)
            caused.setdefault((first["layer"], first["culprit"]), []).append(int(row["site"]))
    return pd.Series([index in followers for index in leaks.index], index=leaks.index, dtype=bool), caused


def _leak(group: pd.DataFrame, names: dict[int, Names], lives: pd.DataFrame, follows: list[int]) -> Verdict:
    group = group.sort_values(["live_bytes", "site"], ascending=[False, True], kind="stable")
    layer = str(group["layer"].iloc[0])
    growth = _growth(group)
    kept, objects = int(group["live_bytes"].sum()), int(group["live_objects"].sum())
    share = min(1.0, kept / max(1, int(group["alloc_bytes"].sum())))
    caches = [str(c) for c in group.groupby("slab_cache", sort=False)["live_bytes"].sum().index if c]
    kind = _class(group, share, names)
    reasons = [
        f"{objects:,} of {int(group['alloc_objects'].sum()):,} allocated objects are kept ({share:.0%} of the bytes)",
        f"the kept memory rises in every part of the time after the warm-up: {growth.bytes_per_s:,.0f} bytes/s "
        f"(95 % interval {growth.ci_low:,.0f} to {growth.ci_high:,.0f})",
    ]
    if group["confirmed"].any():
        reasons.append("an independent counter grew by as much")
    if int(group["outlives_bytes"].sum()):
        reasons.append(f"{int(group['outlives_bytes'].sum()):,} bytes outlive their process")
    if lives.loc[lives["life"].isin(group["life"]), "idle"].any():
        reasons.append("judged over the time in which the process was active")
    lost = int(group["lost_objects"].max())
    if lost:
        reasons.append(f"at most {lost:,} frees may be unseen")
    verdict, confidence = "leak", _confidence(group, share)
    if kind == "reclaimable_slab":
        verdict = "not_leak"
        reasons.append("these caches are given back under memory pressure")
    if kind == "pending_free":
        verdict = "not_leak"
        reasons.append("the kernel frees these objects by itself, in batches or after a time")
    return Verdict(
        verdict=verdict,
        kind=kind,
        layer=layer,
        confidence=confidence,
        culprit=_culprit(group, names, caches),
        growth=growth,
        leak_start_s=_start_s(group, lives),
        kept_bytes=kept,
        kept_objects=objects,
        sites=_unique(group["site"]),
        consequences=_unique(follows),
        reasons=tuple(reasons),
        missing=() if names[int(group["site"].iloc[0])].culprit else ("stacks",),
        smallest_provable_bytes_per_s=float(np.sqrt((group["half_width"] ** 2).sum())),
    )


def _unclear(group: pd.DataFrame, names: dict[int, Names], lives: pd.DataFrame) -> Verdict:
    group = group.sort_values(["live_bytes", "site"], ascending=[False, True], kind="stable")
    withheld = bool(group["withheld"].any())
    growth = _growth(group)
    lost = int(group["lost_objects"].max())
    if withheld:
        count = f"{lost:,} frees" if lost < 1 << 59 else "all frees"
        reasons = (f"kept memory rises, but {count} may be unseen, as many as objects are kept",)
        missing = ("events lost while recording: a larger buffer, or a counter of the same memory",)
    else:
        reasons = ("kept memory rises, but not steadily to the end: it may level off",)
        missing = ("a longer recording",)
    caches = [str(c) for c in group["slab_cache"].unique() if c]
    return Verdict(
        verdict="inconclusive",
        kind="partial_data" if withheld else "window_too_short",
        layer=str(group["layer"].iloc[0]),
        confidence=0.5,
        culprit=_culprit(group, names, caches),
        growth=growth,
        leak_start_s=_start_s(group, lives),
        kept_bytes=int(group["live_bytes"].sum()),
        kept_objects=int(group["live_objects"].sum()),
        sites=_unique(group["site"]),
        reasons=reasons,
        missing=missing,
        smallest_provable_bytes_per_s=float(np.sqrt((group["half_width"] ** 2).sum())),
    )


def _material(unclear: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    of_layer = rows.groupby("layer")["live_bytes"].sum().to_dict()
    kept = np.array([of_layer[layer] for layer in unclear["layer"]], dtype=np.float64)
    return unclear[unclear["withheld"] | (unclear["live_bytes"] >= MATERIAL_SHARE * kept)]


def _growth(group: pd.DataFrame) -> Growth:
    """Sum of independent rates: their intervals add in squares."""
    rate = float(group["rate"].sum())
    below = float(np.sqrt(((group["rate"] - group["low"]) ** 2).sum()))
    above = float(np.sqrt(((group["high"] - group["rate"]) ** 2).sum()))
    return Growth(COUNTERS[str(group["layer"].iloc[0])], rate, rate - below, rate + above)


def _culprit(group: pd.DataFrame, names: dict[int, Names], caches: Sequence[str]) -> Culprit:
    first = names[int(group["site"].iloc[0])]
    return Culprit(first.culprit, first.stack, caches[0] if caches else "", tuple(caches))


def _class(group: pd.DataFrame, share: float, names: dict[int, Names]) -> str:
    layer, first = group["layer"].iloc[0], names[int(group["site"].iloc[0])]
    if layer == "kernel":
        caches = set(group["slab_cache"])
        if "" not in caches and all(RECLAIMABLE_CACHES.fullmatch(cache) for cache in caches):
            return "reclaimable_slab"
        known = zip(group["site"], group["slab_cache"], strict=True)
        if all(names[site].deferred or DEFERRED_CACHES.fullmatch(cache) for site, cache in known):
            return "pending_free"
        if "filp" in caches:
            return "descriptor_leak"
        return "kernel_object_per_event" if share >= ONE_KEPT_SHARE else "retained_growth"
    if layer == "host" and group["kind"].iloc[0] == "mmap_anon":
        if first.thread_stack:
            return "unjoined_thread_stacks"
        if first.application and not first.allocator:
            return "mapping_outside_heap"
    if not first.culprit:
        return "unattributed"
    if first.container and share >= MIN_CONTAINER_SHARE:
        return "undrained_container"
    objects = group["live_objects"].sum() / max(1, group["alloc_objects"].sum())
    if objects < ONE_KEPT_SHARE:
        return "error_path_without_free" if objects >= MIN_ERROR_SHARE else "retained_growth"
    if group["smallest_bytes"].min() == group["largest_bytes"].max():
        return "per_call"
    return "per_request_reference" if any(REQUEST.search(frame) for frame in first.stack) else "retained_growth"


def _confidence(group: pd.DataFrame, share: float) -> float:
    """0.5 to 0.99: lowered by little evidence, by losses, by sampling; raised by an independent counter."""
    more = float(group["more_objects"].sum())
    value = 0.97 - 0.2 * min(1.0, 30.0 / max(more, 30.0) if more < 300 else 0.0)
    value -= 0.1 if share < 0.5 else 0.0
    value -= 0.05 if group["sampled"].any() else 0.0
    if group["confirmed"].any():
        value += 0.02
    else:
        value -= 0.3 * min(1.0, float(group["lost_objects"].max()) / max(more, 1.0))
    return float(np.clip(value, 0.5, 0.99))


def _start_s(group: pd.DataFrame, lives: pd.DataFrame) -> float:
    """Seconds from the start of the capture to the first rise among its sites."""
    windows = lives.drop_duplicates("life").set_index("life").loc[group["life"]]
    rise = windows["from_ns"].to_numpy(np.int64) + group["start_bin"].to_numpy(np.int64) * windows["bin_ns"].to_numpy(
        np.int64
    )
    start = np.maximum(rise, group["first_ns"].to_numpy(np.int64)) - windows["source_start_ns"].to_numpy(np.int64)
    return max(0.0, float(start.min()) / 1e9)


def _unique(sites: Sequence[int] | pd.Series) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(int(site)) for site in sites))


def overall(
    findings: Sequence[Verdict], plateaus: bool, events: int, provable: float | None, missing: Sequence[str]
) -> tuple[Verdict, list[Verdict]]:
    """(the leading verdict, the other findings). ``provable``: the smallest rate that would have shown."""
    for wanted in ("leak", "inconclusive"):
        for index, finding in enumerate(findings):
            if finding.verdict == wanted:
                rest = [*findings[:index], *findings[index + 1 :]]
                return replace(finding, missing=(*finding.missing, *missing)), rest
    if not events:
        return (
            Verdict("inconclusive", "missing_data", reasons=("the evidence has no allocations",),
                    missing=("allocation events", *missing)),
            list(findings),
        )  # fmt: skip
    if findings:
        return replace(findings[0], missing=tuple(missing)), list(findings[1:])
    reason = "what grew has levelled off" if plateaus else "nothing keeps growing after the warm-up"
    verdict = Verdict("not_leak", "cache_warmup", confidence=0.8, reasons=(reason,), missing=tuple(missing))
    return replace(verdict, smallest_provable_bytes_per_s=provable), list(findings)

"""Sites as reports list them: names, ids that are the same in every recording, rates."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pandas as pd

from leakscope.correlate.mixed_stacks import merge
from leakscope.correlate.sites import folded_cache
from leakscope.correlate.stack_trees import frame_kind
from leakscope.correlate.stacks import Frame, Stacks
from leakscope.correlate.wrappers import (
    ALLOCATOR,
    CONTAINERS,
    THREAD_START,
    culprit,
    entry_of,
    inside_slab_allocator,
    is_deferred,
    is_plumbing,
)
from leakscope.detect.findings import Names
from leakscope.model.results import Growth, Site

CONTAINER_DEPTH = 4
"""Innermost frames among which the growth of a container is looked for."""


def site_names(row: pd.Series, stacks: Stacks, in_call: set[tuple[int, int, int]], shared: int = 0) -> Names:
    """What a site is called. ``in_call``: the (kernel, user, Python) stacks inside CUDA calls; ``shared``: outer frames
    that it shares with code that frees such memory as well."""
    user, python = stacks[row["user_stack"]], stacks[row["python_stack"]]
    kernel = stacks[row["kernel_stack"]]
    # Recordings know the kernel function that called the allocator; files of others have kernel stacks alone.
    frame = culprit(user, python, kernel, shared, kernel_only=not user and not python and not row["call_site"])
    frames = [*merge(user, python), *kernel]
    identity = (row["kernel_stack"], row["user_stack"], row["python_stack"])
    return Names(
        culprit=frame.text if frame and _names_the_caller(frame, python or user or kernel) else "",
        function=f"{frame.function} ({frame.file})" if frame and frame.kind != "python" and frame.file else "",
        stack=tuple(f.text for f in frames),
        application=frame is not None and frame.kind != "kernel" and not is_plumbing(frame),
        entry=entry_of(kernel),
        in_cuda_call=row["layer"] == "kernel" and identity in in_call,
        of_slabs=row["layer"] == "kernel" and inside_slab_allocator(kernel),
        allocator=any(ALLOCATOR.fullmatch(f.function) for f in user),
        container=any(CONTAINERS.fullmatch(f.function) for f in (python or user)[-CONTAINER_DEPTH:]),
        thread_stack=any(THREAD_START.fullmatch(f.function) for f in user),
        deferred=row["layer"] == "kernel" and is_deferred(kernel),
        kinds=tuple(frame_kind(f) for f in frames),
    )


def _names_the_caller(frame: Frame, stack: Sequence[Frame]) -> bool:
    """Whether the culprit is known: not without a name, nor where only the way in has one and the rest is lost."""
    if frame.text == Frame("").text:
        return False
    inside = list(stack)[list(stack).index(frame) + 1 :] if frame in stack else []
    lost = sum(f.text == Frame("").text for f in inside)
    return lost <= len(stack) // 2


def site_ids(listed: pd.DataFrame, names: dict[int, Names]) -> dict[int, str]:
    """Site number → an id that depends only on what the site is: the same in every recording of it."""
    ids: dict[int, str] = {}
    taken: dict[str, int] = {}
    for _, row in listed.iterrows():
        what = [row["layer"], row["kind"], row["api"], row["slab_cache"], *names[int(row["site"])].stack]
        name = f"{row['layer'][:1]}-{hashlib.sha256(chr(0).join(what).encode()).hexdigest()[:8]}"
        taken[name] = taken.get(name, 0) + 1
        ids[int(row["site"])] = name if taken[name] == 1 else f"{name}.{taken[name]}"
    return ids


def site_rates(judged: pd.DataFrame) -> dict[int, Growth]:
    """Growth by site, the sum of that of its parts; deviations add up as squares."""
    rates: dict[int, Growth] = {}
    squares = judged.assign(below=(judged["rate"] - judged["low"]) ** 2, above=(judged["high"] - judged["rate"]) ** 2)
    for site, row in squares.groupby("site")[["rate", "below", "above"]].sum().iterrows():
        rates[int(site)] = Growth(  # type: ignore[call-overload]
            "live", row["rate"], row["rate"] - row["below"] ** 0.5, row["rate"] + row["above"] ** 0.5
        )
    return rates


def listed_site(row: pd.Series, site_id: str, names: Names, rates: dict[int, Growth], levelled_off: bool) -> Site:
    """The row of a site as reports have it."""
    share = float(row["free_seen_share"])
    visible = bool(row["visible"])
    return Site(
        id=site_id,
        layer=row["layer"],
        kind=row["kind"],
        api=row["api"],
        slab_cache=folded_cache(row["slab_cache"]),
        stack=list(names.stack),
        culprit_frame=names.culprit,
        live_bytes=int(row["live_bytes"]),
        live_objects=int(row["live_objects"]),
        allocated_bytes=int(row["alloc_bytes"]),
        allocated_objects=int(row["alloc_objects"]),
        kept_share=float(row["kept_share"]),
        first_ns=int(row["first_ns"]),
        last_ns=int(row["last_ns"]),
        free_seen_share=None if np.isnan(share) else share,
        frees_visible=visible,
        outlives_process_bytes=int(row["outlives_bytes"]) if visible else 0,
        ended_with_process_bytes=int(row["ended_bytes"]),
        processes=int(row["processes"]),
        stack_sampled=bool(row["sampled"]),
        standard_error_bytes=float(row["standard_error_bytes"]),
        growth=rates.get(int(row["site"])),
        bytes_sampled=float(row["stands_for"]) > 1.0,
        levelled_off=levelled_off,
        frame_kinds=names.kinds,
    )

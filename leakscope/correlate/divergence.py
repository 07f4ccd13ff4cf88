"""Where kept and freed paths part: the culprit lies above what a leak shares with those who free."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from leakscope.correlate.stacks import Frame, Stacks
from leakscope.correlate.wrappers import application_frames, kernel_callers

FREED_SHARE = 0.5
"""A site that keeps less than this share of its objects frees them as a rule."""
MIN_OBJECTS = 3
MAX_FREEING_SITES = 2000
SAME_ALLOCATION = ["layer", "kind", "api", "call_site"]


def freeing_sites(sites: pd.DataFrame, growing: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``sites`` that allocate as a growing one does and free what they allocate, the busiest first."""
    frees = (sites["alloc_objects"] >= MIN_OBJECTS) & (sites["live_objects"] < FREED_SHARE * sites["alloc_objects"])
    alike = sites[frees].merge(growing[SAME_ALLOCATION].drop_duplicates(), on=SAME_ALLOCATION)
    return alike.sort_values(["alloc_objects", "site"], ascending=[False, True]).head(MAX_FREEING_SITES)


def shared_with_freeing(growing: pd.DataFrame, freeing: pd.DataFrame, stacks: Stacks) -> dict[int, int]:
    """Site number → how many of its innermost application frames a freeing site ends in as well.

    0 where the innermost frame is the leak's own, or where a freeing site has the very same path (then nothing tells
    them apart). Frames are compared by function and module or file, not by line.
    """
    paths: dict[tuple[object, ...], list[list[tuple[str, str]]]] = {}
    for _, row in freeing.iterrows():
        paths.setdefault(tuple(row[SAME_ALLOCATION]), []).append(_names(_application_frames(stacks, row)))
    shared: dict[int, int] = {}
    for _, row in growing.iterrows():
        own = _names(_application_frames(stacks, row))
        longest = max((_common(own, other) for other in paths.get(tuple(row[SAME_ALLOCATION]), [])), default=0)
        shared[int(row["site"])] = longest if longest < len(own) else 0
    return shared


def _application_frames(stacks: Stacks, row: pd.Series) -> list[Frame]:
    """Outermost first; without user stacks the kernel's own callers."""
    user, python = stacks[row["user_stack"]], stacks[row["python_stack"]]
    return application_frames(user, python) if user or python else kernel_callers(stacks[row["kernel_stack"]])


def _names(frames: Sequence[Frame]) -> list[tuple[str, str]]:
    return [(frame.function, frame.file or frame.module) for frame in frames]


def _common(one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]) -> int:
    """Length of the longest common tail."""
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length

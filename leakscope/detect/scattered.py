"""Leaks that no single stack shows: many paths below one frame, each keeping a little.

Where what single sites keep is too little to judge, their sum may still rise steadily. Then the call tree of their
growth is walked from its root as long as one branch carries nearly all of it: where it forks, the frame above is the
common ancestor and the culprit. Recursion and frames without a name of their own are folded first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.sites import Holdings
from leakscope.correlate.stacks import Frame, Stacks
from leakscope.correlate.wrappers import SLAB_ENTRY, is_plumbing
from leakscope.detect import growth
from leakscope.detect.judge import NOT_JUDGED, State, judge

if TYPE_CHECKING:
    import duckdb

FloatArray = npt.NDArray[np.float64]

BRANCH_SHARE = 0.75
"""A branch is followed while it carries this share of the growth of all."""
MIN_ROWS = 3
MAX_ROWS = 5000
GROUP = ["life", "layer"]


class Scattered(NamedTuple):
    """``judged``: with the rows of scattered leaks made leaks. ``ancestors``: site number → the culprit's text."""

    judged: pd.DataFrame
    ancestors: dict[int, str]


def find_scattered(
    con: duckdb.DuckDBPyConnection,
    held: Holdings,
    judged: pd.DataFrame,
    lives: pd.DataFrame,
    hidden: npt.NDArray[np.float64],
    warm_up_s: float | None,
) -> Scattered:
    """Judge the sums of what single sites could not show. ``hidden``: by site number, frees that may be unseen."""
    table = held.table.iloc[held.curve_rows].reset_index(drop=True)
    place = {int(holding): index for index, holding in enumerate(table["holding"])}
    rows = np.array([place[int(holding)] for holding in judged["holding"]], np.int64)
    loose = (judged["state"] < State.LEAK).to_numpy() & ~judged["withheld"].to_numpy(bool)
    loose &= np.isnan(held.pool_objects[rows]).all(axis=1)
    ancestors: dict[int, str] = {}
    judged = judged.copy()
    keys = table.iloc[rows][GROUP].assign(row=rows, at=np.arange(len(rows)))[loose]
    for _, group in keys.groupby(GROUP, sort=True):
        if len(group) < MIN_ROWS:
            continue
        chosen = group["row"].to_numpy(np.int64)
        if len(chosen) > MAX_ROWS:
            chosen = chosen[np.argsort(-table["live_bytes"].to_numpy()[chosen], kind="stable")[:MAX_ROWS]]
        if _judged_sum(held, table, chosen, lives, hidden, warm_up_s)["state"] != State.LEAK:
            continue
        below, ancestor = _ancestor(con, held, table, chosen, lives, warm_up_s)
        if len(below) < MIN_ROWS or not ancestor:
            continue
        verdict = _judged_sum(held, table, below, lives, hidden, warm_up_s)
        if verdict["state"] != State.LEAK:
            continue
        at = group.set_index("row").loc[below, "at"].to_numpy(np.int64)
        _make_leaks(judged, at, held, below, verdict, table, lives)
        ancestors |= dict.fromkeys(table["site"].to_numpy()[below].tolist(), ancestor)
    return Scattered(judged, ancestors)


def _judged_sum(
    held: Holdings,
    table: pd.DataFrame,
    rows: npt.NDArray[np.int64],
    lives: pd.DataFrame,
    hidden: npt.NDArray[np.float64],
    warm_up_s: float | None,
) -> pd.Series:
    """The rows of one life and layer judged as if they were one site."""
    part = table.iloc[rows]
    kind = next((k for k in part["kind"] if k not in NOT_JUDGED), part["kind"].iloc[0])
    one = part.iloc[[0]].assign(
        holding=0,
        site=0,
        kind=kind,
        stands_for=part["stands_for"].max(),
        live_bytes=part["live_bytes"].sum(),
        live_objects=part["live_objects"].sum(),
        alloc_objects=part["alloc_objects"].sum(),
    )
    summed = Holdings(
        one.reset_index(drop=True),
        np.zeros(1, np.int64),
        held.kept_bytes[rows].sum(axis=0, keepdims=True),
        held.kept_objects[rows].sum(axis=0, keepdims=True),
        np.full((1, held.kept_bytes.shape[1]), np.nan),
    )
    lost = np.array([hidden[part["site"].to_numpy(np.int64)].sum()])
    verdict: pd.Series = judge(summed, lives, np.ones(1, bool), lost, np.zeros(1, bool), warm_up_s).iloc[0]
    return verdict


def _ancestor(
    con: duckdb.DuckDBPyConnection,
    held: Holdings,
    table: pd.DataFrame,
    rows: npt.NDArray[np.int64],
    lives: pd.DataFrame,
    warm_up_s: float | None,
) -> tuple[npt.NDArray[np.int64], str]:
    """(the rows below the deepest frame that carries nearly all of the growth, that frame's text)."""
    bins = held.kept_bytes.shape[1]
    window = lives[lives["life"] == table["life"].iloc[rows[0]]].iloc[0]
    warm = int(growth.warm_up_bins(bins, np.array([window["bin_ns"] / 1e9 * bins]), warm_up_s)[0])
    gain = np.maximum(0.0, held.kept_bytes[rows, -1] - held.kept_bytes[rows, max(warm - 1, 0)])
    part = table.iloc[rows]
    columns = ["kernel_stack", "user_stack", "python_stack"]
    stacks = Stacks(con, np.unique(part[columns].to_numpy()).tolist())
    paths = [folded_path(stacks[p], stacks[u], stacks[k]) for k, u, p in part[columns].itertuples(index=False)]
    inside = np.flatnonzero(gain > 0)
    total, depth, found = float(gain.sum()), 0, ""
    while True:
        branches: dict[str, float] = {}
        for index in inside:
            if depth < len(paths[index]):
                text = paths[index][depth]
                branches[text] = branches.get(text, 0.0) + gain[index]
        best = max(branches, key=lambda text: branches[text], default="")
        if not best or branches[best] < BRANCH_SHARE * total:
            break
        found = best
        inside = np.array([i for i in inside if depth < len(paths[i]) and paths[i][depth] == best], np.int64)
        depth += 1
    prefix = paths[inside[0]][:depth] if len(inside) else []
    below = [index for index, path in enumerate(paths) if prefix and path[:depth] == prefix]
    return rows[below], found


def folded_path(python: list[Frame], user: list[Frame], kernel: list[Frame]) -> list[str]:
    """Texts of the frames that say something, outermost first; a frame that calls itself stands once."""
    frames = [f for f in (python or user) if not is_plumbing(f)] or [f for f in user if f.function]
    if not frames:
        frames = [f for f in kernel if f.function and not SLAB_ENTRY.fullmatch(f.function)]
    path: list[str] = []
    for frame in frames:
        if not path or path[-1] != frame.text:
            path.append(frame.text)
    return path


def _make_leaks(
    judged: pd.DataFrame,
    at: npt.NDArray[np.int64],
    held: Holdings,
    rows: npt.NDArray[np.int64],
    verdict: pd.Series,
    table: pd.DataFrame,
    lives: pd.DataFrame,
) -> None:
    """Enter the sum's judgement in the rows, so that their rates add up to its rate and their intervals to its own."""
    bins = held.kept_bytes.shape[1]
    share = held.kept_bytes[rows, -1] / max(float(held.kept_bytes[rows, -1].sum()), 1.0)
    width = 1.0 / np.sqrt(len(rows))
    index = judged.index[at]
    judged.loc[index, "state"] = State.LEAK
    judged.loc[index, "rate"] = verdict["rate"] * share
    judged.loc[index, "low"] = verdict["rate"] * share - (verdict["rate"] - verdict["low"]) * width
    judged.loc[index, "high"] = verdict["rate"] * share + (verdict["high"] - verdict["rate"]) * width
    judged.loc[index, "half_width"] = verdict["half_width"] * width
    judged.loc[index, "start_bin"] = min(int(verdict["start_bin"]), bins - 1)

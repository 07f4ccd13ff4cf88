"""Device memory that launches touch, and what a recording kept at earlier times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.sites import Holdings
from leakscope.correlate.touches import Touched
from leakscope.liveness.classes import UNKNOWN_REF, Facts, classify
from leakscope.liveness.graph import GraphBuilder
from leakscope.model.liveness import CLASSES, Window

GROUP = ["source_id", "life", "site", "cls"]
"""What makes a node: source, process, site and class."""
BY_LAUNCHES = "launch arguments"


def touched_groups(touched: Touched, stale_after_s: float, steps: tuple[float, ...]) -> pd.DataFrame:
    """Groups of device memory whose touches were looked for. ``touched.kept`` has the column life."""
    kept = touched.kept
    end, made = kept["end_ns"].to_numpy(np.int64), kept["ts_ns"].to_numpy(np.int64)
    cls, idle_s = classes_at(kept, kept["last_ns"].to_numpy(np.int64), end, stale_after_s)
    size = kept["size_bytes"].to_numpy(np.int64)
    stale = idle_s > stale_after_s
    rows = pd.DataFrame(
        {
            "source_id": kept["source_id"].to_numpy(np.int64), "life": kept["life"].to_numpy(np.int64),
            "site": kept["site"].to_numpy(np.int64), "cls": cls, "objects": 1, "bytes": size, "since_ns": made,
            "last_use_ns": kept["last_ns"].to_numpy(np.int64), "approximate": kept["approximate"].to_numpy(bool),
            "stale_bytes": np.where(stale, size, 0), "stale_objects": stale.astype(np.int64),
            "stale_byte_seconds": np.where(stale, size * idle_s, 0.0),
            "cohort": np.searchsorted(np.asarray(steps), idle_s, "right") - 1,
        }
    )  # fmt: skip
    sums = dict.fromkeys(("objects", "bytes", "stale_bytes", "stale_objects", "stale_byte_seconds"), "sum")
    how = sums | {"since_ns": "min", "last_use_ns": "max", "approximate": "max"}
    groups = rows.groupby(GROUP, sort=True).agg(how).reset_index()
    cohorts = rows.groupby([*GROUP, "cohort"], sort=True)[["objects", "bytes"]].sum().reset_index()
    groups["cohorts"] = pd.Series(cohort_lists(groups, cohorts, GROUP, steps), groups.index)
    groups["evidence"] = BY_LAUNCHES
    return groups


def classes_at(
    kept: pd.DataFrame, last: npt.NDArray[np.int64], at: npt.NDArray[np.int64], stale_after_s: float
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float64]]:
    """(class, seconds without a touch) of device allocations at a time. A touch that is only guessed is no evidence of
    use, and one that may be hidden none of disuse: their class is unknown-ref."""
    idle = (at - np.maximum(last, kept["ts_ns"].to_numpy(np.int64))).astype(np.float64)
    nothing = np.full(len(kept), np.nan)
    held = ~kept["approximate"].to_numpy(bool)
    facts = Facts(nothing, held, idle, idle > stale_after_s * 1e9, nothing)
    return classify(facts), idle / 1e9


def cohort_lists(
    groups: pd.DataFrame, cohorts: pd.DataFrame, key: list[str], steps: tuple[float, ...]
) -> list[tuple[tuple[float, int, int], ...]]:
    """(at least so many seconds old, objects, bytes) of each group, youngest first."""
    lists: dict[tuple[int, ...], list[tuple[float, int, int]]] = {}
    columns = [cohorts[name].tolist() for name in (*key, "cohort", "objects", "bytes")]
    for *of, cohort, objects, size in zip(*columns, strict=True):
        lists.setdefault(tuple(of), []).append((float(steps[int(cohort)]), int(objects), int(size)))
    return [
        tuple(sorted(lists.get(tuple(of), []))) for of in zip(*(groups[name].tolist() for name in key), strict=True)
    ]


def add_kernels(
    builder: GraphBuilder, groups: pd.DataFrame, touched: Touched, numbers: dict[int, int], stale_after_s: float
) -> None:
    """A node for each kernel that got a pointer, with an edge from what it touched."""
    kept, touches = touched.kept, touched.touches
    of_group = groups[groups["evidence"] == BY_LAUNCHES]
    place = dict(zip(map(tuple, of_group[GROUP].to_numpy(np.int64).tolist()), of_group["node"].tolist(), strict=True))
    end = kept["end_ns"].to_numpy(np.int64)
    cls, _ = classes_at(kept, kept["last_ns"].to_numpy(np.int64), end, stale_after_s)
    keys = zip(*(kept[name].tolist() for name in GROUP[:-1]), cls.tolist(), strict=True)
    node = np.array([place.get(key, -1) for key in keys], np.int64)
    rows = touches.assign(node=node[touches["row"].to_numpy(np.int64)])
    rows = rows.assign(source=kept["source_id"].to_numpy()[touches["row"].to_numpy(np.int64)])
    rows = rows[rows["node"] >= 0]
    for _, edges in rows.groupby(["source", "kernel"], sort=True):
        name, source = str(edges["kernel"].iloc[0]) or "unknown kernel", int(edges["source"].iloc[0])
        added = builder.add_nodes("kernel", [name], source=numbers[source])
        sums = edges.groupby("node").agg(count=("launch_id", "nunique"), last=("ts_ns", "max")).reset_index()
        builder.add_edges(
            "touched-by",
            sums["node"].to_numpy(np.int32),
            np.repeat(added, len(sums)),
            count=sums["count"].to_numpy(np.int64),
            since_ns=sums["last"].to_numpy(np.int64),
        )


def windows_of(
    held: Holdings,
    lives: pd.DataFrame,
    sites: pd.DataFrame,
    touched: Touched | None,
    bounds: pd.DataFrame,
    source: int,
    windows: int,
    stale_after_s: float,
) -> tuple[Window, ...]:
    """What sites that keep something at the end kept at earlier times. Device memory that is kept at the end has the
    class that it had then; all else is unknown-ref."""
    bound = bounds[bounds["source_id"] == source]
    if not len(bound) or windows <= 0:
        return ()
    start, end = int(bound["start_ns"].iloc[0]), int(bound["end_ns"].iloc[0])
    rows = held.table.iloc[held.curve_rows]
    of_life = lives.drop_duplicates("life").set_index("life")
    chosen = (rows["site"].isin(sites["site"]) & (rows["life"].map(of_life["source_id"]) == source)).to_numpy()
    from_ns = rows["life"].map(of_life["from_ns"]).to_numpy(np.int64)[chosen]
    bin_ns = rows["life"].map(of_life["bin_ns"]).to_numpy(np.int64)[chosen]
    curve_bytes, curve_objects = held.kept_bytes[chosen], held.kept_objects[chosen]
    kept = touched.kept[touched.kept["source_id"] == source] if touched is not None else None
    found = []
    for step in range(1, windows + 1):
        at = start + (end - start) * step // windows
        bins = np.clip((at - from_ns) // bin_ns - (step < windows), -1, curve_bytes.shape[1] - 1)
        if step == windows:
            bins[:] = curve_bytes.shape[1] - 1
        line = np.arange(len(bins))
        sums = np.zeros((2, len(CLASSES)))
        sums[0, UNKNOWN_REF] = np.where(bins >= 0, curve_bytes[line, bins], 0).sum()
        sums[1, UNKNOWN_REF] = np.where(bins >= 0, curve_objects[line, bins], 0).sum()
        if kept is not None and touched is not None and len(kept):
            alive = kept[kept["ts_ns"] <= at]
            before = touched.touches[touched.touches["ts_ns"] <= at]
            last = before.groupby("row")["ts_ns"].max().reindex(alive["row"], fill_value=0).to_numpy(np.int64)
            cls, _ = classes_at(alive, last, np.full(len(alive), at), stale_after_s)
            for unit, weights in enumerate((alive["size_bytes"].to_numpy(np.float64), np.ones(len(alive)))):
                of_class = np.bincount(cls, weights=weights, minlength=len(CLASSES))
                sums[unit, UNKNOWN_REF] = max(0.0, sums[unit, UNKNOWN_REF] - of_class.sum())
                sums[unit] += of_class
        whole = np.rint(sums).astype(np.int64).tolist()
        found.append(Window((at - start) / 1e9, tuple(whole[0]), tuple(whole[1])))
    return tuple(found)

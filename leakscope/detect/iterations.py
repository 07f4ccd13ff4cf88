"""Judging repeated work: what each iteration of the same code leaves behind.

Where a piece of work is repeated, time says little and the iteration all: an allocation belongs to the iteration in
which it was born. What an iteration of a leak allocates is still there when the last one is over, in every part of the
run; a cache that is filled once belongs to one iteration, and of a value that is replaced each time only the last is
left. So growth is a curve over iterations, of what is kept by iteration of birth, and a leak one that
:func:`leakscope.detect.growth.steadily_rises`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.sites import SITE_KEY, Holdings
from leakscope.detect.growth import steadily_rises
from leakscope.detect.judge import NOT_JUDGED, State
from leakscope.model.results import Growth, LayerTotal, Verdict

if TYPE_CHECKING:
    import duckdb

FloatArray = npt.NDArray[np.float64]

UNIT = "iteration"
MIN_CHECKED_OBJECTS = 100
"""Kernel objects from which on slab counters tell whether their frees can be seen (correlate.visibility)."""


@dataclass(frozen=True)
class Iterations:
    """Windows [start_ns, end_ns) of the iterations that are judged, on the clock of the recording, in their order.

    ``descriptors_rise``: the number of open descriptors rises with the iterations.
    """

    windows: tuple[tuple[int, int], ...]
    descriptors_rise: bool = False


def frees_proven(held: Holdings, sites: pd.DataFrame, iterations: Iterations) -> npt.NDArray[np.bool_]:
    """For each row of ``sites``, whether it may be judged over so few iterations: bool[len(sites)].

    Some kernel objects are freed without a trace (kfree_rcu), and too few of them are allocated here for slab counters
    or reused addresses to tell. A kernel site counts when objects of the same kernel function were seen to be freed,
    when there are many, or when descriptors, which keep most kernel objects alive, rise as well.
    """
    freed = held.table.groupby("call_site")["call_objects"].sum()
    seen = sites["call_site"].map(freed).fillna(0).to_numpy(np.float64) > 0
    many = sites["live_objects"].to_numpy() >= MIN_CHECKED_OBJECTS
    other = (sites["layer"] != "kernel").to_numpy()
    return np.asarray(other | seen | many | iterations.descriptors_rise, dtype=bool)


def kept_by_birth(
    con: duckdb.DuckDBPyConnection, held: Holdings, iterations: Iterations
) -> tuple[FloatArray, FloatArray]:
    """(bytes, objects) that each holding keeps of what each iteration allocated: float64[len(held.table), M] each.

    Needs the view ``events`` and the table ``lives`` of :func:`leakscope.correlate.aggregate.aggregate`. The end of a
    process gives back all: what a child of one iteration held is no growth of the next.
    """
    count = len(iterations.windows)
    kept_bytes, kept_objects = np.zeros((len(held.table), count)), np.zeros((len(held.table), count))
    windows = pd.DataFrame(iterations.windows, columns=["start_ns", "end_ns"]).assign(iteration=np.arange(count))
    con.register("iterations_now", windows)
    con.register("holdings_now", held.table[["holding", "life", *SITE_KEY]])
    key = [column for column in SITE_KEY if column != "slab_cache"]
    rows = con.execute(
        f"""
        WITH born AS (
            SELECT CASE WHEN op = 'alloc' THEN ts_ns ELSE alloc_ts_ns END AS born_ns, l.life,
                   {", ".join(key)}, regexp_replace(slab_cache, '^kmalloc-rnd-[0-9]+-', 'kmalloc-') AS slab_cache,
                   CASE WHEN op = 'alloc' THEN objects ELSE -objects END AS objects,
                   CASE WHEN op = 'alloc' THEN bytes ELSE -bytes END AS bytes
            FROM changes c JOIN lives l USING (source_id, pid)
        ), placed AS (
            SELECT iteration, life, {", ".join(SITE_KEY)}, sum(objects)::BIGINT AS objects, sum(bytes)::BIGINT AS bytes
            FROM born ASOF JOIN iterations_now i ON born.born_ns >= i.start_ns
            WHERE born_ns < end_ns GROUP BY ALL
        )
        SELECT holding, iteration, objects, bytes FROM placed JOIN holdings_now h USING (life, {", ".join(SITE_KEY)})
        """
    ).fetchnumpy()
    con.unregister("iterations_now")
    con.unregister("holdings_now")
    place = rows["holding"], rows["iteration"]  # each once
    kept_bytes[place], kept_objects[place] = rows["bytes"], rows["objects"]
    # Parts of a mapping that were given back count no object: the rest of it is one still.
    return np.maximum(kept_bytes, 0.0), np.where(kept_bytes > 0, np.maximum(kept_objects, 0.0), 0.0)


def judge_iterations(
    con: duckdb.DuckDBPyConnection,
    held: Holdings,
    visible: npt.NDArray[np.bool_],
    hidden: npt.NDArray[np.float64],
    confirmed: npt.NDArray[np.bool_],
    iterations: Iterations,
) -> pd.DataFrame:
    """As :func:`leakscope.detect.judge.judge`, by iteration of birth: one row a holding that keeps some of it.

    ``per_iteration`` besides is the mean of bytes over all iterations. Holdings that differ
    by native stacks alone are judged as one where there is a Python stack: walks through the interpreter, which has no
    frame pointers, differ by chance.
    """
    table = held.table
    kept_bytes, kept_objects = kept_by_birth(con, held, iterations)
    count = len(iterations.windows)
    chosen = ~table["kind"].isin(NOT_JUDGED).to_numpy() & visible[table["site"].to_numpy()]
    chosen &= kept_bytes.sum(axis=1) > 0
    rows = table[chosen].reset_index(drop=True)
    kept_bytes, kept_objects = kept_bytes[chosen], kept_objects[chosen]

    native = rows["python_stack"] == 0
    key = [
        *(rows[column] for column in ("life", "layer", "kind", "api", "slab_cache", "python_stack")),
        rows["user_stack"].where(native, 0),
        rows["kernel_stack"].where(native, 0),
    ]
    group = rows.groupby(key, sort=True).ngroup().to_numpy(np.int64)
    objects = np.zeros((int(group.max()) + 1 if len(group) else 0, count))
    np.add.at(objects, group, kept_objects)
    rises = steadily_rises(np.cumsum(np.pad(objects, ((0, 0), (1, 0))), axis=1))
    # Frees are lost by chance: not one in each iteration.
    every = objects.min(axis=1, initial=np.inf) >= 1

    site = rows["site"].to_numpy(np.int64)
    lost, sure = hidden[site], confirmed[site] | every[group]
    more = objects.sum(axis=1)[group]
    withheld = rises[group] & ~sure & (more <= lost)
    state = np.where(rises[group], np.where(withheld, State.UNCLEAR, State.LEAK), State.PLATEAU)
    span_s = max(1e-9, sum(end - start for start, end in iterations.windows) / 1e9)
    mean = kept_bytes.mean(axis=1)
    error = kept_bytes.std(axis=1, ddof=1) / np.sqrt(count) * 1.96
    to_rate = count / span_s
    return pd.DataFrame(
        {
            "holding": rows["holding"],
            "site": rows["site"],
            "life": rows["life"],
            "state": state.astype(np.int64),
            "rate": mean * to_rate,
            "low": np.maximum(mean - error, 0.0) * to_rate,
            "high": (mean + error) * to_rate,
            "kept_bytes": kept_bytes.sum(axis=1),
            "kept_objects": kept_objects.sum(axis=1),
            "more_objects": more,
            "start_bin": 0,
            "lost_objects": lost,
            "withheld": withheld,
            "confirmed": confirmed[site],
            "half_width": error * to_rate,
            "per_iteration": mean,
        }
    )


def layers_by_iteration(layers: Sequence[LayerTotal], judged: pd.DataFrame, table: pd.DataFrame) -> list[LayerTotal]:
    """``layers`` with the growth that iterations made, leak or not."""
    columns = ["rate", "low", "high", "per_iteration"]
    sums = judged.merge(table[["holding", "layer"]], on="holding").groupby("layer")[columns].sum()
    grown = {
        layer: Growth(f"{layer}_live", rate, low, high, (UNIT, each))
        for layer, (rate, low, high, each) in zip(sums.index.astype(str), sums.to_numpy(np.float64), strict=True)
    }
    return [replace(total, growth=grown.get(total.layer)) for total in layers]


def sites_by_iteration(rates: dict[int, Growth], judged: pd.DataFrame) -> dict[int, Growth]:
    """``rates`` by site number with what each iteration left behind."""
    each = judged.groupby("site")["per_iteration"].sum()
    return {site: replace(rate, per_unit=(UNIT, float(each[site]))) for site, rate in rates.items()}


def in_iterations(finding: Verdict, judged: pd.DataFrame, count: int) -> Verdict:
    """A finding of :func:`leakscope.detect.findings.find` told by iterations; its sites are numbers as text."""
    own = judged[judged["site"].isin([int(site) for site in finding.sites])]
    own = own[own["state"] >= State.UNCLEAR]
    kept, objects = int(own["kept_bytes"].sum()), int(own["kept_objects"].sum())
    each = kept / count
    reasons = (
        f"{count} iterations left {kept:,} bytes behind: {each:,.0f} bytes and {objects / count:,.4g} objects each, "
        "in every part of the run",
        *(reason for reason in finding.reasons if "rises in every part" not in reason and "are kept (" not in reason),
    )
    rate = replace(finding.growth, per_unit=(UNIT, each)) if finding.growth else None
    if finding.verdict == "inconclusive":
        reasons = finding.reasons
    return replace(
        finding,
        growth=rate,
        kept_bytes=kept,
        kept_objects=objects,
        leak_start_s=None,
        reasons=reasons,
    )

"""Drift of cache metadata between ranks: one collective, two versions of the cache."""

from __future__ import annotations

import pandas as pd

from leakscope.cache.inconsistency import Checked, Inconsistency

SHOWN_RANKS = 16


def metadata_drift(path: str, log: pd.DataFrame, left_out: int = 0) -> Checked:
    """Collectives (``op_id``) in which ranks took part with different ``cache_version``, or not all of them.

    ``log``: object columns op_id, rank, cache_version; the last row of an op and rank counts.
    """
    rows = log.drop_duplicates(["op_id", "rank"], keep="last")
    ranks = rows["rank"].nunique()
    ops = rows.groupby("op_id", sort=False)  # in the order of the log
    versions, present = ops["cache_version"].nunique(), ops["rank"].nunique()
    found = []
    drifting = versions.index[(versions > 1).to_numpy()]
    if len(drifting):
        first = rows[rows["op_id"] == drifting[0]]
        what = "ranks took part in one collective with different versions of the cache"
        usual = first["cache_version"].mode().iloc[0]
        odd = first[first["cache_version"] != usual].head(SHOWN_RANKS)
        sides = {f"rank {row.rank}": f"version {row.cache_version}" for row in odd.itertuples()}
        others = len(first) - len(first[first["cache_version"] != usual])
        sides[f"{others} other rank{'s' * (others != 1)}"] = f"version {usual}"
        found.append(Inconsistency("metadata drift", f"op {drifting[0]}", what, sides, len(drifting)))
    # at the end of a log some ranks may not have written yet: only ops before the last complete one count
    complete = [at for at, count in enumerate(present) if count == ranks]
    before = present.iloc[: complete[-1]] if complete else present
    missing = before.index[(before < ranks).to_numpy()]
    if len(missing):
        there = set(rows.loc[rows["op_id"] == missing[0], "rank"])
        absent = sorted(set(rows["rank"]) - there)[:SHOWN_RANKS]
        found.append(
            Inconsistency(
                "missing rank", f"op {missing[0]}", "a collective that some ranks did not take part in",
                {f"rank {rank}": "no call" for rank in absent}, len(missing),
            )
        )  # fmt: skip
    facts = {"ranks": ranks, "collectives": len(versions), "left out": left_out}
    return Checked("metadata drift", (path,), facts, tuple(found))

"""Reconciliation: what events say is kept against what independent counters say has grown.

Every comparison covers the time between two samples of the counter, the last one taken before the first root
process began to exit, and counts all frees of that time, those of exiting processes too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from leakscope.correlate.lives import FOLDED_PID
from leakscope.correlate.sites import folded_cache
from leakscope.model.results import Row
from leakscope.model.words import KINDS_NOT_ADDED

if TYPE_CHECKING:
    import duckdb

MAIN_SHARE = 0.99
"""Caches that hold this share of the kept slab bytes are compared; in the others foreign objects dominate."""
_SIGNED = "sum(CASE WHEN op = 'alloc' THEN bytes ELSE -bytes END)::BIGINT"
_PLAUSIBLE = "value BETWEEN 0 AND 9e18"  # of a reading; neither NaN nor what no integer holds
_SEEN = "(op = 'alloc' OR alloc_ts_ns > 0)"


class SlabEvidence(NamedTuple):
    """Between two slab samples of each source.

    ``spans``: source_id → (first_ns, last_ns). ``growth``: (source_id, cache) → bytes by which the cache
    grew. ``kept``: DataFrame source_id, slab_cache (folded), call_site, kind, bytes: what events say was
    kept.
    """

    spans: dict[int, tuple[int, int]]
    growth: dict[tuple[int, str], float]
    before: dict[tuple[int, str], float]
    kept: pd.DataFrame


def evidence_ends(lives: pd.DataFrame) -> dict[int, int]:
    """source_id → when the first root process began to exit; the end of the source where none did."""
    ends = {int(s): int(e) for s, e in lives.loc[lives["pid"] == FOLDED_PID, ["source_id", "until_ns"]].to_numpy()}
    roots = lives[(lives["role"] == "root") & (lives["exit_ns"] > 0)]
    for source, exit_ns in roots[["source_id", "exit_ns"]].to_numpy():
        ends[int(source)] = min(ends[int(source)], int(exit_ns))
    return ends


def slab_evidence(con: duckdb.DuckDBPyConnection, ends: dict[int, int]) -> SlabEvidence:
    """Growth of slab caches and what events say about it; empty where slabs were not sampled twice."""
    spans: dict[int, tuple[int, int]] = {}
    growth: dict[tuple[int, str], float] = {}
    at_first: dict[tuple[int, str], float] = {}
    pieces: list[pd.DataFrame] = []
    for source, end in ends.items():
        changes = _host_changes(con, source, end, "slab\\_%")
        if changes is None:
            continue
        first_ns, last_ns, by_counter = changes
        spans[source] = (first_ns, last_ns)
        for counter, (before, after) in by_counter.items():
            if not counter.endswith("_num"):
                cache = folded_cache(counter.removeprefix("slab_"))
                growth[source, cache] = growth.get((source, cache), 0.0) + after - before
                at_first[source, cache] = at_first.get((source, cache), 0.0) + before
        kept = con.execute(
            f"""
            SELECT source_id, slab_cache, call_site, kind, {_SIGNED} AS kept FROM changes
            WHERE source_id = ? AND layer = 'kernel' AND slab_cache <> ''
                  AND ts_ns > ? AND ts_ns <= ? AND {_SEEN}
            GROUP BY ALL HAVING kept <> 0 ORDER BY ALL
            """,
            [source, first_ns, last_ns],
        ).df()
        kept = kept.rename(columns={"kept": "bytes"})
        pieces.append(kept.assign(slab_cache=kept["slab_cache"].map(folded_cache)))
    columns = ["source_id", "slab_cache", "call_site", "kind", "bytes"]
    return SlabEvidence(spans, growth, at_first, pd.concat(pieces) if pieces else pd.DataFrame(columns=columns))


def _host_changes(
    con: duckdb.DuckDBPyConnection, source: int, end: int, pattern: str
) -> tuple[int, int, dict[str, tuple[float, float]]] | None:
    """(first_ns, last_ns, counter → (value at first, value at last)); None without two samples before
    ``end``.

    A counter that appears later than the first sample counts as 0 there (a cache without objects is not
    sampled); one that is not repeated has not changed.
    """
    first_ns, last_ns = con.execute(
        "SELECT min(ts_ns), max(ts_ns) FROM samples WHERE source_id = ? AND scope = 'host' AND ts_ns <= ?",
        [source, end],
    ).fetchall()[0]
    rows = con.execute(
        f"""
        SELECT counter, CASE WHEN min(ts_ns) = ? THEN arg_min(value, ts_ns) ELSE 0 END, arg_max(value, ts_ns)
        FROM samples WHERE source_id = ? AND scope = 'host' AND ts_ns <= ?
              AND counter LIKE ? ESCAPE '\\' AND {_PLAUSIBLE}
        GROUP BY counter ORDER BY counter
        """,
        [first_ns, source, end, pattern],
    ).fetchall()
    if first_ns is None or first_ns == last_ns or not rows:
        return None
    return int(first_ns), int(last_ns), {counter: (before, after) for counter, before, after in rows}


def kernel_rows(
    con: duckdb.DuckDBPyConnection, slabs: SlabEvidence, hidden: pd.DataFrame, ends: dict[int, int]
) -> list[Row]:
    """Slab caches and SUnreclaim against the kept slab objects of sites whose frees are visible.

    ``hidden``: DataFrame call_site, kind of the sites whose frees cannot be seen.
    """
    if not slabs.spans:
        return [
            Row(
                "slabinfo",
                "slab caches were not sampled twice: the kernel layer is not reconciled",
                None,
                "bytes",
            )
        ]
    keys = set(zip(hidden["call_site"], hidden["kind"], strict=True))
    visible = [(c, k) not in keys for c, k in zip(slabs.kept["call_site"], slabs.kept["kind"], strict=True)]
    by_cache = slabs.kept[np.array(visible, dtype=bool)].groupby(["source_id", "slab_cache"])["bytes"].sum()
    by_cache = by_cache[by_cache > 0].sort_values(ascending=False, kind="stable")
    before = by_cache.cumsum() - by_cache
    main = by_cache[(before < MAIN_SHARE * by_cache.sum())]
    main = main[[key in slabs.growth for key in main.index]]
    rows: list[Row] = []
    if len(main):
        grown = int(sum(slabs.growth[key] for key in main.index))
        names = ", ".join(sorted({cache for _, cache in main.index}))
        rows += _compared("slabinfo", f"growth of {len(main)} slab caches", grown, "kept in these caches",
                          int(main.sum()), names)  # fmt: skip
    kept_all = int(by_cache.sum())
    unreclaimable = [
        after - before
        for source in slabs.spans
        if (found := _host_changes(con, source, ends[source], "meminfo\\_SUnreclaim"))
        for before, after in found[2].values()
    ]
    if unreclaimable:
        rows += _compared("meminfo", "growth of SUnreclaim", int(sum(unreclaimable)), "kept in slabs", kept_all)
    return rows


def host_rows(con: duckdb.DuckDBPyConnection, lives: pd.DataFrame) -> list[Row]:
    """VSS and RSS of the traced processes against their maps and break; reservations count in VSS only."""
    rows: list[Row] = []
    kinds = "'mmap_anon', 'mmap_file', 'brk'"
    for counter, what, counted in (("vss", "VSS", f"{kinds}, 'mmap_reserve'"), ("rss", "RSS", kinds)):
        found = _process_changes(con, lives, counter, f"layer = 'host' AND kind IN ({counted})")
        if found is None:
            rows.append(Row("proc", f"{what} was not sampled twice: not reconciled", None, "bytes"))
        else:
            grown, kept, processes = found
            rows += _compared("proc", f"growth of {what} of {processes} processes", grown, "kept in maps", kept)
    return rows


def gpu_rows(con: duckdb.DuckDBPyConnection, lives: pd.DataFrame, ends: dict[int, int]) -> list[Row]:
    """GPU memory by process (else by device) against kept device allocations; nothing without GPU events."""
    if not con.execute("SELECT 1 FROM changes WHERE layer = 'gpu' LIMIT 1").fetchall():
        return []
    left_out = ", ".join(f"'{kind}'" for kind in sorted(KINDS_NOT_ADDED))
    condition = f"layer = 'gpu' AND kind NOT IN ({left_out})"
    found = _process_changes(con, lives, "gpu_process_used", condition)
    if found is not None:
        return _compared("NVML", "growth of GPU memory of the processes", found[0], "kept on the GPU", found[1])
    grown = kept = 0
    sampled = False
    for source, end in ends.items():
        rows = con.execute(
            f"""
            SELECT min(ts_ns), max(ts_ns), arg_min(value, ts_ns), arg_max(value, ts_ns) FROM samples
            WHERE source_id = ? AND scope = 'device' AND counter = 'gpu_used' AND ts_ns <= ?
                  AND {_PLAUSIBLE}
            GROUP BY scope_id HAVING min(ts_ns) < max(ts_ns) ORDER BY scope_id
            """,
            [source, end],
        ).fetchall()
        if rows:
            sampled = True
            grown += int(sum(after - before for _, _, before, after in rows))
            kept += _kept_between(con, source, min(r[0] for r in rows), max(r[1] for r in rows), condition)
    if not sampled:
        return [Row("NVML", "GPU memory was not sampled twice: not reconciled", None, "bytes")]
    return _compared("NVML", "growth of GPU memory of the devices", grown, "kept on the GPU", kept)


def _kept_between(con: duckdb.DuckDBPyConnection, source: int, first: int, last: int, condition: str) -> int:
    query = f"""SELECT coalesce({_SIGNED}, 0) FROM changes
                WHERE source_id = ? AND ts_ns > ? AND ts_ns <= ? AND {_SEEN} AND {condition}"""
    return int(con.execute(query, [source, first, last]).fetchall()[0][0])


def _process_changes(
    con: duckdb.DuckDBPyConnection, lives: pd.DataFrame, counter: str, condition: str
) -> tuple[int, int, int] | None:
    """(growth of ``counter``, kept bytes by events, processes) over all processes sampled twice; None if
    none."""
    con.register("sampled_lives", lives.loc[lives["pid"] > 0, ["source_id", "pid", "exit_ns"]])
    row = con.execute(
        f"""
        WITH spans AS (
            SELECT source_id, pid, min(ts_ns) AS from_ns, max(ts_ns) AS until_ns,
                   arg_max(value, ts_ns) - arg_min(value, ts_ns) AS grown
            FROM samples JOIN sampled_lives USING (source_id)
            WHERE scope = 'process' AND counter = ? AND scope_id = pid::VARCHAR AND {_PLAUSIBLE}
                  AND (exit_ns = 0 OR ts_ns <= exit_ns)
            GROUP BY ALL HAVING min(ts_ns) < max(ts_ns)
        ), kept AS (
            SELECT {_SIGNED} AS bytes FROM changes JOIN spans USING (source_id, pid)
            WHERE ts_ns > from_ns AND ts_ns <= until_ns AND {_SEEN} AND {condition}
        )
        SELECT coalesce(sum(grown), 0)::BIGINT, coalesce((SELECT bytes FROM kept), 0), count(*) FROM spans
        """,
        [counter],
    ).fetchall()[0]
    con.unregister("sampled_lives")
    return (int(row[0]), int(row[1]), int(row[2])) if row[2] else None


def _compared(source: str, what: str, grown: int, kept_what: str, kept: int, detail: str = "") -> list[Row]:
    return [
        Row(source, what, grown, "bytes", detail),
        Row("events", kept_what, kept, "bytes"),
        Row(source, "unexplained", grown - kept, "bytes"),
    ]

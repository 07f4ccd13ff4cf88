"""Live bytes over time by layer and kind, and what became of what was allocated when: one pass over all changes each.

Both follow the rules of the attribution: what is still there when a judged process begins to exit is kept, frees
without a known allocation are not subtracted, and sites whose frees cannot be seen are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.aggregate import ALLOC, EVENT_CODE, EXIT
from leakscope.correlate.lives import FOLDED_PID
from leakscope.correlate.sites import Holdings

if TYPE_CHECKING:
    import duckdb

BUCKETS = 1000
WINDOWS = 24
HIDDEN, FINDINGS = "hidden_kept", "findings_kept"
"""Tables of :func:`remember`: sites whose frees cannot be seen, by layer; sites of findings, by the first of them."""


class LiveBytes(NamedTuple):
    """Kept bytes of one source at the ends of :data:`BUCKETS` equal parts of its time: ``ends_ns`` int64[BUCKETS], and
    by (layer, kind) int64[BUCKETS]; ``hidden``: of sites whose frees cannot be seen, by layer, float64[BUCKETS]."""

    ends_ns: npt.NDArray[np.int64]
    kept: dict[tuple[str, str], npt.NDArray[np.int64]]
    hidden: dict[str, npt.NDArray[np.float64]]


def remember(con: duckdb.DuckDBPyConnection, name: str, held: Holdings, groups: pd.Series, lives: pd.DataFrame) -> None:
    """Leave the temporary table ``name`` behind: source_id, of, ts_ns, bytes by which the holdings of a group gain
    until then, by the bins of their processes' lives. ``groups``: what a holding (the index) stands under (``of``)."""
    windows = lives.drop_duplicates("life").set_index("life")
    rows = held.table.iloc[held.curve_rows]
    of_group = np.flatnonzero(rows["holding"].isin(groups.index).to_numpy())
    chosen = rows.iloc[of_group]
    window = windows.loc[chosen["life"], ["source_id", "from_ns", "bin_ns"]]
    gains = np.diff(held.kept_bytes[of_group], axis=1, prepend=0.0)
    holding, bin_ = np.nonzero(gains)
    from_ns, bin_ns = (window[column].to_numpy(np.int64)[holding] for column in ("from_ns", "bin_ns"))
    table = pd.DataFrame(
        {
            "source_id": window["source_id"].to_numpy(np.int64)[holding],
            "of": groups.loc[chosen["holding"]].to_numpy(object)[holding].astype(str),
            "ts_ns": from_ns + (bin_ + 1) * bin_ns,
            "bytes": gains[holding, bin_],
        }
    )
    con.register("remembered_now", table)
    con.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS SELECT * FROM remembered_now")
    con.unregister("remembered_now")


def remembered(
    con: duckdb.DuckDBPyConnection, name: str, source: int
) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
    """What :func:`remember` left under ``name`` of a source: group → (times in ns, kept bytes from then on)."""
    rows = con.execute(
        f"SELECT of, ts_ns, sum(bytes) AS bytes FROM {name} WHERE source_id = ? GROUP BY ALL ORDER BY of, ts_ns",
        [source],
    ).df()
    return {
        str(of): (group["ts_ns"].to_numpy(np.int64), np.cumsum(group["bytes"].to_numpy(np.float64)))
        for of, group in rows.groupby("of", sort=True)
    }


def live_bytes(
    con: duckdb.DuckDBPyConnection,
    source: int,
    span_ns: tuple[int, int],
    layer: str | None = None,
    pid: int | None = None,
) -> LiveBytes:
    """Kept bytes of a source over its time. Needs what :func:`leakscope.correlate.aggregate.aggregate` and
    :func:`remember` (as :data:`HIDDEN`, by layer) leave behind. Raises duckdb.Error."""
    start, step = span_ns[0], max(1, -(-(span_ns[1] - span_ns[0] + 1) // BUCKETS))
    rows = con.execute(
        f"""
        WITH counted AS (SELECT e.layer, e.kind, ts_ns, bytes, {EVENT_CODE} AS event, {_FOLDED} AS folded
                         FROM changes e JOIN lives l USING (source_id, pid) WHERE {_chosen(source, layer, pid)})
        SELECT layer::VARCHAR AS layer, kind::VARCHAR AS kind,
               least({BUCKETS - 1}, greatest(0, (ts_ns - {start}) // {step}))::SMALLINT AS bucket,
               sum(CASE WHEN event = {ALLOC} THEN bytes ELSE -bytes END)::BIGINT AS bytes
        FROM counted WHERE event < {EXIT} OR (event = {EXIT} AND folded) GROUP BY ALL
        """
    ).df()
    kept = {}
    for (of_layer, kind), group in rows.groupby(["layer", "kind"], sort=True):
        gained = np.zeros(BUCKETS, np.int64)
        gained[group["bucket"].to_numpy()] = group["bytes"].to_numpy()
        kept[str(of_layer), str(kind)] = np.cumsum(gained)
    ends = np.minimum(start + (np.arange(BUCKETS, dtype=np.int64) + 1) * step, span_ns[1])
    hidden = {}
    for of_layer, (times, values) in remembered(con, HIDDEN, source).items():
        at = np.searchsorted(times, ends, "right")
        at[-1] = len(times)  # the last bin may end after the evidence
        hidden[of_layer] = np.r_[0.0, values][at]
    return LiveBytes(ends, kept, hidden)


def survival(
    con: duckdb.DuckDBPyConnection,
    source: int,
    span_ns: tuple[int, int],
    left_out: Sequence[tuple[str, str]],
    layer: str | None = None,
    pid: int | None = None,
) -> pd.DataFrame:
    """Bytes by layer and window of birth (:data:`WINDOWS` equal parts of the time): columns layer, window, allocated,
    kept. (layer, kind) of ``left_out`` are. Empty for a census, which does not know when what was freed was born.
    Raises duckdb.Error. Needs what :func:`leakscope.correlate.aggregate.aggregate` leaves behind."""
    if con.execute("SELECT 1 FROM census_totals WHERE source_id = ? LIMIT 1", [source]).fetchall():
        return pd.DataFrame(columns=["layer", "window", "allocated", "kept"])
    start, step = span_ns[0], max(1, -(-(span_ns[1] - span_ns[0] + 1) // WINDOWS))
    kinds = "".join(f" AND NOT (e.layer = {_text(of)} AND e.kind = {_text(kind)})" for of, kind in left_out)
    return con.execute(
        f"""
        WITH counted AS (
            SELECT e.layer, CASE WHEN op = 'alloc' THEN ts_ns ELSE alloc_ts_ns END AS born_ns, bytes,
                   {EVENT_CODE} AS event, {_FOLDED} AS folded
            FROM changes e JOIN lives l USING (source_id, pid)
            WHERE {_chosen(source, layer, pid)}{kinds}
        )
        SELECT layer::VARCHAR AS layer, least({WINDOWS - 1}, greatest(0, (born_ns - {start}) // {step}))::INT AS window,
               coalesce(sum(bytes) FILTER (event = {ALLOC}), 0)::BIGINT AS allocated,
               sum(CASE WHEN event = {ALLOC} THEN bytes ELSE -bytes END)::BIGINT AS kept
        FROM counted WHERE event < {EXIT} OR (event = {EXIT} AND folded) GROUP BY ALL ORDER BY ALL
        """
    ).df()


_FOLDED = f"l.life IN (SELECT life FROM lives WHERE pid = {FOLDED_PID})"


def _chosen(source: int, layer: str | None, pid: int | None) -> str:
    conditions = [f"e.source_id = {int(source)}"]
    if layer is not None:
        conditions.append(f"e.layer = {_text(layer)}")
    if pid is not None:
        conditions.append(f"e.pid = {int(pid)}")
    return " AND ".join(conditions)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"

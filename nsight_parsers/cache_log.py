"""Lives of cache objects as JSON lines: ``ts_ns,op,obj``, and what else their source knows.

``size``, ``owner`` (who acts), ``base`` (what a view keeps), ``parent`` (the block before in the prefix), ``medium``,
``generation``, ``ttl_ns`` (left at ts_ns, negative = never ends) or ``expires_ns``, ``refcount`` (after the event),
``last_access_ns`` (before it), ``stack`` (of who acts; outermost first, ``;`` between), ``hold`` (the number of the
hold that a pin or ref takes and its unpin or unref gives up), ``cause`` (of an unref: ``dropped`` is a handle that was
collected without a release).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from leakscope.model.words import CACHE_OPS, NEVER
from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.arrow import Coded, build_table, not_empty
from nsight_parsers.delimited import read_json_lines
from nsight_parsers.interning import StackInterner
from nsight_parsers.memory_events import named_frames

FIELDS = (
    *("ts_ns", "op", "obj", "size", "owner", "base", "parent", "medium", "generation"),
    *("ttl_ns", "expires_ns", "refcount", "last_access_ns", "stack", "hold", "cause", "count"),
)
WITHOUT_OBJECT = ("insert_fail", "clear", "invalidate", "gap")
MAX_MEDIA = 1_000
MAX_STACKS = 1_000_000
FAR_NS = 2**62

LIMITS = ["an object ends only where its eviction is written; who still needs it is known by its pins and references"]


def parse_cache_log(path: Path | str, *, progress: Callable[[int, int], None] | None = None) -> ParsedReport:
    """Reads the lives of cache objects as ``cache_events``. Raises ReportError for a file without any."""
    path = Path(path)
    table, torn = read_json_lines(path, FIELDS)
    ops = table["op"].to_pandas().map({op: code for code, op in enumerate(CACHE_OPS)}).fillna(-1).to_numpy(np.int64)
    times = _numbers(table, "ts_ns")
    named = _text(table, "obj").to_numpy() != ""
    without_object = np.isin(ops, [CACHE_OPS.index(op) for op in WITHOUT_OBJECT])
    good = (ops >= 0) & np.isfinite(times) & (times > 0) & (times < FAR_NS) & (named | without_object)
    if not good.any():
        raise ReportError(f"{path}: no cache event in it that can be read")
    rows = np.flatnonzero(good)
    rows = rows[np.argsort(times[rows], kind="stable")]
    kept = table.take(pa.array(rows))
    ts_ns = pd.to_numeric(kept["ts_ns"].to_pandas(), errors="coerce").to_numpy().astype(np.int64)
    refcount = _numbers(kept, "refcount")
    media, medium_names = pd.factorize(_text(kept, "medium"))
    if len(medium_names) > MAX_MEDIA:
        raise ReportError(f"{path}: more than {MAX_MEDIA:,} different media")
    stacks, ids = _stacks(path, _text(kept, "stack"))
    events = build_table(
        "cache_events",
        len(rows),
        ts_ns=ts_ns,
        op=Coded(ops[rows], CACHE_OPS),
        object=pa.array(_text(kept, "obj"), pa.string()),
        size_bytes=_times(kept, "size"),
        medium=Coded(media, list(medium_names)),
        **{name: pa.array(_text(kept, name), pa.string()) for name in ("owner", "base", "parent", "generation")},
        expires_ns=_expiries(kept, ts_ns),
        refcount=np.where(refcount >= 0, refcount, np.nan),
        last_access_ns=_times(kept, "last_access_ns"),
        hold=_times(kept, "hold"),
        user_stack=ids,
    )
    report = ParsedReport(
        not_empty({"cache_events": events}) | stacks.tables(), tool="cache log", clock="relative", limits=list(LIMITS)
    )
    report.findings += _dropped(kept)
    lost = int(_times(kept, "count")[ops[rows] == CACHE_OPS.index("gap")].sum())
    if lost:
        report.findings.append(f"{lost:,} events were lost where they were written")
    left_out = torn + int((~good).sum())
    if left_out:
        report.findings.append(f"{left_out:,} lines are no cache events and are left out")
    return report


def _dropped(table: pa.Table) -> list[str]:
    """What is to be said of handles that were collected without a release: how many, whose, made where."""
    rows = pd.DataFrame({name: _text(table, name) for name in ("cause", "owner", "stack")})
    rows = rows[rows["cause"] == "dropped"]
    if not len(rows):
        return []
    most = rows.groupby(["owner", "stack"], as_index=False).size().nlargest(1, "size")
    owner, stack = str(most["owner"].iloc[0]), str(most["stack"].iloc[0])
    innermost = stack.rsplit(";", 1)[-1] or "an unknown place"
    whose = f"by {owner} " if owner else ""
    return [f"{len(rows):,} handles were dropped without release, most {whose}made in {innermost}"]


def _text(table: pa.Table, name: str) -> pd.Series:
    return table[name].to_pandas().fillna("").astype(str)


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.float64]:
    """NaN where there is none."""
    numbers = pd.to_numeric(table[name].to_pandas(), errors="coerce").to_numpy(np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _times(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    """Whole numbers; 0 where there is none or a negative one."""
    numbers = pd.to_numeric(table[name].to_pandas(), errors="coerce", dtype_backend="numpy_nullable")
    if numbers.dtype == "Int64":  # exact beyond 2**53, missing ones or not
        return np.clip(numbers.fillna(0).to_numpy(np.int64), 0, FAR_NS)
    return np.clip(np.nan_to_num(numbers.to_numpy(np.float64, na_value=np.nan), nan=0.0), 0, FAR_NS).astype(np.int64)


def _expiries(table: pa.Table, ts_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``expires_ns``, where it is not given ``ts_ns + ttl_ns``; 0 where neither is, NEVER where either is negative."""
    at, left = _numbers(table, "expires_ns"), _numbers(table, "ttl_ns")
    never = (at < 0) | (np.isnan(at) & (left < 0))
    from_ttl = np.isnan(at) & (left >= 0)
    expires = _times(table, "expires_ns")
    expires[from_ttl] = np.minimum(ts_ns[from_ttl] + np.clip(left[from_ttl], 0, FAR_NS - 1).astype(np.int64), FAR_NS)
    expires[never] = NEVER
    return expires


def _stacks(path: Path, texts: pd.Series) -> tuple[StackInterner, npt.NDArray[np.int64]]:
    codes, different = pd.factorize(texts)
    if len(different) > MAX_STACKS:
        raise ReportError(f"{path}: more than {MAX_STACKS:,} different stacks; split the file")
    stacks = StackInterner()
    ids = [
        stacks.add(list(named_frames([name.strip() for name in text.split(";")], "python"))) if text.strip() else 0
        for text in different
    ]
    return stacks, np.array(ids, np.int64)[codes]

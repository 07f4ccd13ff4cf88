"""Lives of cache objects as JSON lines: ``ts_ns,op,obj,size,owner[,base]``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.arrow import Coded, build_table, not_empty
from nsight_parsers.delimited import read_json_lines

FIELDS = ("ts_ns", "op", "obj", "size", "owner", "base")
OPS = ("insert", "evict", "pin", "unpin", "ref", "unref", "view", "insert_fail")
MAX_OWNERS = 30_000

LIMITS = ["an object ends only where its eviction is written; who still needs it is known by its pins and references"]


def parse_cache_log(path: Path | str, *, progress: Callable[[int, int], None] | None = None) -> ParsedReport:
    """Reads the lives of cache objects as ``cache_events``. Raises ReportError for a file without any."""
    path = Path(path)
    table, torn = read_json_lines(path, FIELDS)
    columns = {name: table[name].to_pandas() for name in FIELDS}
    ops = columns["op"].map({op: code for code, op in enumerate(OPS)}).fillna(-1).to_numpy(np.int64)
    times = pd.to_numeric(columns["ts_ns"], errors="coerce").to_numpy(np.float64)
    sizes = pd.to_numeric(columns["size"], errors="coerce").fillna(0).to_numpy(np.float64)
    objects = columns["obj"].fillna("").astype(str)
    good = (ops >= 0) & np.isfinite(times) & (times > 0) & (times < 2**62) & np.isfinite(sizes)
    good &= ((objects != "") | (ops == OPS.index("insert_fail"))).to_numpy()
    if not good.any():
        raise ReportError(f"{path}: no cache event in it that can be read")
    rows = np.flatnonzero(good)
    rows = rows[np.argsort(times[rows], kind="stable")]
    owners, owner_names = pd.factorize(columns["owner"].fillna("").astype(str).to_numpy()[rows])
    if len(owner_names) > MAX_OWNERS:
        raise ReportError(f"{path}: more than {MAX_OWNERS:,} different owners")
    events = build_table(
        "cache_events",
        len(rows),
        ts_ns=pd.to_numeric(columns["ts_ns"].to_numpy()[rows], errors="coerce").astype(np.int64),
        op=Coded(ops[rows], OPS),
        object=list(objects.to_numpy()[rows]),
        size_bytes=np.clip(sizes[rows], 0, 2**62).astype(np.int64),
        owner=Coded(owners, list(owner_names)),
        base=list(columns["base"].fillna("").astype(str).to_numpy()[rows]),
    )
    report = ParsedReport(not_empty({"cache_events": events}), tool="cache log", clock="relative", limits=list(LIMITS))
    left_out = torn + int((~good).sum())
    if left_out:
        report.findings.append(f"{left_out:,} lines are no cache events and are left out")
    return report

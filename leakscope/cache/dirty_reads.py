"""Dirty reads: a block that was freed, reused or written while another stream still read it.

The hazard of stream-ordered caches: without an event or ``record_stream`` the allocator gives a block out again at
once, while the kernel that reads it has not run yet.
"""

from __future__ import annotations

import pandas as pd

from leakscope.cache.inconsistency import Checked, Inconsistency

BEGIN, END = "read_begin", "read_end"
TAKES = ("free", "reuse", "write")


def dirty_reads(path: str, log: pd.DataFrame, left_out: int = 0) -> Checked:
    """Blocks taken (op free, reuse, write) on one stream while reads of another were open.

    ``log``: ts_ns Int64, op (read_begin, read_end, free, reuse, write), block, stream (text). A read is open between
    its begin and its end on the same stream; ends without a begin belong to reads from before the log.
    """
    known = log["op"].isin([BEGIN, END, *TAKES]) & log["block"].notna()
    rows = log[known].sort_values("ts_ns", kind="stable", ignore_index=True)  # of one time: as they were written
    rows["delta"] = rows["op"].map({BEGIN: 1, END: -1}).fillna(0).astype("int64")
    own = rows.groupby(["block", "stream"], sort=False)["delta"]
    level = own.cumsum()
    # ends without a begin lower the count for good: measure it from its lowest so far
    lowest = level.groupby([rows["block"], rows["stream"]], sort=False).cummin().clip(upper=0)
    rows["open_own"] = level - lowest
    change = rows.groupby(["block", "stream"], sort=False)["open_own"].diff().fillna(rows["open_own"])
    rows["open_others"] = change.groupby(rows["block"], sort=False).cumsum() - rows["open_own"]
    taken = rows[rows["op"].isin(TAKES)]
    dirty = taken[taken["open_others"] > 0]
    found = []
    for op, of_op in dirty.groupby("op", sort=True):
        first = of_op.iloc[0]
        before = rows[(rows["block"] == first["block"]) & (rows.index < of_op.index[0])]
        last = before.groupby("stream")["open_own"].last()
        readers = sorted(last.index[(last > 0).to_numpy() & (last.index != first["stream"])])
        sides = {f"stream {first['stream']}": f"{op} at {first['ts_ns']} ns"}
        for reader in readers[:8]:
            begin = before[(before["stream"] == reader) & (before["op"] == BEGIN)]["ts_ns"].iloc[-1]
            sides[f"stream {reader}"] = f"reads since {begin} ns"
        what = f"a block's {op} while another stream read it; record an event or the stream before giving it away"
        found.append(Inconsistency("dirty read", f"block {first['block']}", what, sides, len(of_op)))
    unpaired = int((-lowest.groupby([rows["block"], rows["stream"]], sort=False).last()).sum())
    facts = {"events": len(rows), "blocks": int(rows["block"].nunique()), "taken": len(taken)}
    facts |= {"reads that end without a begin": unpaired, "left out": left_out + len(log) - len(rows)}
    return Checked("dirty reads", (path,), facts, tuple(found))

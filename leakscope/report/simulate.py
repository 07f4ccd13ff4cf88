"""What ``leakscope cache simulate`` prints: one line a policy and capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leakscope.cache.simulate import Replay
from leakscope.cache.traces import Trace
from leakscope.quantities import counted, size
from leakscope.report.text import printable

UNORDERED = "references are earlier than one before them and count as simultaneous with it"
NOTES = (
    "bound: no policy that inserts what it misses can miss less",
    "lru-K: by the K-th last use, forgotten with the eviction; -history: remembered",
    "decayed: uses × e^(−decay · minutes since the last); lrfu: each use ages by itself",
)


def print_replays(console: Console, path: str, trace: Trace, replays: Sequence[Replay], by_bytes: bool) -> None:
    """The trace in one line, then the table; the bound of each capacity stands beside the figures."""
    span = trace.times_s[-1] - trace.times_s[0]
    what = f"{trace.form}, {counted(len(trace.objects), 'reference')} to {counted(trace.distinct, 'object')}"
    console.print(Text(printable(f"{path}: {what} in {span:,.0f} s")), soft_wrap=True)
    for count, said in ((trace.left_out, "lines cannot be read and are left out"), (trace.unordered, UNORDERED)):
        if count:
            console.print(Text(f"  {count:,} {said}", "yellow"), soft_wrap=True)
    usable = any(replay.usable_misses is not None for replay in replays)
    stale = any(replay.stale for replay in replays)
    names = ["capacity", "policy", "misses", *(["unusable"] if usable else []), "missed bytes"]
    names += [*(["stale"] if stale else []), "evictions"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    last = None
    for replay in replays:
        row = ["" if replay.capacity == last else _capacity(replay.capacity, by_bytes)]
        row.append(f"{replay.policy} (bound)" if replay.bound else replay.policy)
        row.append(f"{replay.miss_ratio:.4f}")
        if usable:
            row.append("" if replay.usable_misses is None else f"{replay.usable_misses / replay.requests:.4f}")
        row.append(f"{replay.byte_miss_ratio:.4f}")
        if stale:
            row.append(f"{replay.stale_ratio:.4f}")
        table.add_row(*row, f"{replay.evictions:,}")
        last = replay.capacity
    console.print(table)
    for note in (*NOTES, *(["unusable: missed, or after a miss in the same request"] if usable else [])):
        console.print(Text(note, "dim"), soft_wrap=True)


def _capacity(capacity: float, by_bytes: bool) -> str:
    if math.isinf(capacity):
        return "∞"
    return size(capacity) if by_bytes else f"{capacity:,.0f}"

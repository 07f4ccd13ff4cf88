"""What ``leakscope cache ttl`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leakscope.cache.ttl import Lifetimes
from leakscope.quantities import exact
from leakscope.report.stores import MAX_GROUPS, span
from leakscope.report.text import printable


def print_lifetimes(console: Console, found: Sequence[Lifetimes]) -> None:
    """A line of shares, then the groups that keep most without a TTL, for each source."""
    for of in found:
        everything = of.all_keys
        console.print(Text(printable(f"{of.source}: {everything.keys} objects, {everything.bytes} B"), "bold"))
        said = f"  no TTL: {everything.without_ttl} ({of.missing_share:.1%} of the bytes)"
        said += f", of these idle for 7 days: {everything.stale}, {everything.stale_bytes} B"
        console.print(Text(said), soft_wrap=True)
        console.print(Text(f"  past their TTL and still there: {_past(of)}"), soft_wrap=True)
        if of.unknown:
            console.print(Text(f"  {of.unknown:,} objects whose TTL nobody told", "yellow"))
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("  key or owner", overflow="fold")
        for name in ("objects", "bytes", "no TTL", "bytes", "idle 7 d", "longest idle"):
            table.add_column(name, justify="right", no_wrap=True)
        for group in of.groups[:MAX_GROUPS]:
            cells = (group.keys, group.bytes, group.without_ttl, group.without_ttl_bytes, group.stale)
            table.add_row(printable(f"  {group.pattern or '(none)'}"), *map(str, cells), span(group.idle_s))
        console.print(table)
        if len(of.groups) > MAX_GROUPS:
            console.print(Text(f"  and {len(of.groups) - MAX_GROUPS:,} more", "dim"))


def _past(of: Lifetimes) -> str:
    if of.past is None:
        return "cannot be told"
    size = f", {exact(of.past_bytes)}" if of.past_bytes else ""
    return f"{'up to ' if of.store else ''}{of.past:,} ({of.past_share or 0:.2%} of the objects{size})"

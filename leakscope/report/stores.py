"""Audits of key-value stores as text: keys by pattern, the largest ones, the memory's parts, the audit's cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from leakscope.model.stores import Figure, KeyGroup, StoreAudit
from leakscope.quantities import counted, exact, size
from leakscope.report.text import printable

MAX_GROUPS = 10
MAX_LARGEST = 3


def store_lines(audit: StoreAudit) -> Iterator[str]:
    """What stands around the table of patterns, safe for a terminal."""
    part = "all" if audit.complete else f"{audit.scanned / max(1, audit.total):.1%}: figures are estimates, ± 95 %"
    yield printable(f"{audit.source}: {audit.scanned:,} of {audit.total:,} keys read ({part}); {cost_of(audit.cost)}")
    if audit.zombies:
        yield f"up to {counted(audit.zombies, 'key')} past their TTL were still there"
    for name, bytes_, kind in audit.largest[:MAX_LARGEST]:
        yield printable(f"large: {f'{kind} ' if kind else ''}{name} {exact(bytes_)}")
    if audit.resident_bytes:
        yield f"resident {exact(audit.resident_bytes)}, made of:"
        for what, bytes_ in audit.memory:
            yield f"  {what} {exact(bytes_)}"


def cost_of(cost: dict[str, float]) -> str:
    """What the audit cost the server, in words."""
    if not cost:
        return "cost unknown"
    text = f"{cost.get('commands', 0):,.0f} commands in {cost.get('seconds', 0):.1f} s"
    cpu = cost.get("server_cpu_s")
    return text if cpu is None else f"{text}, the server's CPU in that time {cpu:.2f} s"


def groups_table(audit: StoreAudit) -> Table:
    """Keys by pattern, those that keep most without a TTL first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("keys", overflow="fold", ratio=1)
    for name in ("number", "bytes", "no TTL", "of these", "idle 7 d", "longest"):
        table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
    for group in _shown(audit.groups):
        table.add_row(
            printable(group.pattern),
            str(group.keys),
            _bytes(group.bytes),
            str(group.without_ttl),
            _bytes(group.without_ttl_bytes),
            str(group.stale),
            span(group.idle_s),
        )
    return table


def span(seconds: float) -> str:
    """``45 s``, ``12 min``, ``30 h``, ``9 days``."""
    for unit, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _shown(groups: Sequence[KeyGroup]) -> Sequence[KeyGroup]:
    return groups[:MAX_GROUPS]


def _bytes(figure: Figure) -> str:
    return size(figure.value) + (f" ± {size(figure.error)}" if figure.error else "")

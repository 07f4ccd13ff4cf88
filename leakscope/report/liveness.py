"""What ``leakscope liveness`` found, on a terminal and as JSON.

Everything that comes from evidence is untrusted text and is printed with its control characters escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leakscope.model.liveness import CLASSES, SCHEMA, Keeper, Liveness, Pool, SourceLiveness, Stale, Step, Why
from leakscope.quantities import counted, size
from leakscope.report.text import printable

if TYPE_CHECKING:
    from leakscope.liveness.graph import Graph

_BAD = frozenset({"held-stale", "zombie", "immortal"})
_MAX_FRAMES = 4


def liveness_json(found: Liveness, graph: Graph) -> dict[str, Any]:
    """``found`` as one object of schema ``leakscope-liveness/1``, plain JSON types.

    Keys: schema, sources (classes, rules of the classic scheme, windows, pools, notes), keepers, stale, whys (of what
    was asked for), suspects (the same of the leading stale ones), nodes and edges (counts by kind), graph (node-link,
    None where it has too many nodes), inputs.
    """
    from leakscope.report.liveness_graph import graph_json

    sources = []
    for source in found.sources:
        row = asdict(source) | {"rules": source.rules.to_json() if source.rules else None}
        row["classes"] = {
            c.name: {"objects": c.objects, "bytes": c.bytes, "share": round(c.share, 6)} for c in source.classes
        }
        row["windows"] = [
            {"t_s": round(w.t_s, 3), "bytes": dict(zip(CLASSES, w.bytes, strict=True)),
             "objects": dict(zip(CLASSES, w.objects, strict=True))}
            for w in source.windows
        ]  # fmt: skip
        row["pools"] = [asdict(pool) | {"fragmentation": round(pool.fragmentation, 6)} for pool in source.pools]
        sources.append(row)
    return {
        "schema": SCHEMA,
        "sources": sources,
        "keepers": [asdict(keeper) for keeper in found.keepers],
        "stale": [asdict(stale) for stale in found.stale],
        "whys": [asdict(why) for why in found.whys],
        "suspects": [asdict(why) for why in found.suspects],
        "nodes": found.nodes,
        "edges": found.edges,
        "graph": graph_json(graph),
        "inputs": found.inputs,
    }


def print_liveness(console: Console, found: Liveness, top: int = 20) -> None:
    """Print ``found``: the classes of each source, who retains most, what is stale, and what was asked for."""
    for why in found.whys:
        _why(console, why)
    if not found.sources:
        console.print(
            "no objects: the evidence has neither cache events, nor a snapshot, nor allocations that are kept"
        )
    for source in found.sources:
        _source(console, source)
    _keepers(console, found.keepers[:top])
    _stale(console, found.stale[:top])
    if found.sources:
        parts = [counted(count, kind) for kind, count in found.nodes.items() if kind != "root"]
        console.print(Text(f"graph: {', '.join(parts)}; {sum(found.edges.values()):,} edges", "dim"))


def plain_lines(found: Liveness, width: int, top: int = 20) -> Iterable[str]:
    """The report as lines of plain text ``width`` columns wide."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        print_liveness(console, found, top)
    return [line.rstrip() for line in captured.get().splitlines()]


def _source(console: Console, source: SourceLiveness) -> None:
    objects, total = sum(c.objects for c in source.classes), sum(c.bytes for c in source.classes)
    head = Text(printable(source.source), "bold")
    head.append(f"  {source.kind}: {counted(objects, 'object')}, {_size(total)}")
    console.print(head)
    table = _table("class", ">objects", ">share", ">bytes")
    for row in source.classes:
        if row.objects:
            style = "bold red" if row.name in _BAD else ""
            table.add_row(Text(row.name, style), f"{row.objects:,}", f"{row.share:.1%}", _size(row.bytes, total))
    console.print(table)
    _indented(console, f"stale: longer than {_time(source.stale_after_s)} ({source.stale_because})", "dim")
    _windows(console, source)
    _rules(console, source)
    for pool in source.pools:
        _pool(console, pool)
    for note in source.notes:
        _indented(console, note, "yellow")
    console.print()


def _windows(console: Console, source: SourceLiveness) -> None:
    """Bytes of each class over time, objects where no sizes are known."""
    windows = source.windows
    if len(windows) < 2:
        return
    by_bytes = any(any(window.bytes) for window in windows)
    rows = [window.bytes if by_bytes else window.objects for window in windows]
    columns = [i for i in range(len(CLASSES)) if any(row[i] for row in rows)]
    table = _table(">at", *(f">{CLASSES[i]}" for i in columns))
    for window, row in zip(windows, rows, strict=True):
        table.add_row(_time(window.t_s), *(size(row[i]) if by_bytes else f"{row[i]:,}" for i in columns))
    console.print(table)


def _rules(console: Console, source: SourceLiveness) -> None:
    rules = source.rules
    if rules is None:
        return
    of = max(1, rules.objects)
    _indented(
        console,
        f"classic scheme (scan 500 ms, TTL not ended and references > 0): looks at {rules.looked_at:,} of "
        f"{rules.objects:,}; strong (≥ 2 references, used within 1 s) {rules.strong / of:.1%}, weak (1 reference, "
        f"TTL < 10 s) {rules.weak / of:.1%}, no class {rules.without_class:,} ({size(rules.without_class_bytes)}); "
        f"does not see {rules.expired:,} expired, {rules.unreferenced:,} unreferenced, {rules.unknown:,} of unknown "
        f"count ({size(rules.hidden_bytes)})",
        "dim",
    )


def _pool(console: Console, pool: Pool) -> None:
    _indented(
        console,
        f"device {pool.device}, pool {pool.pool or '?'}: {size(pool.reserved_bytes)} reserved in "
        f"{counted(pool.segments, 'segment')}, {size(pool.active_bytes)} in use, {size(pool.pending_bytes)} freed but "
        f"waiting for a stream, {size(pool.free_bytes)} free ({size(pool.free_split_bytes)} in segments partly in "
        f"use, the largest piece {size(pool.largest_free_bytes)}; fragmentation {pool.fragmentation:.0%})",
    )


def _keepers(console: Console, keepers: list[Keeper]) -> None:
    if not keepers:
        return
    table = _table("who keeps it alive", ">retains", ">holds", ">objects", ">stale", ">stale bytes", ">oldest")
    for keeper in keepers:
        name = Text(printable(keeper.name))
        for frame in keeper.stack[-_MAX_FRAMES:][::-1]:
            name.append(f"\n  {printable(frame)}", "dim")
        table.add_row(
            name,
            _size(keeper.retained_bytes, keeper.retained_bytes + keeper.bytes),
            _size(keeper.bytes, keeper.retained_bytes + keeper.bytes),
            f"{keeper.objects:,}",
            Text(f"{keeper.stale_objects:,}" if keeper.stale_objects else "", "bold red"),
            _size(keeper.stale_bytes, keeper.retained_bytes + keeper.bytes) if keeper.stale_objects else "",
            "" if keeper.oldest_s is None else _time(keeper.oldest_s),
        )
    console.print(table)
    console.print()


def _stale(console: Console, rows: list[Stale]) -> None:
    if not rows:
        return
    table = _table("stale, by bytes × age", "class", ">bytes", ">objects", ">age", "held by", "known by")
    for row in rows:
        name = Text(printable(row.name))
        for frame in row.stack[-_MAX_FRAMES:][::-1]:
            name.append(f"\n  {printable(frame)}", "dim")
        if len(row.cohorts) > 1:
            ages = ", ".join(f"{_time(age)}+: {size(bytes_)}" for age, _, bytes_ in row.cohorts)
            name.append(f"\n  {ages}", "dim")
        evidence = row.evidence + (" (approximate)" if row.approximate and row.kind == "site" else "")
        table.add_row(
            name, row.cls, _size(row.bytes), f"{row.objects:,}", _time(row.age_s), printable(row.holder), evidence
        )
    console.print(table)
    console.print()


def _why(console: Console, why: Why) -> None:
    head = Text(printable(why.name), "bold")
    head.append(f"  {why.cls or 'keeps others'}, {size(why.bytes)}, retains {size(why.retained_bytes)}")
    console.print(head)
    alone = f"{printable(why.dominator)} alone" if why.dominator else "no one alone: several ways lead to it"
    _indented(console, f"kept by {counted(why.keepers, 'keeper')}; could be let go by {alone}")
    for path in why.paths:
        _indented(console, " → ".join(_step(step) for step in path), "cyan")
        for step in path:
            for frame in step.stack[-_MAX_FRAMES:][::-1]:
                _indented(console, f"    {frame}", "dim")
    console.print()


def _step(step: Step) -> str:
    facts = [step.edge] if step.edge else []
    facts += [f"×{step.count:,}"] if step.count > 1 else []
    facts += [f"for {_time(step.held_s)}"] if step.held_s is not None else []
    return (f"[{' '.join(facts)}] " if facts else "") + f"{step.kind} {step.name}"


def _size(value: int, known: int | None = None) -> str:
    """Bytes; ``?`` where no sizes are known, which is when ``known`` (default: the value) is 0."""
    return size(value) if (value if known is None else known) else "?"


def _time(seconds: float) -> str:
    """``1.5 s``, ``12 min``, ``3.2 h``, ``2.0 d``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def _indented(console: Console, text: str, style: str = "") -> None:
    for line in wrap(printable(text), max(20, console.width - 3), break_on_hyphens=False):
        console.print(Text(f"   {line}", style))

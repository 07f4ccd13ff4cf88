"""What ``leakscope cache consistency`` and ``leakscope cache graphs`` print."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leakscope.cache.graphs import Correlation, GraphLaunches
from leakscope.cache.inconsistency import Checked
from leakscope.quantities import counted
from leakscope.report.text import printable


def print_checks(console: Console, checks: Sequence[Checked]) -> None:
    """The answer first, then each check with what it looked at, and the parties of each finding."""
    found = sum(len(check.found) for check in checks)
    answer = f"INCONSISTENT  {counted(found, 'finding')}" if found else "CONSISTENT  nothing found"
    console.print(Text(answer, "bold red" if found else "bold green"))
    for check in checks:
        facts = ", ".join(f"{number:,} {what}" for what, number in check.facts.items() if number or what != "left out")
        console.print()
        console.print(Text(printable(f"{check.check}: {', '.join(check.inputs)}"), "bold"), soft_wrap=True)
        console.print(Text(f"  {facts}"), soft_wrap=True)
        for one in check.found:
            times = f", {one.count:,} times" if one.count > 1 else ""
            console.print(Text(printable(f"  {one.kind} at {one.where}{times}: {one.what}"), "red"), soft_wrap=True)
            for side, did in one.sides.items():
                console.print(Text(printable(f"    {side}: {did}")), soft_wrap=True)
        for limit in check.limits:
            console.print(Text(f"  {limit}", "dim"), soft_wrap=True)


def print_graphs(console: Console, found: GraphLaunches) -> None:
    """Latencies in one line, a line a quantity."""
    of = f" of {counted(found.graphs, 'graph')}" if found.graphs else ""
    figures = ", ".join(f"{name} {value:,.1f} µs" for name, value in found.latency_us.items())
    text = f"{found.path}: {found.launches:,} launches{of}, latency {figures}"
    console.print(Text(printable(text)), soft_wrap=True)
    if found.left_out:
        console.print(Text(f"  {found.left_out:,} lines cannot be read and are left out", "yellow"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("latency against", "verdict", "Spearman", "95 % interval", "partial", "slope"):
        table.add_column(name, justify="left" if name in ("latency against", "verdict") else "right")
    for one in found.correlations:
        interval = "" if one.low is None or one.high is None else f"{one.low:+.2f} … {one.high:+.2f}"
        table.add_row(one.quantity, one.verdict, _signed(one.spearman), interval, _signed(one.partial), _slope(one))
    console.print(table)
    for one in found.correlations:
        if one.why_not:
            console.print(Text(printable(f"{one.quantity}: {one.why_not}"), "yellow"), soft_wrap=True)
    console.print(Text("partial: with the other quantity held still; a correlation is no cause", "dim"))


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def _slope(one: Correlation) -> str:
    return "" if one.slope_us is None else f"{one.slope_us:.3g} µs a unit"

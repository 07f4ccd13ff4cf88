"""A soak on a terminal: a live screen, or lines where there is no terminal, and what the final report adds."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leakscope.model.soak import CounterState, Happening, Look, SoakState, SoakSummary
from leakscope.quantities import counted, rate, size
from leakscope.report.forecast import duration, forecast_line
from leakscope.report.text import printable

_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"leak": "bold red", "inconclusive": "yellow", "not_leak": "green"}
_WORDS = {"leak": "LEAK", "inconclusive": "cannot tell", "not_leak": "no leak"}
LINE_EVERY_S = 600.0
"""Without a terminal: a line of figures so often, beside one for each look and happening."""


def clock(seconds: float) -> str:
    """``71:59:30``."""
    whole = int(max(0.0, seconds))
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def sparkline(values: Sequence[float]) -> str:
    """A bar a value, from the least to the greatest; flat where they are the same."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(7, int((v - low) / (high - low) * 8))] for v in values)


def look_line(look: Look) -> str:
    """One interim verdict in one line."""
    verdict = look.verdict
    what = _WORDS[verdict.verdict]
    if verdict.verdict == "leak" and not look.alarm:
        what = "may leak, not sure yet"
    grows = f": {verdict.growth.counter} {rate(verdict.growth.bytes_per_s)}" if verdict.growth else ""
    since = f", since the look at {duration(look.candidate_since_s)}" if look.candidate_since_s is not None else ""
    return f"{'ALARM  ' if look.alarm else ''}{what} ({verdict.kind}){grows}{since}"


class SoakScreen:
    """Shows the states of a soak on ``stream``; a context manager."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        )
        self._told: set[Happening] = set()
        self._looks = 0
        self._alarmed = False
        self._line_at_s = 0.0

    def __enter__(self) -> SoakScreen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line of its own, above the screen."""
        self._console.print(Text(f"leakscope: {printable(text)}"), soft_wrap=True)

    def update(self, state: SoakState) -> None:
        """Show how things stand."""
        if self._live is not None:
            self._live.update(soak_view(state), refresh=True)
            return
        for line in self._lines(state):
            self.say(line)

    def _lines(self, state: SoakState) -> list[str]:
        lines = []
        for happening in state.happenings:
            if happening not in self._told:
                self._told.add(happening)
                lines.append(f"[{clock(happening.elapsed_s)}] {happening.text}")
        if state.look is not None and state.looks != self._looks:
            self._looks = state.looks
            lines.append(f"[{clock(state.look.elapsed_s)}] look {state.looks}: {look_line(state.look)}")
            if state.forecast and state.look.alarm and not self._alarmed:
                lines.append(f"[{clock(state.look.elapsed_s)}] {forecast_line(state.forecast)}")
            self._alarmed = state.look.alarm
        elif state.counters and state.elapsed_s >= self._line_at_s:
            self._line_at_s = state.elapsed_s + LINE_EVERY_S
            figures = "  ".join(f"{one.name} {_value(one)}" for one in state.counters[:4])
            lines.append(f"[{clock(state.elapsed_s)}] {_processes(state.processes)}{figures}")
        return lines


def _processes(alive: int) -> str:
    return f"{alive:,} process{'' if alive == 1 else 'es'}  " if alive else ""


def _value(counter: CounterState) -> str:
    return size(counter.value) if counter.in_bytes else f"{counter.value:,.0f}"


def soak_view(state: SoakState) -> RenderableType:
    """The screen: who is watched and for how long, counters with their course, the last look, forecast, happenings."""
    head = Text("leakscope soak  ", "bold")
    head.append(printable(state.target))
    head.append(f"  {clock(state.elapsed_s)} of {clock(state.duration_s)}", "bold")
    if state.scale is not None:
        head.append("  replay", "dim")
    parts: list[RenderableType] = [head]
    alive = f"{_processes(state.processes)}alive" if state.processes else "no process alive"
    facts = [alive] if state.scale is None or state.processes else []
    facts += [f"restarted {counted(state.generations - 1, 'time')}"] if state.generations > 1 else []
    facts += [f"{state.lost:,} events lost"] if state.lost else []
    if facts:
        parts.append(Text(", ".join(facts), "dim"))
    if state.counters:
        table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
        table.add_column("counter")
        table.add_column("now", justify="right")
        table.add_column("last hour", justify="right")
        table.add_column("so far", no_wrap=True, overflow="crop")
        for one in state.counters:
            change = "" if one.last_hour is None else size(one.last_hour) if one.in_bytes else f"{one.last_hour:,.0f}"
            table.add_row(printable(one.name), _value(one), change, sparkline(one.course))
        parts.append(table)
    if state.look is not None:
        line = Text().append(f"look {state.looks} at {clock(state.look.elapsed_s)}: ", "dim")
        line.append(printable(look_line(state.look)), _STYLES[state.look.verdict.verdict] if state.look.alarm else "")
        parts.append(line)
    elif state.next_look_s is not None:
        parts.append(Text(f"first look at {clock(state.next_look_s)}", "dim"))
    if state.forecast:
        parts.append(Text(forecast_line(state.forecast), "bold"))
    parts += [Text(f"{clock(one.elapsed_s)}  {printable(one.text)}", "dim") for one in state.happenings]
    parts.append(Text(f"Ctrl-C ends it with a report; {printable(state.output)}", "dim"))
    return Group(*parts)


def ended_because(ended_by: str) -> str:
    """Why a soak ended, in words."""
    return {
        "duration": "the time was up",
        "signal": "interrupted",
        "target": "the target ended",
        "end": "the last reading",
    }.get(ended_by, ended_by)


def print_soak(console: Console, summary: SoakSummary) -> None:
    """How the soak went: after the report of its evidence."""
    console.print()
    console.print(Text("the soak", "bold"))
    reason = ended_because(summary.ended_by)
    console.print(f"  {duration(summary.elapsed_s)} of {printable(summary.target)} ({reason})", markup=False)
    parts = [counted(summary.sources, "recording")] if summary.sources > 1 else []
    parts += [f"restarted {counted(summary.generations - 1, 'time')}"] if summary.generations > 1 else []
    if summary.looks:
        parts.append(
            f"{counted(len(summary.looks), 'look')}, {summary.total_alpha:.0%} of false alarms at most in all of them"
        )
    if parts:
        console.print(f"  {', '.join(parts)}", markup=False)
    first = summary.first_alarm
    if first is not None:
        console.print(
            Text(f"  first alarm after {duration(first.elapsed_s)}: {printable(look_line(first))}", "bold red")
        )
    elif summary.looks:
        console.print("  no look alarmed", markup=False)
    if summary.forecast:
        console.print(Text(f"  {forecast_line(summary.forecast)}", "bold"))
    for one in summary.happenings:
        console.print(Text(f"  {clock(one.elapsed_s)}  {printable(one.text)}", "dim"))

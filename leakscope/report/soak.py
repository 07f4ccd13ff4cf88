"""A soak on a terminal: a live screen, or lines where there is no terminal, and what the final report adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from leakscope.model.live import Track
from leakscope.model.soak import CounterState, Happening, Look, SoakState, SoakSummary
from leakscope.quantities import counted, rate, size
from leakscope.report.forecast import duration, forecast_line
from leakscope.report.live.names import SiteNames
from leakscope.report.live.screen import Screen
from leakscope.report.live.view import clock, fitted, footer, heading, line, losses_line
from leakscope.report.text import printable

HOUR_S = 3600.0
_STYLES = {"leak": "bold red", "inconclusive": "yellow", "not_leak": "green"}
_WORDS = {"leak": "LEAK", "inconclusive": "cannot tell", "not_leak": "no leak"}
LINE_EVERY_S = 600.0
"""Without a terminal: a line of figures so often, beside one for each look and happening."""


def look_line(look: Look) -> str:
    """One interim verdict in one line."""
    verdict = look.verdict
    what = _WORDS[verdict.verdict]
    if verdict.verdict == "leak" and not look.alarm:
        what = "may leak, not sure yet"
    grows = f": {verdict.growth.counter} {rate(verdict.growth.bytes_per_s)}" if verdict.growth else ""
    since = f", since the look at {duration(look.candidate_since_s)}" if look.candidate_since_s is not None else ""
    return f"{'ALARM  ' if look.alarm else ''}{what} ({verdict.kind}){grows}{since}"


class Keys(Protocol):
    """Where keys are pressed."""

    @property
    def listening(self) -> bool:
        """Whether keys are read."""

    @property
    def in_background(self) -> bool:
        """Whether the terminal is another job's now."""

    def open(self) -> None:
        """Begin to listen."""

    def wait(self, seconds: float) -> str:
        """A key that was pressed within so many seconds, else ''."""

    def close(self) -> None:
        """Stop to listen."""


class SoakScreen:
    """Shows the states of a soak on ``stream``; a context manager. ``on_quit`` is called where `q` is pressed."""

    def __init__(
        self, stream: TextIO, how: str = "auto", keys: Keys | None = None, line_every_s: float = LINE_EVERY_S
    ) -> None:
        """:param how: live, lines or none; auto: live on a terminal."""
        self._screen = Screen(stream)
        self.how = how if how != "auto" else "live" if self._screen.console.is_terminal else "lines"
        self._keys = keys
        self._names = SiteNames()
        self._line_every_s = line_every_s
        self._paused: SoakState | None = None
        self.on_quit: Callable[[], None] = lambda: None
        self._told: set[Happening] = set()
        self._looks = 0
        self._alarmed = False
        self._line_at_s = 0.0

    def __enter__(self) -> SoakScreen:
        if self._keys is not None:
            self._keys.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keys is not None:
            self._keys.close()
        self._screen.close()

    def say(self, text: str) -> None:
        """A line of its own, above the screen."""
        self._screen.console.print(Text(f"leakscope: {printable(text)}"), soft_wrap=True)

    def update(self, state: SoakState) -> None:
        """Show how things stand, and do what was pressed."""
        if self.how == "live":
            self._show(state)
        elif self.how == "lines":
            for said in self._lines(state):
                self.say(said)

    def _show(self, state: SoakState) -> None:
        key = self._keys.wait(0) if self._keys is not None else ""
        if key == "q":
            self.on_quit()
        elif key == "p":
            self._paused = None if self._paused else state
        shown = self._paused or state
        if shown.live is not None:
            shown = replace(shown, live=replace(shown.live, sites=self._names.named(shown.live.sites)))
        keys = self._keys is not None and self._keys.listening
        if self._keys is not None and self._keys.in_background:
            self._screen.forget()
            return
        self._screen.show(partial(soak_view, replace(shown, paused=self._paused is not None, keys=keys)))

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
            self._line_at_s = state.elapsed_s + self._line_every_s
            figures = "  ".join(f"{one.name} {_value(one)}" for one in state.counters[:4])
            lines.append(f"[{clock(state.elapsed_s)}] {_processes(state.processes)}{figures}")
        return lines


def _processes(alive: int) -> str:
    return f"{alive:,} process{'' if alive == 1 else 'es'}  " if alive else ""


def _value(counter: CounterState) -> str:
    return size(counter.value) if counter.in_bytes else f"{counter.value:,.0f}"


def soak_view(state: SoakState, width: int, height: int, ascii_only: bool = False) -> RenderableType:
    """The screen in at most ``width`` columns and ``height`` lines: who is watched and for how long, the last look and
    forecast, counters with their course, the sites that grow, what happened."""
    head = heading("soak", state.elapsed_s, state.duration_s, state.target, paused=state.paused)
    if state.scale is not None:
        head.append("  replay", "dim")
    parts: list[RenderableType] = [head]
    alive = f"{_processes(state.processes)}alive" if state.processes else "no process alive"
    facts = [alive] if state.scale is None or state.processes else []
    facts += [f"restarted {counted(state.generations - 1, 'time')}"] if state.generations > 1 else []
    facts += [f"{state.lost:,} events lost"] if state.lost else []
    if state.live is not None:
        facts.append(f"disk {size(state.live.disk_bytes)}")
    if facts:
        parts.append(line(", ".join(facts), "dim"))
    if state.live is not None:
        parts.append(losses_line(state.live.losses))
    if state.look is not None:
        look = line("").append(f"look {state.looks} at {clock(state.look.elapsed_s)}: ", "dim")
        style = _STYLES[state.look.verdict.verdict] if state.look.alarm else ""
        parts.append(look.append(printable(look_line(state.look)), style))
    elif state.next_look_s is not None:
        parts.append(line(f"first look at {clock(state.next_look_s)}", "dim"))
    if state.forecast:
        parts.append(line(forecast_line(state.forecast), "bold"))
    happened = [line(f"{clock(one.elapsed_s)}  {printable(one.text)}", "dim") for one in state.happenings]
    tracks = [Track(one.name, one.value, one.last_hour, HOUR_S, one.course, one.in_bytes) for one in state.counters]
    return fitted(
        parts, tracks, state.live, footer(state.keys, state.output), width, height, ascii_only, extras=happened
    )


def ended_because(ended_by: str) -> str:
    """Why a soak ended, in words."""
    return {
        "duration": "the time was up",
        "quit": "you ended it",
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

"""The screen of a recording: pure functions from its state, a width and a height to what rich draws, and to one line.

What does not fit is left out, the least important first; nothing wraps. Texts of captures are untrusted and shown with
their control characters escaped.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from leakscope.model.live import LiveReading, LiveState, Track
from leakscope.model.recording import Loss
from leakscope.quantities import counted, rate, size
from leakscope.report.cells import bare_frame
from leakscope.report.forecast import duration, forecast_line
from leakscope.report.live.course import ASCII_BARS, BARS, sparkline
from leakscope.report.live.names import Leader, leaders
from leakscope.report.recording import QUIET_LOSSES
from leakscope.report.text import printable

WIDE, NARROW = 120, 60
"""Columns from which on a site's kind and range have their own, and below which only the gain is shown."""
LEADERS = 5
MOST_RANGE = 24
_LEAST_BARS = 8


def clock(seconds: float) -> str:
    """``71:59:30``."""
    whole = int(max(0.0, seconds))
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def live_view(state: LiveState, width: int, height: int, ascii_only: bool = False) -> RenderableType:
    """The screen of ``leakscope record`` in at most ``width`` columns and ``height`` lines."""
    reading = state.reading
    head = heading("record", reading.elapsed_s, state.duration_s, state.target, paused=state.paused)
    figures = f"{counted(reading.events, 'event')}, {state.events_per_s:,.0f}/s"
    facts = line(f"{figures}  ring {reading.ring_fill:.0%}  disk {size(reading.disk_bytes)}", "dim")
    parts: list[RenderableType] = [head, facts, losses_line(reading.losses)]
    if state.forecast:
        parts.append(line(forecast_line(state.forecast), "bold"))
    last = footer(state.keys, state.output)
    return fitted(parts, state.tracks, reading, last, width, height, ascii_only)


def heading(verb: str, elapsed_s: float, duration_s: float | None, target: str, *, paused: bool) -> Text:
    """Who is watched, for how long so far."""
    head = line(f"leakscope {verb}  {clock(elapsed_s)}", "bold")
    if duration_s:
        head.append(f" of {clock(duration_s)}")
    if paused:
        head.append("  PAUSED, the recording goes on", "yellow")
    head.append(f"  {printable(target)}", "not bold")
    return head


def fitted(
    parts: Sequence[RenderableType],
    tracks: Sequence[Track],
    reading: LiveReading | None,
    last: RenderableType,
    width: int,
    height: int,
    ascii_only: bool = False,
    extras: Sequence[RenderableType] = (),
) -> RenderableType:
    """What fits into so many lines. In order of importance: ``parts`` of a line each, ``last``, the sites that grow,
    the tracks, the latest of ``extras``."""
    left = height - len(parts)
    below = [last] if left > 1 else []
    left -= len(below)
    first = leaders(reading.sites, LEADERS) if reading is not None else []
    rows = min(len(first), max(0, left - 1))
    sites: list[RenderableType] = []
    if rows:
        sites = [sites_table(first[:rows], width)]
        left -= 1 + rows
    elif reading is not None and not first and left > 0:
        sites = [line("no site grows", "dim")]
        left -= 1
    kept = tracks[: max(0, left - 1)]
    left -= 1 + len(kept) if kept else 0
    courses: list[RenderableType] = [tracks_table(kept, width, ascii_only)] if kept else []
    more = list(extras)[-left:] if left > 0 else []
    return Group(*list(parts)[: max(1, height)], *courses, *sites, *more, *below)


def losses_line(losses: Sequence[Loss]) -> Text:
    """What was lost so far, by its words: in red, but for the few events that every recording misses (probes hit inside
    probes). Nothing of what is a limit of the method alone."""
    lost = lost_by_kind(losses)
    if not lost:
        return line("lost: nothing", "dim")
    said = ", ".join(f"{count:,} {what}" for what, count in lost.items())
    return line(f"lost: {said}", "yellow") if set(lost) == {"recursion_miss"} else line(f"LOST: {said}", "bold red")


def lost_by_kind(losses: Sequence[Loss]) -> dict[str, int]:
    """How much of each kind was lost, the most telling first."""
    found: dict[str, int] = {}
    for loss in losses:
        if loss.what not in QUIET_LOSSES:
            found[loss.what] = found.get(loss.what, 0) + loss.count
    return dict(sorted(found.items(), key=lambda item: item[0] == "recursion_miss"))


def tracks_table(tracks: Sequence[Track], width: int, ascii_only: bool = False) -> Table:
    """A line a counter: now, its change over the window, its course so far."""
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("now", justify="right", no_wrap=True)
    change = width >= NARROW
    window = f"last {duration(max((track.window_s for track in tracks), default=0.0))}"
    if change:
        table.add_column(window, justify="right", no_wrap=True)
    table.add_column("so far", no_wrap=True, overflow="crop")
    names = [printable(track.name) for track in tracks]
    taken = max(map(len, names)) + max(10, *(len(amount(track.value, track.in_bytes)) for track in tracks)) + 4
    taken += max(11, len(window)) + 2 if change else 0
    bars = ASCII_BARS if ascii_only else BARS
    for name, track in zip(names, tracks, strict=True):
        cells = [amount(track.value, track.in_bytes)]
        if change:
            cells.append("" if track.change is None else gain(track.change, track.in_bytes))
        table.add_row(name, *cells, sparkline(track.course, max(_LEAST_BARS, width - taken), bars))
    return table


def sites_table(rows: Sequence[Leader], width: int) -> Table:
    """The frames that gained most in the window."""
    table = _table(expand=True)
    if width >= NARROW:
        table.add_column("layer", no_wrap=True)
    table.add_column(f"growing, last {duration(rows[0].window_s)}", no_wrap=True, overflow="ellipsis", ratio=1)
    ranges = width >= WIDE and any(row.range for row in rows)
    if width >= WIDE:
        table.add_column("kind", no_wrap=True)
    if ranges:
        table.add_column("range", no_wrap=True, overflow="ellipsis", max_width=MOST_RANGE)
    table.add_column("gained", justify="right", no_wrap=True)
    table.add_column("rate", justify="right", no_wrap=True)
    if width >= NARROW:
        table.add_column("kept", justify="right", no_wrap=True)
    for row in rows:
        mark = "~" if row.sampled else ""
        cells: list[str | Text] = [row.layer] if width >= NARROW else []
        cells.append(Text(bare_frame(row.frame) or "…", "bold"))
        if width >= WIDE:
            cells.append(printable(row.what) + (f" +{row.others}" if row.others else ""))
        if ranges:
            cells.append(printable(row.range))
        cells += [mark + gain(row.growth_bytes), mark + rate(row.bytes_per_s)]
        if width >= NARROW:
            cells.append(mark + size(row.kept_bytes))
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def amount(value: float, in_bytes: bool = True) -> str:
    """``1.5 MiB``, or ``1,500`` of what is no bytes."""
    return size(value) if in_bytes else f"{value:,.0f}"


def gain(value: float, in_bytes: bool = True) -> str:
    """``+1.5 MiB``."""
    text = amount(value, in_bytes)
    return text if text.startswith(("-", "?", "0")) else f"+{text}"


def footer(keys: bool, output: str) -> Text:
    """How to end it, and where it is kept."""
    return line(f"{'q ends it, p pauses the view' if keys else 'Ctrl-C ends it'}; {printable(output)}", "dim")


def report_line(state: LiveState) -> str:
    """How the recording stands, the site that gained most and the forecast, in one line of a log."""
    reading = state.reading
    tracks = "  ".join(f"{track.name} {size(track.value)}" for track in state.tracks)
    lost = sum(lost_by_kind(reading.losses).values())
    said = f"recording {clock(reading.elapsed_s)}  {state.events_per_s:,.0f} events/s  {tracks}  "
    said += f"LOST {lost:,}" if lost else "lost nothing"
    for leader in leaders(reading.sites, 1):
        said += (
            f"  {leader.layer} {bare_frame(leader.frame)} {gain(leader.growth_bytes)} in {duration(leader.window_s)}"
        )
    return printable(said) + (f"  {forecast_line(state.forecast)}" if state.forecast else "")


def line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _table(expand: bool = False) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=expand)

"""What `record` shows while it runs: a live view, or lines of a log, from a thread of its own.

The recorder never waits for it: it only asks for the figures, gives way to all other threads, and where the terminal
takes no more text it is the view that stands still. A fault in it ends the view, not the recording.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from leakscope.cli.keyboard import Keyboard, keyboard_of
from leakscope.model.live import LiveState, Track

if TYPE_CHECKING:
    from leakscope.model.forecast import Forecast
    from leakscope.record.live import LiveReadings
    from leakscope.record.readings import Sampled

PROGRESS = ("auto", "live", "lines", "none")
REFRESH_S = 1.0
"""Between two drawings; a key draws at once."""
LINE_EVERY_S = 10.0
FORECAST_EVERY_S = 15.0
MOST_SITES = 12
"""Sites of a layer that are looked at for the leading frames: one frame may have several."""
PATIENCE_S = 1.0
"""How long the end of a recording waits for a view that hangs in a write."""
LESS_URGENT = 10
"""What is shown waits for what is recorded (nice)."""


def shown_as(progress: str, stream: TextIO, *, command: bool, quiet: str = "none") -> str:
    """live, lines or none: what ``--progress`` means on ``stream``. Raises BadInputError.

    :param command: a command runs that writes to the same terminal, which is then the command's: what is drawn over and
        over would wipe its prompts. :param quiet: what ``auto`` is there and in a pipe.
    """
    from leakscope.errors import BadInputError

    if progress not in PROGRESS:
        raise BadInputError(f"--progress {progress}: choose {', '.join(PROGRESS[:-1])} or {PROGRESS[-1]}")
    terminal = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    if progress == "live" and not terminal:
        raise BadInputError("--progress live: stderr is no terminal that can show it; use --progress lines")
    if progress != "auto":
        return progress
    if command or not stream.isatty():
        return quiet
    return "live" if terminal else "lines"


def target_of(pids: Sequence[int], cgroup: Path | None, command: Sequence[str]) -> str:
    """What is recorded, in few words."""
    if command:
        return " ".join(command)
    if cgroup is not None:
        return str(cgroup)
    if not pids:
        return "the whole host"
    names = []
    for pid in pids:
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            name = "process"
        names.append(f"{name} (PID {pid})")
    return ", ".join(names)


class LiveView:
    """An observer of one recording; a context manager, which gives the terminal back."""

    def __init__(
        self,
        how: str,
        stream: TextIO,
        target: str,
        output: Path,
        duration_s: float | None,
        *,
        everyone: bool,
        command: bool,
    ) -> None:
        """:param how: one of the answers of :func:`shown_as`."""
        from leakscope.cli.live_tracks import Tracks

        self.on_quit: Callable[[], None] = lambda: None
        self.error: Exception | None = None
        self._how, self._stream = how, stream
        self._target, self._output, self._duration_s = target, str(output), duration_s
        self._tracks = Tracks(everyone)
        self._keyboard = keyboard_of(stream, shared=command) if how == "live" else Keyboard(None)
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._readings: LiveReadings | None = None
        self._live: Any = None
        self._names: Any = None
        self._paused = False
        self._hangs = False  # in a write
        self._before = (0.0, 0)
        self._forecast: tuple[float, Forecast | None] = (0.0, None)

    def __enter__(self) -> LiveView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def take(self, sampled: Sampled) -> None:
        """A reading of the samplers."""
        self._tracks.take(sampled.rows)

    # --- the observer of a recording

    def begin(self, readings: LiveReadings) -> None:
        """Start to show."""
        self._readings = readings
        self._keyboard.open()
        self._thread = threading.Thread(target=self._run, name="leakscope-view", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop to show, and leave the terminal as it was."""
        self._ended.set()
        self._keyboard.close()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(PATIENCE_S)
        self._hangs = thread.is_alive()
        if not self._hangs and self._how == "live":
            print("leakscope: writing what was recorded", file=self._stream, flush=True)

    # --- the thread of the view

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LESS_URGENT)
        try:
            self._show()
        except Exception as error:  # the recording goes on
            self.error = error
        finally:
            with contextlib.suppress(Exception):
                self._clear()

    def _show(self) -> None:
        every_s = LINE_EVERY_S if self._how == "lines" else REFRESH_S
        due = time.monotonic() + (every_s if self._how == "lines" else 0.0)  # a log begins with what there is to tell
        state = None
        while not self._ended.is_set():
            now = time.monotonic()
            if now >= due:
                due = now + every_s
                if not self._paused:
                    state = self._state()
                    self._draw(state)
            key = self._keyboard.wait(max(0.0, min(due - time.monotonic(), REFRESH_S)))
            if key == "q":
                self.on_quit()
            elif key == "p":
                self._paused = not self._paused
                due = 0.0
                if self._paused and state is not None:
                    self._draw(replace(state, paused=True))

    def _state(self) -> LiveState:
        from leakscope.report.live.names import SiteNames

        assert self._readings is not None
        self._names = self._names or SiteNames()
        reading = self._readings.read(MOST_SITES)
        (then_s, then), self._before = self._before, (reading.elapsed_s, reading.events)
        passed = reading.elapsed_s - then_s
        tracks: tuple[Track, ...] = self._tracks.add(reading)
        if reading.elapsed_s - self._forecast[0] >= FORECAST_EVERY_S:
            self._forecast = reading.elapsed_s, self._tracks.forecast()
        return LiveState(
            target=self._target,
            output=self._output,
            reading=replace(reading, sites=self._names.named(reading.sites)),
            events_per_s=(reading.events - then) / passed if passed > 0 else 0.0,
            tracks=tracks,
            duration_s=self._duration_s,
            forecast=self._forecast[1],
            keys=self._keyboard.listening,
        )

    def _draw(self, state: LiveState) -> None:
        from leakscope.report.live.view import live_view, report_line

        if self._how == "lines":
            print(f"leakscope: {report_line(state)}", file=self._stream, flush=True)
        elif self._how == "live":
            if self._live is None:
                from leakscope.report.live.screen import Screen

                self._live = Screen(self._stream)
            if self._keyboard.in_background:
                self._live.forget()
            else:
                self._live.show(partial(live_view, state))

    def _clear(self) -> None:
        if self._live is not None and self._hangs:  # what was written meanwhile must not be cleared
            self._live.console.show_cursor(True)
        elif self._live is not None:
            self._live.close()

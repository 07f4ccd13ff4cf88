"""The live view on a terminal: it is left as it was whatever happens, and recordings that are watched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import recording
from recording import LEAKSCOPE, ROOT, waiting
from terminal import Terminal
from test_live_view import state

from leakscope.capture import Capture
from leakscope.cli.keyboard import Keyboard
from leakscope.cli.live_view import LiveView
from leakscope.model.live import LiveReading
from leakscope.quantities import size

READER = ROOT / "tests/live_reader.py"


# --- a terminal is left as it was, whatever happens ----------------------------------------------------------


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


KEYBOARD = """
import os, sys
from leakscope.cli.keyboard import Keyboard
keyboard = Keyboard(os.open("/dev/tty", os.O_RDONLY))
keyboard.open()
print("listening", keyboard.listening, flush=True)
while (key := keyboard.wait(60)) != "q":
    print("key", key, flush=True)
keyboard.close()
keyboard.close()
print("closed", keyboard.listening, flush=True)
"""


def test_keys_are_read_singly_and_the_modes_are_given_back(terminal: Terminal) -> None:
    before = terminal.modes
    # given a shell, as Ctrl-Z stops nothing that has none
    shell = ["bash", "-m", "-c", '"$@"; read -r -p "in the shell "; fg', "sh", sys.executable, "-c", KEYBOARD]
    program = terminal.start(shell)
    terminal.wait_text("listening True")
    assert terminal.reads_keys
    terminal.press("P")
    terminal.wait_text("key p")
    # then the shell finds the terminal as it was, and keys are read again in the foreground
    terminal.press("\x1a")
    terminal.wait_text("in the shell")
    assert terminal.modes == before
    terminal.press("go\n")
    terminal.wait(lambda lines: terminal.reads_keys)
    terminal.press("P")
    terminal.wait(lambda lines: "\n".join(lines).count("key p") == 2)
    terminal.press("q")
    terminal.wait_text("closed False")
    assert terminal.ended(program) == 0 and terminal.modes == before


def test_in_the_background_the_terminal_is_left_alone(terminal: Terminal) -> None:
    before = terminal.modes
    said = 'print("background", keyboard.in_background, keyboard.listening, flush=True)'
    script = KEYBOARD.replace('print("listening", keyboard.listening, flush=True)', said)
    shell = ["bash", "-m", "-c", '"$@" & read -r -p "in the shell "; kill %1', "sh", sys.executable, "-c", script]
    program = terminal.start(shell)
    terminal.wait_text("background True False")
    assert terminal.modes == before
    terminal.press("\n")
    terminal.ended(program)


def test_without_a_terminal_there_are_no_keys() -> None:
    keyboard = Keyboard(None)
    keyboard.open()
    waiting_thread = threading.Timer(0.1, keyboard.close)
    waiting_thread.start()
    began = time.monotonic()
    assert keyboard.wait(30) == "" and time.monotonic() - began < 20  # closing ends a wait
    assert not keyboard.listening


class Readings:
    """Stands for those of a recording."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.read_in: set[int] = set()

    def read(self, most_sites: int) -> LiveReading:
        self.read_in.add(threading.get_native_id())
        if self.error is not None:
            raise self.error
        return state().reading


def test_a_view_that_fails_ends_alone(terminal: Terminal) -> None:
    before = terminal.modes
    stream = os.fdopen(os.dup(terminal.follower), "w")
    with LiveView("live", stream, "x", Path("x.lscope"), None, everyone=False, command=False) as view:
        view.begin(Readings(ValueError("broken")))  # type: ignore[arg-type]
        recording.until(lambda: view.error is not None)
        view.end()
    assert str(view.error) == "broken" and terminal.modes == before


def whole(lines: list[str], wide: bool) -> bool:
    """Whether the view stands there once, from its first line to its last, and as much of it as fits."""
    there = [sum(text in line for line in lines) for text in ("leakscope record", "response_buf", "ends it; x.lscope")]
    return there == [1, 1, 1] and any("kept" in line for line in lines) == wide


def test_a_window_that_changes_its_size_is_drawn_anew(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakscope.cli.live_view.REFRESH_S", 0.1)
    stream = os.fdopen(os.dup(terminal.follower), "w")
    with LiveView("live", stream, "serve", Path("x.lscope"), None, everyone=False, command=False) as view:
        view.begin(Readings())  # type: ignore[arg-type]
        terminal.wait_text("response_buffer_map")
        for columns, lines, wide in ((44, 9, False), (130, 30, True)):
            terminal.resize(columns, lines)
            terminal.wait(partial(whole, wide=wide), patience_s=20)
    assert not any("leakscope record" in line for line in terminal.look())


def test_the_recorder_does_not_wait_for_a_terminal_that_stands_still(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a terminal whose output was stopped (Ctrl-S): every write to it waits
    monkeypatch.setattr("leakscope.cli.live_view.PATIENCE_S", 0.2)
    before = terminal.modes
    termios.tcflow(terminal.follower, termios.TCOOFF)
    stream = os.fdopen(os.dup(terminal.follower), "w")
    readings = Readings()
    view = LiveView("live", stream, "x", Path("x.lscope"), None, everyone=False, command=False)
    view.begin(readings)  # type: ignore[arg-type]
    recording.until(lambda: readings.read_in)
    time.sleep(0.3)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(30)
    view.end()
    signal.alarm(0)
    assert terminal.modes == before and threading.get_native_id() not in readings.read_in
    termios.tcflow(terminal.follower, termios.TCOON)
    terminal.look(0.3)


# --- recordings ----------------------------------------------------------------------------------------------

COUNT = 32
"""Rounds of leak_mmap: 2.0, 1.5 and 2.5 MiB, so that sizes of one decimal are exact."""


class Shown:
    """A recording in a terminal; :meth:`end` ends it by a key or a signal."""

    def __init__(self, path: Path, pid: int, *options: str, verb: str = "record") -> None:
        self.path = path
        self.terminal = Terminal(100, 30)
        self.before = self.terminal.modes
        command = [*LEAKSCOPE, verb, "--loader", recording.LOADER, "-o", str(path), *options, "-p", str(pid)]
        self.process = self.terminal.start(command, {"NO_COLOR": "1"})

    def wait_until_it_shows(self, leaked: dict[str, int]) -> None:
        """Bytes that functions have leaked."""
        self.leaked = leaked
        self.lines = self.terminal.wait(lambda lines: all(self._row(lines, function) for function in leaked))

    def _row(self, lines: list[str], function: str) -> str:
        """The row of a function that has gained all it leaked."""
        gained = f"+{size(self.leaked[function])}"
        return next((row for row in lines if row.startswith(f"host    {function} ") and gained in row), "")

    def row(self, function: str) -> list[str]:
        return self._row(self.lines, function).split()

    def end(self, how: str) -> None:
        """By `q` (after `p`), Ctrl-C or SIGTERM."""
        terminal = self.terminal
        self.keys_were_read = terminal.reads_keys
        if how == "q":
            terminal.press("p")
            terminal.wait_text("PAUSED, the recording goes on")
        if how == "SIGTERM":
            self.process.send_signal(signal.SIGTERM)
        else:
            terminal.press({"Ctrl-C": "\x03"}.get(how, how))
        self.code = terminal.ended(self.process)
        self.after, self.cursor_shown = terminal.modes, terminal.cursor_shown
        self.last = "".join(terminal.look())
        self.written = terminal.written.decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.terminal.close()


HOW = ("q", "Ctrl-C", "SIGTERM")


@pytest.fixture(scope="module")
def runs(bpf: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    """Three recordings of leak_mmap and a soak of it at the same time, each ended in another way."""
    place = tmp_path_factory.mktemp("shown")
    with waiting("leak_mmap", "--count", COUNT) as target, ExitStack() as stack:
        found = {how: Shown(place / f"{how}.lscope", target.pid) for how in HOW}
        found["soak"] = Shown(place / "soak.lscope", target.pid, "--interval", "500ms", verb="soak")
        for run in found.values():
            stack.callback(run.close)
        for run in found.values():
            run.terminal.wait_text("q ends it, p pauses the view")
        leaked = {site["function"]: site["bytes"] for site in target.go()["sites"]}
        for run in found.values():
            run.wait_until_it_shows(leaked)
        for how, run in found.items():
            run.end("q" if how == "soak" else how)
    return found


@pytest.mark.bpf
@pytest.mark.parametrize("how", HOW)
def test_a_recording_shows_who_leaks_and_leaves_the_terminal_as_it_was(runs: dict[str, Shown], how: str) -> None:
    run = runs[how]
    # then the screen had every leaking function, with the bytes that it keeps
    for function, leaked in run.leaked.items():
        layer, name, *_, kept, unit = run.row(function)
        assert (layer, name, f"{kept} {unit}") == ("host", function, size(leaked))
    assert run.keys_were_read and "\x1b[31" not in run.written and "\x1b[1;31" not in run.written  # NO_COLOR
    # and the terminal is what it was, whatever ended it; the view is gone and the summary stands there
    assert run.after == run.before and run.cursor_shown
    assert "p pauses the view" not in run.last and "leakscope attribute" in run.last
    # and a recording that `q` ended is one whose time was up
    assert run.code == (0 if how == "q" else 130)
    assert ("(you ended it)" if how == "q" else "(interrupted)") in run.last
    capture = Capture.open(run.path)
    assert capture.problems == [] and capture.manifest.complete
    with capture.connect() as con:
        kept = con.execute(
            """SELECT sum(CASE WHEN op = 'alloc' THEN size_bytes WHEN alloc_ts_ns > 0 THEN -size_bytes ELSE 0 END)
               FROM mem_events WHERE layer = 'host' AND kind = 'mmap_anon' AND op <> 'advise'"""
        ).fetchone()
    assert kept is not None and kept[0] == sum(run.leaked.values())


@pytest.mark.bpf
def test_a_soak_shows_who_leaks_and_q_ends_it_with_its_report(runs: dict[str, Shown]) -> None:
    run = runs["soak"]
    for function, leaked in run.leaked.items():
        assert " ".join(run.row(function)[-2:]) == size(leaked)
    assert (run.code, run.after) == (0, run.before) and run.cursor_shown
    assert "(you ended it)" in run.last and "p pauses the view" not in run.last
    assert Capture.open(run.path).manifest.complete


@pytest.mark.parametrize("mode", ["stream", "census"])
def test_sites_are_exact_while_the_recording_runs(bpf: str, mode: str, tmp_path: Path) -> None:
    with waiting("leak_mmap", "--count", COUNT + 1) as target:
        reader = subprocess.Popen(
            [sys.executable, str(READER), mode, bpf, str(tmp_path / "run.lscope"), str(target.pid)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip
        assert reader.stdin and reader.stdout
        try:
            assert json.loads(reader.stdout.readline())["sites"] is not None
            leaked = {site["function"]: site["bytes"] for site in target.go()["sites"]}
            patience = time.monotonic() + 60
            while True:
                reading = json.loads(reader.stdout.readline())
                found = Counter[str]()
                for layer, _, function, _, kept, growth in reading["sites"]:
                    assert 0 < growth <= kept
                    found[function] += kept if layer == "host" else 0
                written = reading["disk"] > 0 or mode == "census"  # which writes more rarely
                if {name: found[name] for name in leaked} == leaked and written:
                    break
                assert time.monotonic() < patience, reading
            # then the layer holds that and no more, beside what the program maps for itself
            assert reading["live_bytes"]["host"] >= sum(leaked.values()) and reading["live_bytes"]["gpu"] == 0
            out, _ = reader.communicate("\n", timeout=60)
        finally:
            if reader.poll() is None:
                reader.kill()
                reader.wait()
    assert json.loads(out.splitlines()[-1]) == {"ended_by": "quit"}


def test_a_command_keeps_its_terminal(bpf: str, terminal: Terminal, tmp_path: Path) -> None:
    # given a command that reads a line from the terminal that both share
    before = terminal.modes
    asking = [sys.executable, "-c", "print('got ' + input('name? '), flush=True)"]
    command = [*LEAKSCOPE, "record", "--loader", bpf, "-o", str(tmp_path / "run.lscope"), "--", *asking]
    process = terminal.start(command)
    terminal.wait_text("name?")
    # then lines are still lines, and q is a letter
    assert terminal.modes == before
    terminal.press("quentin\n")
    terminal.wait_text("got quentin")
    assert terminal.ended(process) == 0 and terminal.modes == before

"""A terminal for tests: a pseudo-terminal with a program on it, and what its screen shows (pyte)."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyte
from recording import ROOT


class Terminal:
    """A terminal of so many columns and lines. Programs started on it have it as their controlling terminal."""

    def __init__(self, columns: int = 100, lines: int = 30) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.leader, self.follower = pty.openpty()
        self.resize(columns, lines)
        self.written = b""

    def resize(self, columns: int, lines: int) -> None:
        """Change its size; programs are told, as by a window manager."""
        fcntl.ioctl(self.follower, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._screen.resize(lines, columns)

    def start(self, command: Sequence[str], env: dict[str, str] | None = None, **streams: Any) -> subprocess.Popen[str]:
        """Run a program with all its streams here, but for those that are given."""
        given = {name: streams.pop(name, self.follower) for name in ("stdin", "stdout", "stderr")}
        follower = self.follower

        def own() -> None:
            os.setsid()
            fcntl.ioctl(follower, termios.TIOCSCTTY, 0)

        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "TERM": "xterm-256color", **(env or {})}, preexec_fn=own, text=True,
            **given, **streams,
        )  # fmt: skip

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self.leader, keys.encode())

    def look(self, seconds: float = 0.05) -> list[str]:
        """The lines of the screen, after it was read for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self.leader], [], [], left)
            if ready:
                chunk = os.read(self.leader, 1 << 16)
                self.written += chunk
                self._stream.feed(chunk)
        return [line.rstrip() for line in self._screen.display]

    def wait(self, condition: Callable[[list[str]], object], patience_s: float = 60) -> list[str]:
        """The lines of the screen, once a condition holds of them."""
        end = time.monotonic() + patience_s
        while not condition(lines := self.look()):
            assert time.monotonic() < end, "the screen never showed it:\n" + "\n".join(lines)
        return lines

    def wait_text(self, text: str, patience_s: float = 60) -> list[str]:
        """The lines of the screen, once a text is among them."""
        return self.wait(lambda lines: text in "\n".join(lines), patience_s)

    def ended(self, process: subprocess.Popen[str], patience_s: float = 60) -> int:
        """The exit code of a program, whose output is read on."""
        self.wait(lambda lines: process.poll() is not None, patience_s)
        self.look()
        return int(process.returncode)

    @property
    def modes(self) -> list[Any]:
        """What tcgetattr(3) says."""
        return termios.tcgetattr(self.follower)

    @property
    def reads_keys(self) -> bool:
        """Whether a program takes single keys: neither echo nor lines."""
        return not self.modes[3] & (termios.ICANON | termios.ECHO)

    @property
    def cursor_shown(self) -> bool:
        """Whether the cursor is to be seen."""
        return not self._screen.cursor.hidden

    def close(self) -> None:
        """Take it away."""
        os.close(self.leader)
        os.close(self.follower)

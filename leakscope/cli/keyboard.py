"""Single keys from a terminal, whose modes are given back on every way out."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
from types import FrameType
from typing import Any

_LOCAL, _CONTROL = 3, 6  # fields of tcgetattr(3): local modes, control characters


class Keyboard:
    """Reads keys of ``fd`` while this process is in its foreground; ``fd`` None: no keys at all.

    Echo and line editing are off while it listens; signals of the keyboard (Ctrl-C, Ctrl-Z) work as ever. :meth:`wait`
    serves one thread; :meth:`open` and :meth:`close` are of the main thread.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._saved: list[Any] | None = None
        self._lock = threading.RLock()  # Ctrl-Z may come while the main thread holds it
        self._closed = True
        self._wake_read, self._wake_write = os.pipe()
        self._on_stop: Any = None

    @property
    def listening(self) -> bool:
        """Whether keys are read."""
        return self._saved is not None

    @property
    def in_background(self) -> bool:
        """Whether the terminal is another job's now: nothing should be drawn on it."""
        return self._fd is not None and self._group() not in (None, os.getpgrp())

    def open(self) -> None:
        """Take the keyboard."""
        self._closed = False
        self._take()
        if self._fd is not None:
            self._on_stop = signal.signal(signal.SIGTSTP, self._stopped)

    def close(self) -> None:
        """Give the keyboard back as it was, and end a :meth:`wait`; safe to call twice."""
        if self._closed:
            return
        with self._lock:
            self._closed = True
        self._give_back()
        if self._on_stop is not None:
            signal.signal(signal.SIGTSTP, self._on_stop)
            self._on_stop = None
        os.write(self._wake_write, b"x")

    def wait(self, seconds: float) -> str:
        """A key that was pressed within so many seconds, else ''."""
        self._take()
        watched = [
            self._wake_read,
            *([self._fd] if self._fd is not None and self.listening and self._foreground() else []),
        ]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._fd is None or self._fd not in ready:
            return ""
        try:
            read = os.read(self._fd, 64)
        except OSError:
            read = b""
        if not read:  # the terminal is gone
            self._fd, self._saved = None, None
        return read[-1:].decode("ascii", "ignore").lower()

    def _foreground(self) -> bool:
        return self._group() == os.getpgrp()

    def _group(self) -> int | None:
        """The process group that the terminal belongs to; None where it is not this process's own."""
        try:
            return os.tcgetpgrp(self._fd) if self._fd is not None else None
        except OSError:
            return None

    def _take(self) -> None:
        """Also again, when a shell has brought the process back into the foreground and set modes of its own."""
        with self._lock:
            if self._closed or not self._foreground() or self._fd is None:
                return
            with contextlib.suppress(termios.error):
                modes = termios.tcgetattr(self._fd)
                if not modes[_LOCAL] & termios.ICANON and self._saved is not None:
                    return
                self._saved = termios.tcgetattr(self._fd)
                modes[_LOCAL] &= ~(termios.ICANON | termios.ECHO)
                modes[_CONTROL][termios.VMIN], modes[_CONTROL][termios.VTIME] = 1, 0
                termios.tcsetattr(self._fd, termios.TCSANOW, modes)

    def _give_back(self) -> None:
        # At once (TCSANOW), for a terminal that was stopped with Ctrl-S would never drain; in the background the modes
        # are the shell's.
        with self._lock:
            saved, self._saved = self._saved, None
            if saved is not None and self._fd is not None and self._foreground():
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self._fd, termios.TCSANOW, saved)

    def _stopped(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets the terminal as it was."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stopped)  # from here on after SIGCONT
        self._take()


def keyboard_of(stream: Any, *, shared: bool) -> Keyboard:
    """The keyboard of the terminal that ``stream`` shows on; none where there is none, or where a command that shares
    stdin (``shared``) reads it."""
    try:
        terminal = os.ttyname(stream.fileno())
        if shared and os.isatty(0):
            return Keyboard(None)
        return Keyboard(os.open(terminal, os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except (OSError, ValueError):
        return Keyboard(None)

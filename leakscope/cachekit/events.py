"""Lives of cache objects as JSON lines that leakscope reads as cache events.

One line an event: ``ts_ns``, ``op`` (insert, evict, access, ref, unref, insert_fail, invalidate, gap), ``obj``,
``size`` in bytes, ``owner``, and where they apply ``hold`` (the handle that a ref or unref is of), ``refcount`` after
it, ``stack`` (where it was made), ``ttl_ns``, ``generation`` and ``cause``. Keys and values of the cache never get in:
a key may be a prompt.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

Row = dict[str, str | int | None]
"""What a line says beside its time and its op."""
FLUSH_BYTES = 64 << 10
FLUSH_S = 1.0
_encode = json.JSONEncoder(separators=(",", ":")).encode


class EventLog:
    """Appends events to a file; several caches and threads may share one.

    Events are kept back until there are 64 KiB of them or a second has passed; caches with a sweeper flush at each
    sweep, and the end of the interpreter does. A file that cannot be written (disk full) never harms the service:
    the events are dropped, counted in :attr:`lost`, and the file says so with an event ``gap`` once it can be
    written again. Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: Path | str, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.path = Path(path)
        self.written = 0
        """Events handed to the system."""
        self.lost = 0
        """Events dropped as the file could not be written."""
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._bytes = 0
        self._flushed_s = time.monotonic()
        self._untold = 0
        self._last_ns = 0
        self._torn = False
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        atexit.register(self.close)

    def emit(self, op: str, obj: str, size: int = 0, owner: str = "", **more: str | int) -> None:
        """Adds one event of an object. ``size`` in bytes."""
        self.write(op, {"obj": obj, "size": size, "owner": owner, **more})

    def write(self, op: str, *rows: Row) -> None:
        """Adds a line for each row, all at the time of the call; a closed log drops and counts them."""
        with self._lock:
            # No two calls have the same time, so that the order of events survives any sort by time.
            self._last_ns = max(self._last_ns + 1, self._clock_ns())
            for row in rows:
                line = _encode({"ts_ns": self._last_ns, "op": op, **row})
                self._lines.append(line)
                self._bytes += len(line)
            if self._bytes >= FLUSH_BYTES or time.monotonic() - self._flushed_s >= FLUSH_S:
                self._write()

    def flush(self) -> None:
        """Hands all events to the system."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Flushes and closes; more calls do nothing."""
        with self._lock:
            self._write()
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
        atexit.unregister(self.close)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        lines, self._lines, self._bytes = self._lines, [], 0
        self._flushed_s = time.monotonic()
        if not lines:
            return
        notice = []
        if self._untold:
            event = {"ts_ns": self._last_ns, "op": "gap", "obj": "", "size": 0, "owner": "", "count": self._untold}
            notice = [_encode(event)]
        head = b"\n" if self._torn else b""
        data = head + "".join(f"{line}\n" for line in (*notice, *lines)).encode()
        done = self._append(data)
        whole = data[len(head) : done].count(b"\n")
        if notice and whole:
            self._untold = 0
            whole -= 1
        if done:
            self._torn = data[done - 1 : done] != b"\n"
        self.written += whole
        self.lost += len(lines) - whole
        self._untold += len(lines) - whole

    def _append(self, data: bytes) -> int:
        """How many bytes of ``data`` got in: all in one write, so that lines of several processes do not mix."""
        done = 0
        while done < len(data):
            try:
                done += os.write(self._file, data[done:])
            except OSError:  # no space; EBADF once closed
                break
        return done

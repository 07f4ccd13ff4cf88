"""Names of functions that a process makes at run time, from the `perf` map that its JIT compiler writes.

``/tmp/perf-PID.map`` has one line a function: START SIZE NAME, the numbers hexadecimal
(tools/perf/Documentation/jit-interface.txt of Linux). PID is the process's own, of its PID namespace, and /tmp that of
its mount namespace.
"""

from __future__ import annotations

import bisect
import os
import stat
from pathlib import Path

MAX_BYTES = 32 << 20
"""Of a map that are read: some 400,000 functions, which take half a second."""
MAX_NAME = 512
_LOOK_BACK = 16
"""Functions that begin before an address and are tried, newest first: code is written over older code."""


class PerfMap:
    """The perf map of one process: opened through the process's own root, so construct it while the process lives.

    It is trusted only if it is a regular file, no link, that belongs to root or to the user of the process: anybody may
    write to /tmp. Its lines are read on as it grows.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.path = ""
        self._folder: int | None = None
        self._owners: set[int] = set()
        self._file: int | None = None
        self._seen = 0
        self._rest = b""
        self._functions: list[tuple[int, int, int, str]] = []  # start, line, end, name; sorted
        self._lines = 0
        try:
            lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            name = f"perf-{int(status.get('NSpid', str(pid)).split()[-1])}.map"
            self._owners = {0, *(int(uid) for uid in status["Uid"].split()[:2])}
            # A container's own /tmp: a link there would lead into the host's files.
            folder = f"{proc}/{pid}/root/tmp"
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self.path = f"/tmp/{name}"
        except (OSError, ValueError, KeyError):
            return  # the process is gone

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        for descriptor in (self._file, self._folder):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._folder = None

    def function_at(self, address: int) -> str:
        """Name of the newest function at an address, '' when there is none."""
        return self._find(address) or (self._find(address) if self._read_on() else "")

    def _find(self, address: int) -> str:
        index = bisect.bisect_right(self._functions, (address + 1,))
        before = self._functions[max(0, index - _LOOK_BACK) : index]
        return max(((line, name) for start, line, end, name in before if start <= address < end), default=(0, ""))[1]

    def _read_on(self) -> bool:
        """Read what the map has grown by; whether there was anything."""
        try:
            content = self._content()
        except OSError:
            return False
        *lines, self._rest = (self._rest + content).split(b"\n")
        self._rest = self._rest[: MAX_NAME + 40]
        added = []
        for line in lines:
            self._lines += 1
            fields = line.split(None, 2)
            try:
                start, size = int(fields[0], 16), int(fields[1], 16)
                name = fields[2][:MAX_NAME].decode("utf-8", "replace").strip()
            except (ValueError, IndexError):
                continue
            if size > 0 and name:
                added.append((start, self._lines, start + size, name))
        if len(added) > 1000:
            self._functions = sorted(self._functions + added)
        else:
            for function in added:
                bisect.insort(self._functions, function)
        return bool(added)

    def _content(self) -> bytes:
        """What was not read yet; the file is opened anew when it was replaced. Raises OSError when there is none."""
        if self._folder is None:
            return b""
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            os.close(self._file)
            self._file = None
        if self._file is None:
            name = self.path.rpartition("/")[2]
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._file = os.open(name, flags, dir_fd=self._folder)
            self._seen, self._rest = 0, b""
        facts = os.fstat(self._file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in self._owners:
            self._close()
            return b""
        if facts.st_size < self._seen:
            self._seen, self._rest = 0, b""
        content = os.pread(self._file, max(0, min(facts.st_size, MAX_BYTES) - self._seen), self._seen)
        self._seen += len(content)
        return content

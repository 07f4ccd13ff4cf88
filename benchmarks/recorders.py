"""leakscope and other tools as running processes: started, waited for until their probes fire, stopped."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT

START_LIMIT_S = 60.0
SETTLED_S = 0.4
"""A peer counts as attached when its number of open probes has not changed for so long."""
_KERNEL_TRACEPOINTS = 6  # kmalloc, kmem_cache_alloc, kfree, kmem_cache_free, mm_page_alloc, mm_page_free

_BPFTRACE_LIVE_MAP = """
tracepoint:kmem:kmalloc, tracepoint:kmem:kmem_cache_alloc {{ @live[args->ptr] = {object}; }}
tracepoint:kmem:kfree, tracepoint:kmem:kmem_cache_free {{ delete(@live[args->ptr]); }}
tracepoint:kmem:mm_page_alloc {{ @pages[args->pfn] = {pages}; }}
tracepoint:kmem:mm_page_free {{ delete(@pages[args->pfn]); }}
END {{ clear(@live); clear(@pages); }}
"""


@dataclass(frozen=True)
class Tool:
    """A command that records the kernel's allocations. ``{capture}`` in an argument is a path to write to."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        """Whether its program is there."""
        return shutil.which(self.command[0]) is not None

    @property
    def makes_capture(self) -> bool:
        """Whether it is leakscope."""
        return "{capture}" in self.command


def leakscope(name: str, *arguments: str) -> Tool:
    """``leakscope record`` with more arguments; without a scope among them it records the whole host."""
    record = [sys.executable, "-m", "leakscope", "record", "--force", "--json", "-o", "{capture}"]
    return Tool(name, [*record, *arguments])


def memleak() -> Tool:
    """Debian's memleak of bcc in kernel mode: a kernel stack for every allocation, live map in the kernel."""
    from bpf_programs import SHIM_DIRECTORY

    return Tool("memleak-bpfcc", ["memleak-bpfcc", "3600"], {"BCC_KERNEL_SOURCE": str(SHIM_DIRECTORY)})


def bpftrace(name: str, *, stacks: bool) -> Tool:
    """A live map of objects and pages as a bpftrace script, with or without the kernel stack of each."""
    size, pages = "args->bytes_alloc", "(4096 << args->order)"
    values = (
        {"object": f"({size}, kstack)", "pages": f"({pages}, kstack)"} if stacks else {"object": size, "pages": pages}
    )
    script = _BPFTRACE_LIVE_MAP.format(**values)
    return Tool(name, ["bpftrace", "-e", script], {"BPFTRACE_MAP_KEYS_MAX": str(1 << 20)})


class Recording:
    """A tool that is recording; ``start_s`` and, once stopped, ``stop_s`` are what that took."""

    def __init__(self, tool: Tool, folder: Path, *, terminal: bool = False) -> None:
        """Start ``tool`` and return when its probes fire. Raises RuntimeError, with its messages, if they never do.

        :param terminal: its messages go to a terminal of 120 columns and 40 lines.
        """
        self.tool = tool
        self.capture = folder / "bench.lscope"
        self._output = folder / "output"
        self._messages = folder / "messages"
        command = [str(self.capture) if word == "{capture}" else word for word in tool.command]
        began = time.perf_counter()
        with self._output.open("w") as output, self._messages.open("w") as messages:
            stderr = _terminal(self._messages) if terminal else messages.fileno()
            self._process = subprocess.Popen(
                command, stdout=output, stderr=stderr, stdin=subprocess.DEVNULL, cwd=ROOT,
                env={**os.environ, "TERM": "xterm-256color", **tool.environment},
            )  # fmt: skip
            if terminal:
                os.close(stderr)
        self._ready = self._manifest_started if tool.makes_capture else self._probes_settled
        try:
            self._await_ready()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.start_s = time.perf_counter() - began - (0.0 if tool.makes_capture else SETTLED_S)
        self.stop_s = 0.0

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.tool.name} did not start recording: {self._messages.read_text()[-500:]}")
            time.sleep(0.01)

    def _manifest_started(self) -> bool:
        try:
            manifest = json.loads((self.capture / "manifest.json").read_text())
        except FileNotFoundError:
            return False
        return bool(manifest["sources"][0]["start_ns"])

    _last_count = 0
    _since = 0.0

    def _probes_settled(self) -> bool:
        count = _open_files(self._process.pid)["anon_inode:[perf_event]"]
        if count != self._last_count:
            self._last_count, self._since = count, time.monotonic()
        return count >= _KERNEL_TRACEPOINTS and time.monotonic() - self._since >= SETTLED_S

    def cpu_seconds(self) -> float:
        """CPU time of the recorder so far, all its threads, user and system (/proc/PID/stat, fields 14 and 15)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> dict[str, Any]:
        """End it; leakscope's summary (rows, losses, …), {} for other tools. The capture is removed."""
        began = time.perf_counter()
        # SIGTERM for the peers: SIGINT is ignored by what runs in the background of a script.
        self._process.send_signal(signal.SIGINT if self.tool.makes_capture else signal.SIGTERM)
        self._process.wait(timeout=120)
        self.stop_s = time.perf_counter() - began
        shutil.rmtree(self.capture, ignore_errors=True)
        if not self.tool.makes_capture:
            return {}
        try:
            return dict(json.loads(self._output.read_text()))
        except ValueError:
            raise RuntimeError(f"{self.tool.name} gave no summary: {self._messages.read_text()[-500:]}") from None


def _terminal(messages: Path) -> int:
    """The descriptor of a new terminal; what is written to it goes to a file, until nobody has it open any more."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))

    def copy() -> None:
        with messages.open("wb") as file, contextlib.suppress(OSError):  # EIO: closed
            while chunk := os.read(leader, 1 << 16):
                file.write(chunk)
        os.close(leader)

    threading.Thread(target=copy, daemon=True).start()
    return follower


def _open_files(pid: int) -> Counter[str]:
    """What a process's descriptors point to, and how many do."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[str(link.readlink())] += 1
        except OSError:
            continue  # closed meanwhile
    return found

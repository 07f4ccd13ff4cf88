"""The thread that reads the samplers: asked for a reading, it takes one, and outlives a reading that fails."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from leakscope.model.recording import Loss
from leakscope.record.priority import prefer_this_thread


class SamplerThread:
    """Calls `read(everything)` in a thread of its own at each request. Readings that raise are counted."""

    def __init__(self, read: Callable[[bool], None], *, preferred: bool = False) -> None:
        """:param preferred: give the thread a higher priority, where that is allowed."""
        self._read = read
        self._preferred = preferred
        self.busy = False
        """Whether a reading is under way."""
        self._failed: Counter[str] = Counter()
        self._requested = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="leakscope-sampler", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Ask for one reading; requests that come before it begins are one."""
        self._requested.set()

    def read_now(self, *, everything: bool) -> None:
        """Take a reading in the calling thread. Never raises: a failure is counted, and the next reading is tried."""
        try:
            self._read(everything)
        except Exception as error:
            self._failed[f"{type(error).__name__}: {error}"] += 1

    def stop(self) -> None:
        """End the thread after the reading under way; safe to call twice."""
        self._stopping = True
        self._requested.set()
        self._thread.join()

    def losses(self) -> list[Loss]:
        """Readings that failed as a whole, by reason."""
        return [Loss("samplers", "sampler_error", count, reason) for reason, count in self._failed.items()]

    def _run(self) -> None:
        if self._preferred:
            prefer_this_thread()
        while True:
            self._requested.wait()
            self._requested.clear()
            if self._stopping:
                return
            self.busy = True
            self.read_now(everything=False)
            self.busy = False

"""How long a collection lasts, and who ends it."""

from __future__ import annotations

import threading
import time


class Deadline:
    """The end of a collection: after ``seconds``, or when somebody says so."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End it now."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether somebody ended it."""
        return self._stopped.is_set()

    def left_s(self) -> float:
        """Seconds that are left, 0 when it is over."""
        return 0.0 if self.stopped else max(0.0, self._end - time.monotonic())

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds`` or to the end; whether it is over."""
        self._stopped.wait(min(seconds, self.left_s()))
        return self.left_s() <= 0


def utc_ns() -> int:
    """Now, UTC."""
    return time.time_ns()

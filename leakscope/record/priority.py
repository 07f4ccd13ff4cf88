"""Threads that must run in time."""

from __future__ import annotations

import contextlib
import os
import threading


def prefer_this_thread() -> None:
    """Raise the priority of the calling thread, where that is allowed. Threads that it starts later inherit it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)

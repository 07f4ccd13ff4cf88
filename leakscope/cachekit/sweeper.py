"""A thread that sweeps caches, so that what has expired goes although nobody asks for it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from leakscope.cachekit.cache import Cache

PERIOD_S = 0.5
_log = logging.getLogger("leakscope.cachekit")


class Sweeper:
    """Sweeps caches every ``period_s`` seconds, in one daemon thread::

        with Sweeper(cache):
            serve()

    It does not keep the caches alive and ends with the last of them. A fork does not take the thread along: start one
    in each process. ``also`` is called after each sweep, e.g. a directory tier's ``sweep``.
    """

    def __init__(self, *caches: Cache[Any, Any], period_s: float = PERIOD_S, also: Callable[[], object] | None = None):
        if not period_s > 0:
            raise ValueError(f"the period must be above 0 s, not {period_s}")
        self.period_s = period_s
        self.sweeps = 0
        self._caches = [weakref.ref(cache) for cache in caches]
        self._also = also
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leakscope-cachekit-sweeper", daemon=True)

    def start(self) -> Sweeper:
        """Starts the thread; once only."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread, after a last sweep."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._sweep()

    def __enter__(self) -> Sweeper:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._ended.wait(self.period_s):
            if not self._sweep():
                return

    def _sweep(self) -> bool:
        """Whether any of the caches is still there."""
        there = False
        for reference in self._caches:
            cache = reference()
            if cache is not None:
                there = True
                try:
                    cache.sweep()
                except Exception:  # of a getsizeof, label or timer: the thread must go on for the other caches
                    _log.exception("%s: the sweep failed", cache.name)
        if self._also is not None:
            try:
                self._also()
            except Exception:
                _log.exception("what follows a sweep failed")
        self.sweeps += 1
        return there

"""A run of the server: threads that read, the endpoint that answers, and an orderly end."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from leakscope.serve.endpoint import CHECK_S, Endpoint
from leakscope.serve.exposition import gathered, registry_of
from leakscope.serve.source import Polled, Source

ENDING = frozenset({signal.SIGINT, signal.SIGTERM})
FIRST_S = 3.0
"""How long the first answer waits for first readings."""
STOP_S = 2.0
"""How long the end waits for readings under way."""


def serve(
    sources: Sequence[Source],
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    on_change: Callable[[str], None],
    duration_s: float | None = None,
) -> bool:
    """Serve until SIGINT, SIGTERM or the end of ``duration_s``; whether a signal ended it.

    ``on_ready`` is told the address of the metrics. Raises BadInputError where it cannot listen there.
    """
    polled = [Polled(source, on_change) for source in sources]
    endpoint = Endpoint(host, port, registry_of(lambda: gathered(polled)))
    try:
        with _signals() as ended:
            for one in polled:
                one.start()
            first_s = time.monotonic() + FIRST_S
            for one in polled:
                one.wait(first_s - time.monotonic())
            answering = threading.Thread(target=endpoint.serve_forever, args=(CHECK_S,), name="endpoint", daemon=True)
            answering.start()
            on_ready(endpoint.url)
            by_signal = ended(duration_s)
            endpoint.shutdown()
            answering.join(STOP_S)
    finally:
        endpoint.server_close()
        for one in polled:
            one.stop(STOP_S / max(1, len(polled)))
    return by_signal


def once(sources: Sequence[Source], on_change: Callable[[str], None]) -> bytes:
    """The exposition text of one reading of each source, those that can be read."""
    from prometheus_client import generate_latest

    polled = [Polled(source, on_change) for source in sources]
    try:
        for one in polled:
            one.read()
        return generate_latest(registry_of(lambda: gathered(polled), itself=False))
    finally:
        for source in sources:
            source.close()


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[float | None], bool]]:
    """Waits for a signal that ends the server, for so many seconds at most; whether one came.

    The signals are blocked and taken by the wait itself: a handler that told an Event could come while that Event's
    own lock is held.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield _came
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _came(seconds: float | None) -> bool:
    came = signal.sigwait(ENDING) if seconds is None else signal.sigtimedwait(ENDING, seconds)
    return came is not None

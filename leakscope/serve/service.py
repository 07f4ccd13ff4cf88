"""A run of the server: threads that read, the endpoint that answers, and an orderly end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from leakscope.serve.endpoint import CHECK_S, Endpoint
from leakscope.serve.exposition import gathered, registry_of
from leakscope.serve.source import Polled, Source

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
    ended = threading.Event()
    try:
        with _signals(ended):
            for one in polled:
                one.start()
            answering = threading.Thread(target=endpoint.serve_forever, args=(CHECK_S,), name="endpoint", daemon=True)
            answering.start()
            on_ready(endpoint.url)
            by_signal = ended.wait(duration_s)
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
def _signals(ended: threading.Event) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        ended.set()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

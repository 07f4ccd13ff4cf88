"""A run of the server: threads that read, the endpoint that answers, and an orderly end."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn

from leakscope.capture.reader import remove_scratch
from leakscope.errors import ExitCode
from leakscope.serve.endpoint import CHECK_S, Endpoint
from leakscope.serve.exposition import gathered, registry_of
from leakscope.serve.source import Polled, Source

ENDING = frozenset({signal.SIGINT, signal.SIGTERM})
FIRST_S = 3.0
"""How long the first answer waits for first readings."""
LONGEST_WAIT_S = 3600.0
STOP_S = 2.0
"""How long the end waits for readings under way; they are abandoned then."""


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
    The process ends here, with the exit code that it would have, where a reading cannot be ended.
    """
    polled = [Polled(source, on_change) for source in sources]
    endpoint = Endpoint(host, port, registry_of(lambda: gathered(polled)))
    try:
        with _signals() as ended:
            for one in polled:
                one.start()
            first_s = time.monotonic() + FIRST_S
            while not (by_signal := ended(CHECK_S)) and time.monotonic() < first_s:
                if all(one.state()[1].tried for one in polled):
                    break
            if not by_signal:
                by_signal = _answered(endpoint, on_ready, partial(ended, duration_s))
    finally:
        endpoint.server_close()
        over = _stopped(polled)
    if not over:
        _leave(ExitCode.INTERRUPTED if by_signal else ExitCode.DONE)
    return by_signal


def _stopped(polled: Sequence[Polled]) -> bool:
    """End all reading; whether no reading is under way any more."""
    for one in polled:
        one.stop()
    end = time.monotonic() + STOP_S
    return all(one.join(end - time.monotonic()) for one in polled)


def _leave(code: ExitCode) -> NoReturn:
    """End this process now. Threads that are inside of a library's C++ code abort it if Python ends in good order."""
    remove_scratch()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _answered(endpoint: Endpoint, on_ready: Callable[[str], None], ended: Callable[[], bool]) -> bool:
    """Answer until `ended` returns; what it returned."""
    answering = threading.Thread(target=endpoint.serve_forever, args=(CHECK_S,), name="endpoint", daemon=True)
    answering.start()
    on_ready(endpoint.url)
    by_signal = ended()
    endpoint.shutdown()
    answering.join(STOP_S)
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

    Through a wakeup descriptor: libraries have threads that take signals as well, which neither wakes the waiting
    thread nor lets Python run a handler; and a handler may come while the lock of what it would set is held.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda number, frame: None) for number in ENDING}
    try:
        yield partial(_came, reader)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within it SIGTERM does what Ctrl-C does: it raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _came(reader: socket.socket, seconds: float | None) -> bool:
    end = math.inf if seconds is None else time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([reader], [], [], min(left, LONGEST_WAIT_S))
        if ready and ENDING & set(reader.recv(4096)):
            return True
    return False

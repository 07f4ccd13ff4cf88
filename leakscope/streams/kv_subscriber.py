"""A live subscription to the KV events of vLLM or SGLang over ZeroMQ, with replay of what was missed.

The publisher sends (topic, sequence, payload) on a PUB socket, which drops silently at its high-water mark. Its replay
socket is a ROUTER: to a request of (empty, first sequence) it answers one message a buffered batch, with or without
the topic (vLLM before and since its pull request 45177; SGLang without), and ends with sequence -1. A REQ socket would
get the first answer alone, hence DEALER (vllm/distributed/kv_events.py).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

from leakscope.errors import BadInputError
from leakscope.streams.address import Address
from leakscope.streams.clock import Deadline
from nsight_parsers import ParsedReport
from nsight_parsers.kv_decode import EXTRA
from nsight_parsers.kv_events import LIMITS, EventBook, Frame

CONNECT_S = 2.0
REPLAY_S = 5.0
"""The longest wait for one answer of the replay socket."""
POLL_MS = 50
HIGH_WATER = 100_000
END = b"\xff" * 8
MAX_FRAME_BYTES = 64 << 20
MAX_ROWS = 20_000_000


class KvSubscriber:
    """One publisher: connect with :meth:`check`, then :meth:`collect`."""

    def __init__(self, address: Address) -> None:
        """Raises BadInputError when the address or one of its options is wrong."""
        self.address = address
        self.port = address.port()
        self.replay = _replay_endpoint(address)
        self.pool_blocks = _pool(address)
        self.book = EventBook()
        self.findings: list[str] = []

    def check(self) -> None:
        """Raises BadInputError where nobody listens or the libraries are missing. ZeroMQ itself would wait for ever."""
        try:
            import msgpack  # noqa: F401
            import zmq  # noqa: F401
        except ImportError as error:
            raise BadInputError(f"{self.address.shown}: KV events need {error.name}: {EXTRA}") from None
        reach(self.address, self.address.host, self.port)

    def collect(self, deadline: Deadline) -> ParsedReport:
        """All batches until the deadline, with those that the publisher still has in its replay buffer."""
        import zmq

        book = self.book
        with contextlib.ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            socket_ = stack.enter_context(context.socket(zmq.SUB))
            socket_.setsockopt(zmq.LINGER, 0)
            socket_.setsockopt(zmq.RCVHWM, HIGH_WATER)
            socket_.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            socket_.setsockopt_string(zmq.SUBSCRIBE, self.address.options.get("topic", ""))
            monitor = stack.enter_context(socket_.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED))
            socket_.connect(f"tcp://{_bracketed(self.address.host)}:{self.port}")
            if not monitor.poll(round(CONNECT_S * 1000)):
                raise BadInputError(f"{self.address.shown}: something listens there, but no ZeroMQ publisher")
            socket_.disable_monitor()
            while (left_s := deadline.left_s()) > 0 and book.rows <= MAX_ROWS:
                if socket_.poll(min(POLL_MS, round(left_s * 1000) + 1)):
                    self._enter(context, socket_.recv_multipart())
            for _ in range(HIGH_WATER):  # what has arrived by then counts
                if not socket_.poll(0) or book.rows > MAX_ROWS:
                    break
                self._enter(context, socket_.recv_multipart())
            if book.rows > MAX_ROWS:
                self.findings.append(f"ended early: more than {MAX_ROWS:,} blocks")
            if not book.batches:  # a quiet engine: what it did before is all there is
                for frame in self._frames(context, "", 0):
                    book.add(*frame)
        return self._report(book)

    def _enter(self, context: Any, parts: list[bytes]) -> None:
        frame = _frame(parts)
        if frame is None:
            self.book.undecodable += 1
        else:
            self.book.add(*frame, refill=partial(self._refill, context, frame[0]))

    def _refill(self, context: Any, topic: str, missing: range) -> Iterator[Frame]:
        return self._frames(context, topic, missing.start)

    def _frames(self, context: Any, topic: str, first: int) -> Iterator[Frame]:
        """What the publisher still has from batch ``first`` on; nothing without a replay socket."""
        if not self.replay:
            return
        import zmq

        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, HIGH_WATER)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            dealer.connect(self.replay)
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
            while dealer.poll(round(REPLAY_S * 1000)):
                parts = dealer.recv_multipart()
                if parts[:1] == [b""]:
                    parts = parts[1:]
                if len(parts) >= 2 and parts[-2] == END and not parts[-1]:
                    return
                frame = _frame([b"", *parts[-2:]] if len(parts) in (2, 3) else parts)
                if frame is not None:
                    yield topic, frame[1], frame[2]
        self.findings.append(f"the replay socket did not answer for {REPLAY_S:g} s and was not asked again")
        self.replay = ""

    def _report(self, book: EventBook) -> ParsedReport:
        findings = [*book.findings(), *dict.fromkeys(self.findings)]
        if not book.batches:
            findings.append("no batch came: the engine cached nothing in this time, or another topic is asked for")
        facts = book.facts() | ({"pool_blocks": self.pool_blocks} if self.pool_blocks else {})
        return ParsedReport(
            book.tables(), findings, "KV events", kind="kv_events", facts=facts, limits=list(LIMITS), clock="utc"
        )


def reach(address: Address, host: str, port: int) -> None:
    """Raises BadInputError, one line, where no connection can be made."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise BadInputError(f"{address.shown}: cannot be reached: {error.strerror or error}") from None


def _frame(parts: list[bytes]) -> Frame | None:
    if len(parts) != 3 or len(parts[1]) != 8:
        return None
    number = int.from_bytes(parts[1], "big")
    return (parts[0].decode("utf-8", "replace")[:256], number, parts[2]) if number < 1 << 62 else None


def _replay_endpoint(address: Address) -> str:
    """``replay=`` is a port of the same host, or an address of its own."""
    given = address.options.get("replay", "")
    if not given:
        return ""
    if given.isdecimal() and 0 < int(given) < 1 << 16:
        return f"tcp://{_bracketed(address.host)}:{given}"
    if given.startswith("tcp://"):
        return given
    raise BadInputError(f"{address.shown}: replay={given}: neither a port nor tcp://HOST:PORT")


def _pool(address: Address) -> int | None:
    given = address.options.get("pool")
    if given is None:
        return None
    if not given.isdecimal() or not 0 < int(given) < 1 << 31:
        raise BadInputError(f"{address.shown}: pool={given}: no number of blocks")
    return int(given)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

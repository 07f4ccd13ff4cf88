"""The HTTP side: a few short answers, and no client that can stop the others.

Each connection is one request, has a thread of its own and an end: :data:`LONGEST_S` after it began it is cut off,
whatever it does. With :data:`MOST` connections open the oldest makes room for the next. Answers are made at most once
in :data:`REUSED_S`.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import ipaddress
import re
import socket
import socketserver
import threading
import time
from typing import TYPE_CHECKING, Any

from leakscope.errors import BadInputError

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

LONGEST_S = 10.0
MOST = 32
REUSED_S = 0.5
CHECK_S = 0.25
DEFAULT_PORT = 9469
_LISTEN = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^:\[\]/]*))(?::(?P<port>\d{1,5}))?")
HOME = b"leakscope serves its metrics at /metrics\n"


def listen_address(text: str) -> tuple[str, int]:
    """(host, port) of ``127.0.0.1:9469``, ``[::1]:9469``, ``localhost`` or ``:9469``. Raises BadInputError."""
    found = _LISTEN.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else DEFAULT_PORT
    if not text or found is None or port > 65_535:
        raise BadInputError(
            f"--listen {text}: needs HOST:PORT, such as 127.0.0.1:{DEFAULT_PORT} or [::1]:{DEFAULT_PORT}"
        )
    return found["six"] or found["host"] or "127.0.0.1", port


def is_loopback(host: str) -> bool:
    """Whether only this host can reach an address of :func:`listen_address`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Endpoint(http.server.ThreadingHTTPServer):
    """Listens from its making on; :meth:`serve_forever` answers until :meth:`shutdown`."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Raises BadInputError where it cannot listen there."""
        self._registry = registry
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        self._made: dict[str, tuple[float, bytes, str]] = {}
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family = info[0]
            super().__init__(info[4][:2], _Handler)  # type: ignore[arg-type]
        except OSError as error:
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            why = {
                errno.EADDRINUSE: "the port is in use; choose another one, or end who has it",
                errno.EACCES: "ports below 1024 need root; choose a higher one",
                errno.EADDRNOTAVAIL: "no interface of this host has that address",
            }.get(error.errno or 0, error.strerror or str(error))
            raise BadInputError(f"--listen {shown}: {why}") from None

    def server_bind(self) -> None:
        """Bind, without http.server's look-up of the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)

    @property
    def url(self) -> str:
        """Where it is scraped."""
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes) else str(host)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/metrics"

    def text(self, accept: str) -> tuple[bytes, str]:
        """(content, its type) in the format that a client asks for."""
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(accept)
        with self._making:
            now = time.monotonic()
            at, content, _ = self._made.get(kind, (-1.0, b"", ""))
            if not content or now - at > REUSED_S:
                content = encode(self._registry)
                if len(self._made) > 8:  # a type carries what the client wrote of escaping
                    self._made.clear()
                self._made[kind] = (now, content, kind)
        return content, kind

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept one connection; the oldest makes room where there are too many."""
        connection, address = super().get_request()
        connection.settimeout(LONGEST_S)
        with self._lock:
            if len(self._open) >= MOST:
                oldest = min(self._open, key=lambda one: self._open[one])
                del self._open[oldest]
                _cut(oldest)
            self._open[connection] = time.monotonic()
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        """The connection is over."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called again and again: cut off who takes too long."""
        now = time.monotonic()
        with self._lock:
            for connection, began in self._open.items():
                if now - began > LONGEST_S:
                    _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are nothing to tell of."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Endpoint
    server_version = "leakscope"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, *self.server.text(self.headers.get("Accept", "")))
        elif path in ("/", "/-/healthy"):
            self._answer(200, HOME if path == "/" else b"ok\n", "text/plain; charset=utf-8")
        else:
            self._answer(404, b"not here; metrics are at /metrics\n", "text/plain; charset=utf-8")

    do_HEAD = do_GET

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: what clients write is not for a log."""


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

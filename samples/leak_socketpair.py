"""Leaks UNIX socket pairs from Python, each with 3,000 unread bytes queued, beside pairs that are closed."""

from __future__ import annotations

import socket

from python_common import Site, finish, options, raise_descriptor_limit, rounds

UNREAD_BYTES = 3000
forgotten: list[tuple[socket.socket, socket.socket]] = []


def open_session_and_forget() -> None:
    pair = socket.socketpair()
    pair[0].send(bytes(UNREAD_BYTES))
    forgotten.append(pair)


def open_session_and_close() -> None:
    first, second = socket.socketpair()
    with first, second:
        first.send(bytes(UNREAD_BYTES))


def main() -> None:
    arguments = options(__doc__ or "", count=1000, pause_us=1000, churn=2).parse_args()
    raise_descriptor_limit()
    for _ in rounds(arguments):
        open_session_and_forget()
        for _ in range(arguments.churn):
            open_session_and_close()
    n = arguments.count
    site = Site("open_session_and_forget", "kernel", "slab", "socketpair", n, n * UNREAD_BYTES)
    finish("leak_socketpair.py", [site], n * arguments.churn, arguments.hold)


if __name__ == "__main__":
    main()

"""A service under test: every request opens a session, some are cancelled. Nothing is kept."""

import os
import socket
import time

REQUESTS = 240
CANCEL_EVERY = 5
SESSION_CACHE = 32
RESPONSE = b"x" * 2000


def open_session() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def close_session(session: tuple[socket.socket, socket.socket]) -> None:
    for end in session:
        end.close()


def handle_request(number: int) -> None:
    session = open_session()
    session[0].sendall(RESPONSE)
    if number % CANCEL_EVERY == 0:
        close_session(session)
        return
    session[1].recv(len(RESPONSE))
    close_session(session)


def warm_up() -> list[tuple[socket.socket, socket.socket]]:
    return [open_session() for _ in range(SESSION_CACHE)]


def main() -> None:
    pool = warm_up()
    for number in range(REQUESTS):
        handle_request(number)
        time.sleep(0.006)
    for session in pool:
        close_session(session)
    os._exit(0)  # as a service that is stopped: an interpreter that winds up would close what was forgotten


if __name__ == "__main__":
    main()

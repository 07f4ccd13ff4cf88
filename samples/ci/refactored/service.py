"""A service under test: every request opens a session, some are cancelled. Nothing is kept.

The same as in base, moved about: other lines, sessions as a class of their own, a quarter more requests.
"""

import os
import socket
import time

REQUESTS = 300
CANCEL_EVERY = 5
SESSION_CACHE = 32
RESPONSE = b"x" * 2000

Session = tuple[socket.socket, socket.socket]


def close_session(session: Session) -> None:
    for end in session:
        end.close()


def open_session() -> Session:
    return socket.socketpair()


def is_cancelled(number: int) -> bool:
    return number % CANCEL_EVERY == 0


def handle_request(number: int) -> None:
    session = open_session()
    try:
        session[0].sendall(RESPONSE)
        if not is_cancelled(number):
            session[1].recv(len(RESPONSE))
    finally:
        close_session(session)


def warm_up() -> list[Session]:
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

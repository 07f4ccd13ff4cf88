"""A service under test: every request opens a session, some are cancelled. Of those nobody closes the session.

60 of 300 requests are cancelled; each keeps a socket pair with 2,000 bytes unread.
"""

import os
import socket
import time

REQUESTS = 300
CANCEL_EVERY = 5
SESSION_CACHE = 32
RESPONSE = b"x" * 2000

Session = tuple[socket.socket, socket.socket]
waiting: dict[int, Session] = {}


def close_session(session: Session) -> None:
    for end in session:
        end.close()


def open_session() -> Session:
    return socket.socketpair()


def is_cancelled(number: int) -> bool:
    return number % CANCEL_EVERY == 0


def handle_request(number: int) -> None:
    session = waiting[number] = open_session()
    session[0].sendall(RESPONSE)
    if is_cancelled(number):
        return
    session[1].recv(len(RESPONSE))
    close_session(waiting.pop(number))


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

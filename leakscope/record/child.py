"""The recorded command: forked before any probe, held until they are attached, then released."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence

from leakscope.errors import BadInputError


class Command:
    """A child process that waits for :meth:`release` before it runs its command. Streams pass through."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Fork; call before starting threads. `environment` is the command's, by default the recorder's.

        Raises BadInputError when there is no such program.
        """
        self.arguments = list(arguments)
        self._environment = dict(os.environ if environment is None else environment)
        program = shutil.which(self.arguments[0])
        if program is None:
            raise BadInputError(f"{self.arguments[0]}: no such program to record; check the name and PATH")
        self.status: int | None = None
        gate_read, self._gate = os.pipe()
        self._failure, failure_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(program, gate_read, failure_write)
        os.close(gate_read)
        os.close(failure_write)

    def _run(self, program: str, gate: int, failure: int) -> None:
        os.close(self._gate)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if os.read(gate, 1) != b"g":  # the recorder is gone
            os._exit(125)
        try:
            os.execve(program, self.arguments, self._environment)
        except OSError as error:
            os.write(failure, str(error.errno).encode())
        os._exit(127)

    def release(self) -> None:
        """Let the command run. Raises BadInputError when it could not be executed."""
        os.write(self._gate, b"g")
        os.close(self._gate)
        answer = os.read(self._failure, 16)  # empty once exec has closed the pipe
        os.close(self._failure)
        if answer:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            raise BadInputError(f"{self.arguments[0]}: cannot be executed: {os.strerror(int(answer))}")

    def abandon(self) -> None:
        """End the child without having run the command."""
        os.close(self._gate)
        os.close(self._failure)
        os.waitpid(self.pid, 0)

    def poll(self) -> int | None:
        """The exit status once it ended (negative: killed by that signal), else None."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def stop(self, patience_s: float = 0.5) -> None:
        """End a command that still runs: SIGINT, then SIGTERM, then SIGKILL."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self.poll() is not None:
                return
            os.kill(self.pid, number)
            end = time.monotonic() + patience_s
            while time.monotonic() < end and self.poll() is None:
                time.sleep(0.01)

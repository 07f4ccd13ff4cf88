"""A child process that tests drive one statement at a time."""

from __future__ import annotations

import subprocess
import sys


class StepChild:
    """A Python child that runs one statement at a time and waits in between."""

    _LOOP = "import sys\nprint('ready')\nfor line in sys.stdin:\n  exec(line)\n  print('done')"

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-uc", self._LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._wait("ready")

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, statement: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(statement + "\n")
        self.process.stdin.flush()
        self._wait("done")

    def end(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()

    def _wait(self, word: str) -> None:
        assert self.process.stdout
        assert self.process.stdout.readline().strip() == word

"""Reads DWARF in a process of its own, so that a damaged or hostile file costs its lines and nothing else.

The child (this module as a program) answers one line of JSON for each line of JSON that it gets. To ``{"file": PATH,
"addresses": [...]}`` that is ``{"frames": [[[function, file, line], …], …]}``, one list an address, or ``{"problem":
…}``.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from leakscope.symbols.dwarf import DwarfFile, SourceFrame

BATCH = 2000
"""Addresses a request; an answer of that size takes about 0.1 s."""
MAX_ANSWER_BYTES = 64 << 20
MAX_MEMORY_BYTES = 32 << 30
"""Address space of the child beyond which it fails: the DWARF of the largest binaries is mapped as a whole (5 GB)."""


class DwarfWorker:
    """A child process that is started at the first request and again after it died.

    `deadline` is a ``time.monotonic()`` after which requests are refused and a running one is given up.
    """

    def __init__(self, deadline: float = float("inf")) -> None:
        self._deadline = deadline
        self._child: subprocess.Popen[bytes] | None = None
        self.overdue = False

    def __enter__(self) -> DwarfWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def frames(self, file: str, addresses: list[int]) -> list[list[SourceFrame]]:
        """The frames at each address of a file, outermost first.

        Raises ValueError with the reason where the file has no DWARF, the child died of it, or time is up.
        """
        found: list[list[SourceFrame]] = []
        for start in range(0, len(addresses), BATCH):
            answer = self._ask({"file": file, "addresses": addresses[start : start + BATCH]})
            if "problem" in answer:
                raise ValueError(str(answer["problem"]))
            found += [[SourceFrame(*frame) for frame in frames] for frames in answer["frames"]]
        return found

    def _ask(self, question: dict[str, object]) -> dict[str, Any]:
        child = self._child or self._start()
        assert child.stdin and child.stdout
        try:
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
            return json.loads(self._answer(child))
        except (OSError, EOFError):
            self.close()
            status = f"ended with status {child.returncode}"
            raise ValueError(f"reading its debug information {status}") from None
        except ValueError:
            self.close()
            raise

    def _answer(self, child: subprocess.Popen[bytes]) -> bytes:
        assert child.stdout
        answer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                left = self._deadline - time.monotonic()
                if left <= 0 or not selector.select(None if left == float("inf") else left):
                    self.overdue = True
                    raise ValueError("out of time")
                piece = os.read(child.stdout.fileno(), 1 << 20)
                if not piece or len(answer) > MAX_ANSWER_BYTES:
                    raise EOFError
                answer += piece
        return bytes(answer)

    def _start(self) -> subprocess.Popen[bytes]:
        # The same leakscope as this one, and nothing from the working directory. libdw asks debuginfod servers by
        # itself where these variables are set: nothing here goes to the network.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DEBUGINFOD_")}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "leakscope.symbols.dwarf_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal is for the recorder to act on
        )  # fmt: skip
        return self._child


def _serve() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    name, dwarf = "", None
    for line in sys.stdin.buffer:
        question = json.loads(line)
        try:
            if dwarf is None or question["file"] != name:
                name, dwarf = question["file"], None
                descriptor = os.open(Path(name), os.O_RDONLY | os.O_CLOEXEC)
                dwarf = DwarfFile(descriptor)
            answer: dict[str, object] = {"frames": [dwarf.frames_at(address) for address in question["addresses"]]}
        except (OSError, ValueError, MemoryError, RecursionError) as error:
            answer = {"problem": str(error) or type(error).__name__}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()

"""Recording with real probes: what the tests of the recorder share."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb

from leakscope.capture import Capture

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "samples"
BIN = SAMPLES / "bin"
LEAKSCOPE = [sys.executable, "-m", "leakscope"]
PAGE = os.sysconf("SC_PAGE_SIZE")
ONE_LOADER = os.environ.get("LEAKSCOPE_TEST_LOADER", "both")
LOADERS = [ONE_LOADER] if ONE_LOADER in ("core", "bcc") else ["core", "bcc"]
"""The loaders with which tests record, one after the other."""
LOADER = LOADERS[0]
"""The one that is in turn: the fixture `bpf` of conftest.py sets it."""

EVENTS = """
CREATE TEMP VIEW events AS
WITH one_frame_a_row AS (
    SELECT id, unnest(frames) AS frame, generate_subscripts(frames, 1) AS depth FROM stacks
), functions_of AS (
    SELECT s.id, list(f.function ORDER BY s.depth) AS functions, list(f.kind ORDER BY s.depth) AS kinds
    FROM one_frame_a_row s JOIN frames f ON f.id = s.frame GROUP BY s.id
)
SELECT e.*, coalesce(u.functions, []) AS functions, coalesce(k.functions, []) AS kernel_functions,
    CASE WHEN e.op = 'alloc' THEN 1
         WHEN e.op = 'free' AND e.alloc_ts_ns > 0 AND e.cause NOT IN ('exit', 'exec') THEN -1
         ELSE 0 END AS sign,
    CASE WHEN e.op = 'free' AND e.result <> 0 THEN 0 ELSE sign END AS object
FROM mem_events e
LEFT JOIN functions_of u ON u.id = e.user_stack
LEFT JOIN functions_of k ON k.id = e.kernel_stack
"""
"""`events`: mem_events with the function names of their stacks, outermost first, and how a row counts: its bytes with
`sign` (what the end of a process frees was live until then), and `object` objects (a part of a mapping is none)."""


def build_samples() -> None:
    """Build samples/bin; safe when several sessions do it at once."""
    _make(SAMPLES)


def build_programs() -> None:
    """Build the object of the loader `core`; safe when several sessions do it at once."""
    _make(ROOT / "bpf_programs")


def _make(directory: Path) -> None:
    place = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        done = subprocess.run(["make", "-C", str(directory), "-j2"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        os.close(place)


def sample(name: str, *options: object) -> list[str]:
    """The command line of a sample; scripts run under this interpreter."""
    program = [sys.executable, str(SAMPLES / name)] if name.endswith(".py") else [str(BIN / name)]
    return [*program, *map(str, options)]


def shell(*commands: Sequence[str]) -> list[str]:
    """One command that runs several, one after another; they are its children."""
    return ["/bin/sh", "-c", "; ".join(" ".join(command) for command in commands)]


@dataclass
class Recording:
    """A `leakscope record` that ended: its exit code, its streams and its capture."""

    path: Path
    code: int
    stdout: str = ""
    stderr: str = ""

    @cached_property
    def capture(self) -> Capture:
        """The capture; its parts are checked at first use."""
        return Capture.open(self.path)

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        connection = self.capture.connect()
        connection.execute(EVENTS)
        return connection

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Rows of a query on the tables and on `events`."""
        return self._connection.execute(sql, list(values)).fetchall()

    def live(self, by: str, where: str = "true", *values: object) -> dict[Any, tuple[int, int]]:
        """Live (objects, bytes) by a column, of the events that match; keys without any are left out."""
        sql = f"""SELECT {by}, sum(object)::BIGINT, sum(sign * size_bytes)::BIGINT FROM events WHERE {where}
                  GROUP BY 1 HAVING sum(object) <> 0 OR sum(sign * size_bytes) <> 0"""
        rows = self.rows(sql, *values)
        return {tuple(key) if isinstance(key, list) else key: (objects, size) for key, objects, size in rows}

    def losses(self, what: str) -> int:
        """Sum of the losses of a kind."""
        return int(self.rows("SELECT coalesce(sum(count), 0) FROM losses WHERE what = ?", what)[0][0])

    @property
    def facts(self) -> dict[str, Any]:
        """The facts in the manifest about this recording."""
        return self.capture.manifest.sources[0].facts

    @property
    def reports(self) -> dict[str, Any]:
        """The reports that samples printed, by the sample's name."""
        return reports(self.stdout)


def reports(text: str) -> dict[str, Any]:
    """The reports of samples (lines of JSON) in a text, by the sample's name."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"sample"')]
    return {report["sample"]: report for report in found}


class Recorder:
    """A `leakscope record` that runs. Its streams go to files, so that they can never fill a pipe."""

    def __init__(
        self,
        path: Path,
        *arguments: object,
        env: dict[str, str] | None = None,
        streams: Path | None = None,  # the folder for its streams, by default that of the capture
        **more: Any,
    ) -> None:
        self.path = path
        self._streams = [(streams or path.parent) / f"{path.name}.{stream}" for stream in ("stdout", "stderr")]
        command = [*LEAKSCOPE, "record", "--loader", LOADER, "-o", str(path), *map(str, arguments)]
        with self._streams[0].open("w") as stdout, self._streams[1].open("w") as stderr:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                env={**os.environ, **(env or {})}, **more,
            )  # fmt: skip

    def wait_ready(self, patience_s: float = 60) -> None:
        """Wait until all probes are attached: the manifest has the start of the evidence then."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            assert self.process.poll() is None, self._streams[1].read_text()
            try:
                sources = json.loads((self.path / "manifest.json").read_text())["sources"]
            except (OSError, ValueError):
                sources = []
            if sources and sources[0]["start_ns"]:
                return
            time.sleep(0.02)
        raise AssertionError(f"not recording after {patience_s} s: {self._streams[1].read_text()}")

    def signal(self, number: int) -> None:
        """Send a signal to the recorder alone."""
        self.process.send_signal(number)

    def result(self, patience_s: float = 120) -> Recording:
        """Wait for the end."""
        code = self.process.wait(patience_s)
        return Recording(self.path, code, *(stream.read_text() for stream in self._streams))

    def stop(self) -> Recording:
        """Ctrl-C, and wait for the end."""
        self.signal(signal.SIGINT)
        return self.result()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def record(path: Path, command: Sequence[str], *options: object, env: dict[str, str] | None = None) -> Recording:
    """Record a command from its start to its end."""
    with Recorder(path, *options, "--", *command, env=env) as recorder:
        return recorder.result()


class Waiting:
    """A sample that was started and waits for :meth:`go`; it stays alive after its report."""

    def __init__(self, name: str, *options: object, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            sample(name, "--wait", "--hold", 600, *options), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.pid = self.process.pid

    def go(self) -> Any:
        """Let it run; its report once it has leaked all."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def waiting(name: str, *options: object, env: dict[str, str] | None = None) -> Iterator[Waiting]:
    """A waiting sample that is killed at the end."""
    started = Waiting(name, *options, env=env)
    try:
        yield started
    finally:
        started.end()


def hiding(*places: Path) -> list[str]:
    """A command's beginning: run what follows where these directories and files are empty."""
    mounts = [
        f"mount -t tmpfs none '{place}'" if place.is_dir() else f"mount --bind /dev/null '{place}'" for place in places
    ]
    return ["unshare", "-m", "sh", "-c", "; ".join(["set -e", *mounts, 'exec "$@"']), "sh"]


def process_state(pid: int) -> str:
    """One letter as in ps(1); empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2]


def until(condition: Callable[[], object], patience_s: float = 60) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def stacks_that_do_not_resolve(recording: Recording) -> int:
    """Stacks that events name and the capture does not hold."""
    return int(
        recording.rows(
            """SELECT count(*) FROM (SELECT user_stack AS id FROM mem_events UNION SELECT kernel_stack FROM mem_events)
               WHERE id <> 0 AND id NOT IN (SELECT id FROM stacks)"""
        )[0][0]
    )


@dataclass
class SlabInfo:
    """/proc/slabinfo, parsed apart from leakscope's own sampler: bytes of active objects by cache."""

    bytes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls) -> SlabInfo:
        """Columns: name, active objects, objects, object size, … (mm/slab_common.c, slabinfo version 2.1)."""
        version, header, *lines = Path("/proc/slabinfo").read_text().splitlines()
        assert version == "slabinfo - version: 2.1" and header.split()[2] == "<active_objs>"
        columns = [line.split() for line in lines]
        return cls({column[0]: int(column[1]) * int(column[3]) for column in columns})

    def __sub__(self, before: SlabInfo) -> dict[str, int]:
        """Growth in bytes by cache."""
        return {name: size - before.bytes.get(name, 0) for name, size in self.bytes.items()}

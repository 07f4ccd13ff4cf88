"""A capture as a source, also while it is being recorded: its report anew when there is more of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from leakscope.capture import Capture
from leakscope.capture.layout import MANIFEST
from leakscope.errors import BadInputError
from leakscope.model.manifest import Source
from leakscope.report.export.metrics import Metric
from leakscope.report.text import printable
from leakscope.serve.memory import MemoryMetrics, Row, report_metrics
from leakscope.serve.source import gauge
from leakscope.soak.final import final_report

if TYPE_CHECKING:
    import duckdb

LAST_READINGS = """
SELECT scope::VARCHAR, scope_id::VARCHAR, counter::VARCHAR, arg_max(value, ts_ns), max(ts_ns)
FROM samples WHERE source_id = ? GROUP BY ALL
"""


class CaptureSource:
    """One capture. What was known stays as it is while nothing is added to it."""

    kind = "capture"

    def __init__(self, path: Path, look_s: float, memory: str, limit_bytes: float | None = None) -> None:
        """:param look_s: the least time between two reports; they take no more than a tenth of the time. Raises
        BadInputError for what is no capture."""
        Capture.open(path)
        self.name, self.every_s = printable(str(path)), look_s
        self._path, self._memory, self._limit_bytes = path, memory, limit_bytes
        self._metrics = MemoryMetrics(self.name)
        self._state: object = None
        self._known: list[Metric] = []

    def read(self, now_s: float) -> list[Metric]:
        """See :class:`Source`."""
        state = self._seen()
        if state != self._state or not self._known:
            self._known = self._report()
            self._state = state
        return self._known

    def close(self) -> None:
        """See :class:`Source`."""

    def _seen(self) -> tuple[tuple[str, int, int], ...]:
        """What the files look like: name, size and time of each part and of the manifest."""
        if self._path.is_file():
            status = self._path.stat()
            return ((self._path.name, status.st_size, status.st_mtime_ns),)
        found = []
        try:
            for file in [self._path / MANIFEST, *self._path.glob("*/*.parquet")]:
                with suppress(FileNotFoundError):
                    status = file.stat()
                    found.append((str(file.relative_to(self._path)), status.st_size, status.st_mtime_ns))
        except OSError as error:
            raise BadInputError(f"{self._path}: {error.strerror or error}") from None
        return tuple(sorted(found))

    def _report(self) -> list[Metric]:
        import duckdb

        capture = Capture.open(self._path)
        report = final_report(self._path, self._limit_bytes, memory=self._memory)
        recordings = [source for source in capture.manifest.sources if source.kind == "recording"]
        try:
            with capture.connect(memory_limit=self._memory) as con:
                memory = self._last(con, recordings[-1], capture.manifest.complete) if recordings else []
        except duckdb.Error as error:
            raise BadInputError(f"{self._path}: cannot be read: {str(error).splitlines()[0]}") from None
        one = (self.name,)
        written_s = max((mtime_ns for _, _, mtime_ns in self._seen()), default=0) / 1e9
        return [
            *report_metrics(self.name, report),
            *memory,
            gauge(
                "capture.complete", "1", "1 where the capture is whole; 0 while it is recorded, or cut short.",
                [(one, float(capture.manifest.complete))],
            ),
            gauge("capture.problems", "1", "What is wrong with the capture.", [(one, float(len(capture.problems)))]),
            gauge("capture.events", "1", "Memory events in it.", [(one, float(capture.rows("mem_events")))]),
            gauge("capture.last.write.timestamp", "s", "When it last grew, Unix time.", [(one, written_s)]),
        ]  # fmt: skip

    def _last(self, con: duckdb.DuckDBPyConnection, source: Source, complete: bool) -> list[Metric]:
        """The last readings of a recording; of processes, those that were still read then."""
        read = con.execute(LAST_READINGS, [source.id]).fetchall()
        rss = {scope_id: at for scope, scope_id, counter, _, at in read if scope == "process" and counter == "rss"}
        end = max(rss.values(), default=0)
        rows: list[Row] = [
            (scope, scope_id, counter, value)
            for scope, scope_id, counter, value, _ in read
            if scope != "process" or rss.get(scope_id) == end
        ]
        named = con.execute(
            "SELECT pid, name FROM processes WHERE source_id = ? ORDER BY start_ns", [source.id]
        ).fetchall()
        names = {str(pid): name for pid, name in named}
        if not complete and source.boot_id == _boot_id():  # names are written at the end of a recording
            names |= {pid: _name_now(pid) for pid in rss if pid not in names}
        return self._metrics.of(rows, names)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _name_now(pid: str) -> str:
    try:
        return Path(f"/proc/{int(pid)}/comm").read_text(errors="replace").strip()
    except (OSError, ValueError):
        return ""

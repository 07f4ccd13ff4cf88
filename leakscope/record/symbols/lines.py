"""Lines and inlined frames at the end of a recording, from the files that were mapped.

After the recording, as DWARF may be gigabytes that take seconds to read; in a process of its own, as it may be damaged.
"""

from __future__ import annotations

import contextlib
import resource
import time

import pyarrow as pa
import pyarrow.parquet as pq

from leakscope.capture import CaptureWriter
from leakscope.capture.rewrite import replace_tables
from leakscope.errors import LeakscopeError
from leakscope.model.recording import Loss
from leakscope.model.symbolized import Symbolized
from leakscope.model.tables import TABLES
from leakscope.record.symbols.address_space import AddressSpaces, Module
from leakscope.symbols.debug_files import SymbolFile
from leakscope.symbols.dwarf_worker import DwarfWorker
from leakscope.symbols.symbolize import UNUSABLE, symbolize

MAX_SECONDS = 20.0
"""What the end of a recording may take longer for lines; `leakscope symbolize` finds the rest, without a limit."""
SECONDS_AFTER_SIGNAL = 0.7
"""The same where somebody waits for the prompt."""
MAX_SEGMENTS = 16


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one: every mapped file stays open for its symbols."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def segments_of(spaces: AddressSpaces) -> dict[str, list[list[int]]]:
    """Build id → [file offset, bytes, address] of each executable segment, of the files that have frames.

    A separate debug file has lost its file offsets; with these its addresses can be found later.
    """
    return {
        module.known_build_id: [[s.offset, s.size_bytes, s.address] for s in module.code[:MAX_SEGMENTS]]
        for module in spaces.modules()
        if module.known_build_id and module.code
    }


class Lines:
    """Lines of one recording.

    Construct it when the recording is about to end, :meth:`look_up` when frames and stacks are written, and
    :meth:`put_in_place` when the capture is finished. A failure costs the lines and leaves the capture as it was.
    """

    def __init__(self, writer: CaptureWriter, spaces: AddressSpaces) -> None:
        self._writer = writer
        self._modules: dict[str, list[Module]] = {}
        self._result: Symbolized | None = None
        self._tables: dict[str, pa.Table] = {}
        self._failure = ""
        self._spaces = spaces
        self._worker = DwarfWorker()
        with contextlib.suppress(OSError):
            self._worker.start()  # while late frees are waited for and the probes are detached

    def look_up(self, most_s: float = MAX_SECONDS) -> None:
        """Find what there is to be found in at most so many seconds."""
        self._worker.deadline = time.monotonic() + most_s
        try:
            with self._worker:
                self._look_up()
        except Exception as error:  # whatever it is, the recording must end as it would without lines
            self._failure = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """End what was started for it, if :meth:`look_up` did not; safe to call twice."""
        self._worker.close()

    def _look_up(self) -> None:
        before = self._read()
        if not before:
            return
        for mapped in self._spaces.modules():
            self._modules.setdefault(mapped.path, []).append(mapped)
        frames, stacks, result = symbolize(before["frames"], before["stacks"], self._find, {}, self._worker)
        self._result = result
        self._tables = {"frames": frames, "stacks": stacks} if result.changed else {}

    @property
    def named(self) -> int:
        """Frames that got a name."""
        return self._result.unnamed_before - self._result.unnamed_after if self._result else 0

    def losses(self) -> list[Loss]:
        """What could have had lines."""
        if self._failure:
            return [Loss("lines", "symbol_unresolved", 1, f"no lines were looked up: {self._failure}")]
        broken = [m for m in (self._result.missing if self._result else []) if m.reason.startswith(UNUSABLE)]
        return [
            Loss("lines", "symbol_unresolved", missing.frames, f"lines of frames of {missing.module}: {missing.reason}")
            for missing in broken
        ]

    def put_in_place(self) -> list[str]:
        """Write the tables into the finished capture; notes about what went wrong."""
        if not self._tables:
            return []
        try:
            replace_tables(self._writer.path, self._writer.manifest, self._tables)
        except LeakscopeError as error:
            return [f"lines of native frames were found but not written: {error}"]
        return []

    def _find(self, module: str, build_id: str) -> list[SymbolFile]:
        found = (mapped for mapped in self._modules.get(module, ()) if mapped.build_id == build_id)
        return [file for mapped in found for file in mapped.symbol_files()]

    def _read(self) -> dict[str, pa.Table]:
        tables: dict[str, pa.Table] = {}
        for name in ("frames", "stacks"):
            paths = [self._writer.path / part.path for part in self._writer.manifest.parts if part.table == name]
            try:
                pieces = [pq.ParquetFile(path).read().cast(TABLES[name]) for path in paths]
            except (OSError, pa.ArrowException):
                return {}
            tables[name] = pa.concat_tables([TABLES[name].empty_table(), *pieces]).unify_dictionaries()
        return tables if tables["frames"].num_rows else {}

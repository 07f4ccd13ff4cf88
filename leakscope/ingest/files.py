"""Importing files into a capture: recognise, parse, number, write. One source a file; all of them or none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from leakscope.capture.addition import adding_to
from leakscope.capture.ids import Numbering, renumbered
from leakscope.capture.writer import CaptureWriter
from leakscope.errors import BadInputError
from leakscope.model.manifest import ClockAnchor, Source
from leakscope.model.tables import TABLES
from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.recognise import KINDS, parse, recognise

TIMES = ("ts_ns", "enter_ns", "exit_ns", "start_ns", "end_ns")
HASH_CHUNK = 1 << 20

Progress = Callable[[Path, int, int], None]
"""(file, done, total) while a file is read."""


@dataclass(frozen=True)
class Imported:
    """What became of one file, or of one live source."""

    path: Path | str  # of a live source its address
    source: Source
    rows: Mapping[str, int]
    tool: str
    version: str
    findings: tuple[str, ...]  # about this file
    limits: tuple[str, ...]  # of its kind

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "path": str(self.path),
            "kind": self.source.kind,
            "tool": self.tool,
            "version": self.version,
            "source_id": self.source.id,
            "clock": self.source.clock,
            "rows": dict(self.rows),
            "findings": list(self.findings),
            "limits": list(self.limits),
            "facts": {k: v for k, v in self.source.facts.items() if k not in ("findings", "tool", "version")},
        }


@dataclass
class Options:
    """What a user says about files that they do not say themselves. None: not said."""

    pid: int | None = None  # the process that a snapshot without one is of
    tz: str | None = None
    number_format: str | None = None
    pool_blocks: int | None = None  # usable blocks of the pool that recorded KV events are of

    def for_parser(self) -> dict[str, object]:
        """Those that were given, by the names of the parsers' parameters."""
        given = {"pid": self.pid, "tz": self.tz, "number_format": self.number_format}
        given["pool_blocks"] = self.pool_blocks
        return {name: value for name, value in given.items() if value is not None}


def kind_of(path: Path) -> str | None:
    """The kind of a file that can be imported, None for any other. Raises BadInputError when it cannot be read."""
    if path.is_dir():
        return None
    try:
        return recognise(path)
    except ReportError as error:
        raise BadInputError(str(error)) from error


def refuse_unknown(paths: Iterable[Path]) -> None:
    """Raises BadInputError for the first path that is no file that can be imported."""
    for path in paths:
        if kind_of(path) is None:
            raise BadInputError(_unknown(path))


def import_files(
    paths: Sequence[Path], capture: Path, options: Options | None = None, progress: Progress | None = None
) -> list[Imported]:
    """Import ``paths`` into ``capture``, which is made when it does not exist.

    One source a file, in their order. When one of them cannot be used nothing is imported: no capture appears, an
    existing one stays as it was. Raises BadInputError, OutputIncompleteError.
    """
    options = options or Options()
    refuse_unknown(paths)  # cheap, and before anything else
    with adding_to(capture) as (writer, existing):
        numbering = Numbering(existing)
        known = {s.facts.get("sha256"): s for s in writer.manifest.sources if s.facts.get("sha256")}
        imported = []
        for path in paths:
            digest = _sha256(path)
            if digest in known:
                raise BadInputError(f"{path}: is in the capture already, as source {known[digest].id}")
            report = _parse(path, options, progress)
            imported.append(enter(writer, numbering, report, path, path.name, digest))
            known[digest] = imported[-1].source
    return imported


def enter(
    writer: CaptureWriter, numbering: Numbering, report: ParsedReport, path: Path | str, name: str, digest: str = ""
) -> Imported:
    """Write the tables of ``report`` as the next source of a capture, named ``name``."""
    number = max((source.id for source in writer.manifest.sources), default=-1) + 1
    source = _source(report, name, number, digest)
    tables = renumbered(report.tables, numbering.take(report.tables), number)
    for table in TABLES:
        if table in tables:
            writer.write(table, tables[table])
    writer.manifest.sources.append(source)
    rows = {table: content.num_rows for table, content in tables.items()}
    return Imported(path, source, rows, report.tool, report.version, tuple(report.findings), tuple(report.limits))


def _parse(path: Path, options: Options, progress: Progress | None) -> ParsedReport:
    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(path, done, total)

    try:
        return parse(path, None, progress=tell, **options.for_parser())
    except ReportError as error:
        raise BadInputError(str(error)) from error


def _source(report: ParsedReport, name: str, number: int, digest: str) -> Source:
    """The manifest's entry. The name of a file is that without directories: they tell who somebody is."""
    times = [
        _bounds(table[column]) for table in report.tables.values() for column in TIMES if column in table.schema.names
    ]
    bounds = [bound for pair in times for bound in pair if bound]
    if report.clock == "none":
        bounds = []
    facts = {
        **report.facts,
        "tool": report.tool,
        "version": report.version,
        "findings": report.findings,
    }
    if digest:
        facts["sha256"] = digest
    utc, system = (int(report.facts.get(f"session_start_{name}_ns") or 0) for name in ("utc", "system_clock"))
    return Source(
        id=number,
        kind=report.kind,
        name=re.sub(r"[\x00-\x1f\x7f]", "?", name)[:255],
        clock=report.clock,
        start_ns=min(bounds, default=0),
        end_ns=max(bounds, default=0),
        anchors=[ClockAnchor(utc, system, 0)] if utc and system else [],
        facts=facts,
        limits=list(report.limits),
    )


def _bounds(column: pa.ChunkedArray) -> tuple[int, int]:
    """Least and greatest time that is not 0."""
    known = column.filter(pc.not_equal(column, 0))
    if not len(known):
        return 0, 0
    both = pc.min_max(known)
    return int(both["min"].as_py()), int(both["max"].as_py())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(HASH_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()


def _unknown(path: Path) -> str:
    if path.is_dir():
        return f"{path}: a directory; captures need no import, 'leakscope attribute' reads them"
    titles = ", ".join(kind.title for kind in KINDS)
    return f"{path}: no kind of report that leakscope knows; it imports {titles}"

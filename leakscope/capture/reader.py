"""Reading a capture, from any machine and in any state: complete, cut short, damaged or made by others."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from leakscope.capture.layout import PART_PATH, read_manifest
from leakscope.errors import BadInputError
from leakscope.model.manifest import Manifest, Part
from leakscope.model.tables import MAX_PART_ROWS, TABLES

if TYPE_CHECKING:
    import duckdb


class Capture:
    """A capture opened for reading: its manifest, its whole parts, and what is wrong with the rest.

    ``found`` are the parts that are read, listed in the manifest or not; ``left_out`` has one line for each
    part that is damaged or missing.
    """

    def __init__(self, path: Path, manifest: Manifest, found: list[Part], left_out: list[str]) -> None:
        """Use :meth:`open`."""
        self.path = path
        self.manifest = manifest
        self.found = found
        self.left_out = left_out

    @property
    def problems(self) -> list[str]:
        """One line when the capture is incomplete and one for each part left out; [] when all is well.

        Whoever shows numbers from a capture shows these lines too.
        """
        if self.manifest.complete:
            return list(self.left_out)
        reason = self.manifest.incomplete_reason or "its writer was stopped before it could finish"
        return [f"the capture is incomplete: {reason}", *self.left_out]

    @classmethod
    def open(cls, path: Path) -> Capture:
        """Open the capture directory ``path``, or a packed capture (unpacked until this process ends).

        Every part is checked: its bytes against the manifest's checksum, or, when the writer was killed
        before it listed the part, by decoding it. Raises BadInputError when ``path`` is no capture or of a
        newer schema; damage inside is no error but a line in ``problems``.
        """
        path = Path(path)
        if path.is_file():
            return cls._open_packed(path)
        if not path.exists():
            raise BadInputError(f"{path}: no such capture")
        if not path.is_dir():
            raise BadInputError(f"{path}: not a leakscope capture (neither a directory nor a packed file)")
        manifest = read_manifest(path)
        try:
            on_disk = _parts_on_disk(path)
        except OSError as error:
            raise BadInputError(f"{error.filename or path}: {error.strerror}") from None
        listed = {part.path: part for part in manifest.parts}
        candidates = [listed.get(name) or Part(name.split("/")[0], name, -1, "") for name in on_disk]
        missing = [f"{name}: missing" for name in sorted(listed.keys() - set(on_disk))]
        found, damaged = _check_all(path, candidates)
        return cls(path, manifest, found, missing + damaged)

    @classmethod
    def _open_packed(cls, path: Path) -> Capture:
        from leakscope.capture.pack import unpack

        directory = Path(tempfile.mkdtemp(prefix="unpacked-", dir=scratch_directory()))
        return cls.open(unpack(path, directory / "capture"))

    def parts(self, table: str) -> list[Path]:
        """Paths of the whole parts of ``table`` in the order of writing; KeyError for an unknown table."""
        TABLES[table]
        return [self.path / part.path for part in self.found if part.table == table]

    def rows(self, table: str) -> int:
        """Number of rows of ``table`` in the whole parts; KeyError for an unknown table."""
        TABLES[table]
        return sum(part.rows for part in self.found if part.table == table)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of table ``name`` in the order of writing, with its schema in :data:`TABLES`.

        ``columns`` picks columns and their order (KeyError for an unknown one). This loads everything into
        memory: for tables that scale with events use :meth:`connect`. Raises BadInputError when a part
        changed under the reader.
        """
        schema = TABLES[name]
        if columns is not None:
            schema = pa.schema([schema.field(column) for column in columns])
        pieces = []
        for path in self.parts(name):
            try:
                # ParquetFile, not read_table: that one would make columns of the path's folder names.
                piece = pq.ParquetFile(path, page_checksum_verification=True).read(columns=schema.names)
            except (OSError, ValueError, pa.ArrowException) as error:
                raise BadInputError(f"{path}: changed while it was read: {_first_line(error)}") from None
            pieces.append(piece.select(schema.names).cast(schema))
        return pa.concat_tables(pieces) if pieces else schema.empty_table()

    def connect(self, memory_limit: str | None = None, threads: int | None = None) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection with one view for each table (an empty one where the capture has no rows).

        The connection reaches the capture's own files and nothing else, and its configuration is locked.
        ``memory_limit`` is a size such as ``4GiB`` (beyond it DuckDB spills to a temporary directory);
        ``threads`` the number of threads. SQL of others goes through :func:`leakscope.capture.sql.select`.
        """
        from leakscope.capture.sql import connect

        return connect(self, memory_limit, threads)


@cache
def scratch_directory() -> str:
    """This process's directory for large temporary files, private to the user and removed at exit.

    It is in ``$TMPDIR``, else in /var/tmp (/tmp is often memory), else where the system has its own.
    """
    preferred = os.environ.get("TMPDIR") or "/var/tmp"
    root = preferred if os.access(preferred, os.W_OK | os.X_OK) else None
    directory = tempfile.TemporaryDirectory(prefix="leakscope-", dir=root)
    atexit.register(directory.cleanup)
    return directory.name


def remove_scratch() -> None:
    """Remove :func:`scratch_directory` now, for a process that ends without its exit handlers."""
    if scratch_directory.cache_info().currsize:
        shutil.rmtree(scratch_directory(), ignore_errors=True)


def _parts_on_disk(capture: Path) -> list[str]:
    """Relative paths of the regular files in the place of parts, sorted; links are not followed."""
    names = []
    for folder in os.scandir(capture):
        if folder.is_dir(follow_symlinks=False):
            for file in os.scandir(folder.path):
                name = f"{folder.name}/{file.name}"
                if PART_PATH.fullmatch(name) and file.is_file(follow_symlinks=False):
                    names.append(name)
    return sorted(names)


def _check_all(capture: Path, candidates: Iterable[Part]) -> tuple[list[Part], list[str]]:
    found: list[Part] = []
    problems: list[str] = []
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        for outcome in pool.map(lambda part: _check(capture, part), candidates):
            if isinstance(outcome, str):
                problems.append(outcome)
            else:
                found.append(outcome)
    return found, problems


def _check(capture: Path, part: Part) -> Part | str:
    """The part with its true row count and checksum, or the line that says why it is left out."""
    schema = TABLES.get(part.table)
    if schema is None:
        return f"{part.path}: left out: this leakscope knows no table {part.table!r}"
    path = capture / part.path
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if part.sha256 and digest != part.sha256:
            return f"{part.path}: left out: damaged (its checksum is not the manifest's)"
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            rows = parquet.metadata.num_rows
            if rows > MAX_PART_ROWS or (part.sha256 and rows != part.rows):
                return f"{part.path}: left out: damaged ({rows} rows do not fit the manifest)"
            if not _same_columns(parquet.schema_arrow, schema):
                return f"{part.path}: left out: its columns are not those of {part.table}"
            if not part.sha256:
                parquet.read()  # no checksum to trust: only decoding shows whether every page is whole
    except (OSError, ValueError, pa.ArrowException) as error:
        return f"{part.path}: left out: damaged ({_first_line(error)})"
    return Part(part.table, part.path, rows, digest)


def _same_columns(stored: pa.Schema, wanted: pa.Schema) -> bool:
    """Same names, order and types. Parquet keeps a dictionary's values but not the width of its indices."""
    if stored.names != wanted.names:
        return False
    return all(_plain(stored.field(name).type) == _plain(wanted.field(name).type) for name in wanted.names)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

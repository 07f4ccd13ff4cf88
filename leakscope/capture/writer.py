"""Writing a capture so that whatever kills the writer, everything up to the last part reads."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from leakscope import __version__
from leakscope.capture.layout import MANIFEST, dump_manifest, part_path, sync_directory, write_whole
from leakscope.capture.place import aside_of, put_in_place, refuse_existing
from leakscope.errors import BadInputError, OutputIncompleteError
from leakscope.model.manifest import Manifest, Part
from leakscope.model.tables import MAX_PART_ROWS, TABLES

TIME_COLUMNS = ("ts_ns", "enter_ns", "start_ns")
"""Parts are sorted by the first of these columns that the table has."""

WIDE_TYPES = (pa.int64(), pa.uint64())
"""Times, addresses and ids: many distinct values, close to each other."""

RESERVE_BYTES = 64 << 10
"""Room that is kept until something cannot be written: for the manifest that says so, and what is small."""

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})
"""What a disk says that is full or failing, as against a path that cannot be used."""


class CaptureWriter:
    """Writes one capture. All methods may be called from any thread; parts of one call keep their order.

    Until :meth:`finish`, the capture on disk says that it is incomplete. After a failed write the object
    stays usable: later writes are tried again, and ``finish`` records the failure in the manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Use :meth:`create`; this only binds an empty directory that holds the manifest already."""
        self.path = path
        self.manifest = manifest
        self._lock = threading.Lock()  # guards everything below, and the manifest's list of parts
        self._manifest_lock = threading.Lock()  # one rewrite of manifest.json at a time
        self.last_number = dict.fromkeys(TABLES, 0)
        self._unsynced: set[Path] = set()
        self._failure = ""
        self._reserve = _reserved(path)  # closed at the first failure

    @classmethod
    def create(cls, path: Path, manifest: Manifest, *, force: bool = False) -> CaptureWriter:
        """Make the capture directory ``path`` with ``manifest`` in it, marked incomplete.

        With ``force`` a capture that is there already is replaced; anything else is never touched. Raises
        BadInputError when ``path`` exists or cannot be made, OutputIncompleteError when the disk is full.
        """
        path = Path(path)
        refuse_existing(path, force)
        manifest.tool_version = manifest.tool_version or __version__
        manifest.complete = False
        aside = aside_of(path)
        try:
            aside.mkdir()
            write_whole(aside / MANIFEST, dump_manifest(manifest))
            put_in_place(aside, path, force)
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise OutputIncompleteError(f"{path}: could not be written: {error.strerror}") from None
            raise BadInputError(f"{path}: cannot make the capture: {error.strerror}") from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return cls(path, manifest)

    def write(self, table: str, data: pa.Table | pa.RecordBatch) -> None:
        """Write ``data`` as one part, or as several of at most MAX_PART_ROWS rows; no rows make no part.

        ``data`` has the columns of ``TABLES[table]`` in any order (text plain or dictionary-encoded); rows
        are sorted by time within a part. When this returns, the parts survive kill -9 and a full disk;
        :meth:`save_manifest` makes them survive a power loss for certain. Raises ValueError when the columns
        are wrong, OutputIncompleteError when the part could not be written (it is then not there at all).
        """
        rows = _conform(table, data)
        for start in range(0, rows.num_rows, MAX_PART_ROWS):
            self._write_part(table, _sorted_by_time(rows.slice(start, MAX_PART_ROWS)))

    def save_manifest(self) -> None:
        """Rewrite ``manifest.json`` atomically; OutputIncompleteError if that fails, and the old one stays.

        The caller changes ``manifest`` in the thread that saves it; only its parts are guarded here.
        """
        with self._manifest_lock:
            with self._lock:
                content = dump_manifest(self.manifest)
                unsynced, self._unsynced = self._unsynced, set()
            try:
                write_whole(self.path / MANIFEST, content)
                for directory in [*unsynced, self.path]:
                    sync_directory(directory)
            except OSError as error:
                with self._lock:
                    self._unsynced |= unsynced
                raise self._failed(MANIFEST, error) from None

    def finish(self, complete: bool = True, reason: str = "") -> None:
        """Write the final manifest: complete, or incomplete for ``reason``.

        A failed write makes the capture incomplete whatever is asked, with that failure as the reason. If
        the final manifest cannot be written after such a failure, nothing is raised again (the failure was);
        otherwise OutputIncompleteError. Either way the capture then says that it is incomplete.
        """
        failed_before = self._failure
        self.manifest.complete = complete and not failed_before
        self.manifest.incomplete_reason = "" if self.manifest.complete else (failed_before or reason)
        try:
            self.save_manifest()
        except OutputIncompleteError:
            if not failed_before:
                raise
        self._reserve.close()

    def _write_part(self, table: str, rows: pa.Table) -> None:
        content = _parquet_bytes(rows)
        digest = hashlib.sha256(content).hexdigest()
        with self._lock:
            self.last_number[table] += 1
            relative = part_path(table, self.last_number[table])
        directory = self.path / table
        try:
            directory.mkdir(exist_ok=True)
            write_whole(self.path / relative, content)
        except OSError as error:
            raise self._failed(relative, error) from None
        with self._lock:
            self.manifest.parts.append(Part(table, relative, rows.num_rows, digest))
            self._unsynced |= {directory, self.path}

    def _failed(self, what: str, error: OSError) -> OutputIncompleteError:
        message = (
            f"{self.path / what}: could not be written: {error.strerror}; "
            "the capture reads up to here and says that it is incomplete"
        )
        self._reserve.close()
        with self._lock:
            self._failure = self._failure or f"{what} could not be written: {error.strerror}"
        return OutputIncompleteError(message)


def _reserved(path: Path) -> ExitStack:
    """Room on the disk, in a file without a name: given back when it is closed, or with the process."""
    reserve = ExitStack()
    with contextlib.suppress(OSError):
        file = reserve.enter_context(tempfile.TemporaryFile(dir=path))  # noqa: SIM115 - the stack closes it
        os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
    return reserve


def _conform(table: str, data: pa.Table | pa.RecordBatch) -> pa.Table:
    """``data`` as a pa.Table with exactly the schema of ``table``."""
    schema = TABLES.get(table)
    if schema is None:
        raise ValueError(f"no table {table!r} in a capture")
    rows = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data
    if rows.schema.equals(schema):
        return rows
    if sorted(rows.column_names) != sorted(schema.names):
        differing = set(rows.column_names) ^ set(schema.names)
        raise ValueError(f"{table}: columns missing, unknown or repeated: {sorted(differing)}")
    return rows.select(schema.names).cast(schema)


def _sorted_by_time(rows: pa.Table) -> pa.Table:
    column = next((name for name in TIME_COLUMNS if name in rows.column_names), None)
    if column is None or rows.num_rows < 2:
        return rows
    times = rows[column].combine_chunks().to_numpy(zero_copy_only=False)
    if (times[1:] >= times[:-1]).all():  # the usual case; far cheaper than sorting again
        return rows
    return rows.sort_by(column)


def _parquet_bytes(rows: pa.Table) -> pa.Buffer:
    """The Parquet file of ``rows``, made in memory: it is small, is hashed once, fails with a plain errno.

    Encodings are chosen by column for the speed of the recorder: deltas for times, addresses and ids (a
    dictionary of them only costs), dictionaries for the rest, no null masks where there are no nulls, ranges
    only where readers skip by them. 200,000 mem_events take about 60 ms of one core; Parquet's defaults 140.
    Page checksums, because a part that the manifest does not list yet has no other.
    """
    wide = [f.name for f in rows.schema if f.type in WIDE_TYPES and not f.name.endswith("_bytes")]
    never_null = [rows[f.name].null_count == 0 for f in rows.schema]
    schema = pa.schema([f.with_nullable(not full) for f, full in zip(rows.schema, never_null, strict=True)])
    sink = pa.BufferOutputStream()
    pq.write_table(
        rows.cast(schema),
        sink,
        compression="zstd",
        compression_level=1,
        column_encoding=dict.fromkeys(wide, "DELTA_BINARY_PACKED"),
        use_dictionary=[name for name in rows.column_names if name not in wide],
        write_statistics=wide,
        write_page_checksum=True,
    )
    return sink.getvalue()

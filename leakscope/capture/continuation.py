"""Going on with a capture: another source is recorded into it, in place, as crash-safe as the first."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from leakscope.capture.ids import Numbering, renumbered
from leakscope.capture.layout import PART_PATH
from leakscope.capture.reader import Capture
from leakscope.capture.writer import CaptureWriter
from leakscope.errors import BadInputError
from leakscope.model.manifest import Source

CUT_SHORT = "its recorder was stopped before it could finish: its last rows, its processes and its losses are missing"


class ContinuingWriter(CaptureWriter):
    """Writes one more source into a capture that exists. Rows come as those of a source of their own: its number, and
    ids from 1; they are moved behind what is there."""

    def __init__(self, capture: Capture, source: Source) -> None:
        """Use :meth:`open`."""
        super().__init__(capture.path, capture.manifest)
        self._number = source.id
        self._bases = Numbering(capture).highest()

    @classmethod
    def open(cls, path: Path, source: Source) -> ContinuingWriter:
        """Go on with the capture directory ``path``: ``source`` gets the next number and is added to the manifest.

        The parts of a recorder that was killed stay. From then on the capture says that it is incomplete, until
        :meth:`finish`. Raises BadInputError for what is no capture or a damaged one, OutputIncompleteError when the
        disk is full.
        """
        if path.is_file():
            raise BadInputError(f"{path}: is one file; 'leakscope unpack' makes a capture of it that can be continued")
        capture = Capture.open(path)
        if capture.left_out:
            raise BadInputError(f"{path}: is damaged ({capture.left_out[0]}); record into a new capture")
        manifest = capture.manifest
        source.id = max((known.id for known in manifest.sources), default=-1) + 1
        for before in manifest.sources:
            if before.kind == "recording" and not before.end_ns and CUT_SHORT not in before.limits:
                before.limits.append(CUT_SHORT)
        manifest.parts = list(capture.found)
        manifest.sources.append(source)
        manifest.complete, manifest.incomplete_reason = False, ""
        writer = cls(capture, source)
        for part in capture.found:
            match = PART_PATH.fullmatch(part.path)
            assert match is not None
            number = int(part.path.rsplit("-", 1)[1].removesuffix(".parquet"))
            writer.last_number[part.table] = max(writer.last_number[part.table], number)
        writer.save_manifest()
        return writer

    def write(self, table: str, data: pa.Table | pa.RecordBatch) -> None:
        """See :meth:`CaptureWriter.write`."""
        rows = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data
        super().write(table, renumbered({table: rows}, self._bases, self._number)[table])


@contextlib.contextmanager
def sole_recorder(path: Path) -> Iterator[None]:
    """Hold the capture directory ``path``: while it is held nobody else can record into it.

    Raises BadInputError where somebody does. The kernel lets go of it when the holder ends, however it does.
    """
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise BadInputError(f"{path}: another leakscope records into it now; choose another name") from None
        yield
    finally:
        os.close(directory)

"""Adding sources to a capture: all of them, or none."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from leakscope.capture.layout import PART_PATH
from leakscope.capture.place import aside_of, put_in_place, refuse_existing
from leakscope.capture.reader import Capture
from leakscope.capture.writer import DISK_ERRORS, CaptureWriter
from leakscope.errors import BadInputError, OutputIncompleteError
from leakscope.model.manifest import Manifest


@contextlib.contextmanager
def adding_to(path: Path) -> Iterator[tuple[CaptureWriter, Capture | None]]:
    """A writer for new sources of the capture ``path``, and the capture as it is (None: it does not exist yet).

    What is written is made aside, with links to the parts that are there, and takes the place of the capture when the
    block ends well. When it fails, by whatever exception, the capture is as it was. Raises BadInputError when ``path``
    is no capture to add to (damaged, being recorded, packed), OutputIncompleteError when the disk is full.
    """
    existing = _existing(path)
    aside = aside_of(path)
    manifest = Manifest()
    if existing is not None:
        manifest.sources, manifest.parts = list(existing.manifest.sources), list(existing.found)
    complete = existing is None or existing.manifest.complete
    reason = existing.manifest.incomplete_reason if existing is not None else ""
    try:
        writer = CaptureWriter.create(aside, manifest)
        if existing is not None:
            _link_parts(existing, aside)
            for part in existing.found:
                match = PART_PATH.fullmatch(part.path)
                assert match is not None
                number = int(part.path.rsplit("-", 1)[1].removesuffix(".parquet"))
                writer.last_number[part.table] = max(writer.last_number[part.table], number)
        yield writer, existing
        writer.finish(complete, reason)
        put_in_place(aside, path, force=existing is not None)
    except OutputIncompleteError:
        raise OutputIncompleteError(
            f"{path}: could not be written, the disk is full or failing; nothing was added"
        ) from None
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise OutputIncompleteError(f"{path}: could not be written: {error.strerror}; nothing was added") from None
        raise BadInputError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _existing(path: Path) -> Capture | None:
    if not os.path.lexists(path):
        return None
    if path.is_file():
        raise BadInputError(f"{path}: is one file; 'leakscope unpack' makes a capture of it that can be added to")
    capture = Capture.open(path)
    if capture.left_out:
        raise BadInputError(f"{path}: is damaged ({capture.left_out[0]}); import into a new capture")
    if not capture.manifest.complete and not capture.manifest.incomplete_reason:
        raise BadInputError(
            f"{path}: is being recorded, or its recorder was killed; import into a new capture and attribute both"
        )
    refuse_existing(path, force=True)
    return capture


def _link_parts(existing: Capture, aside: Path) -> None:
    for part in existing.found:
        target = aside / part.path
        target.parent.mkdir(exist_ok=True)
        try:
            os.link(existing.path / part.path, target, follow_symlinks=False)
        except OSError:  # another file system below it, or one without links
            shutil.copyfile(existing.path / part.path, target, follow_symlinks=False)

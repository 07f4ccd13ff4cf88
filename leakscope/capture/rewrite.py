"""Replacing whole tables of a finished capture, so that at any moment the old capture or the new one is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from leakscope.capture.layout import PART_PATH, sync_directory
from leakscope.capture.place import aside_of, put_in_place, refuse_existing
from leakscope.capture.writer import DISK_ERRORS, CaptureWriter
from leakscope.errors import BadInputError, OutputIncompleteError
from leakscope.model.manifest import Manifest


def replace_tables(
    capture: Path,
    manifest: Manifest,
    tables: Mapping[str, pa.Table],
    target: Path | None = None,
    *,
    force: bool = False,
) -> Path:
    """Write `tables` instead of those of the capture directory `capture`; all its other parts stay as they are.

    The new capture is made beside its place, of hard links and the new parts, its manifest last, and then put in place
    of the old one by one rename: a crash leaves the one or the other. With `target` it goes there and `capture` stays.
    Raises BadInputError when it may not be replaced (it holds what leakscope did not write) or `target` exists (without
    `force`), OutputIncompleteError when the disk is full; then nothing has changed.
    """
    place, force = (capture, True) if target is None else (target, force)
    refuse_existing(place, force)
    aside = aside_of(place)
    try:
        writer = CaptureWriter.create(aside, replace(manifest, parts=[]))
        writer.manifest.parts += [part for part in manifest.parts if part.table not in tables]
        _link_parts(capture, aside, set(tables))
        for name, rows in tables.items():
            writer.write(name, rows)
        writer.finish(complete=manifest.complete, reason=manifest.incomplete_reason)
        put_in_place(aside, place, force)
    except OutputIncompleteError as error:
        raise OutputIncompleteError(f"{place}: not changed: {str(error).split(';')[0]}") from None
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise OutputIncompleteError(f"{place}: not changed: could not be written: {error.strerror}") from None
        raise BadInputError(f"{place}: cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return place


def _link_parts(capture: Path, aside: Path, without: set[str]) -> None:
    """The parts on disk of all other tables, listed in the manifest or not, whole or not."""
    for folder in os.scandir(capture):
        if folder.name in without or not folder.is_dir(follow_symlinks=False):
            continue
        names = [
            file.name
            for file in os.scandir(folder.path)
            if PART_PATH.fullmatch(f"{folder.name}/{file.name}") and file.is_file(follow_symlinks=False)
        ]
        if not names:
            continue
        (aside / folder.name).mkdir()
        for name in names:
            source, link = Path(folder.path) / name, aside / folder.name / name
            try:
                link.hardlink_to(source)
            except OSError:  # another file system, or one without hard links
                shutil.copyfile(source, link)
        sync_directory(aside / folder.name)

"""One file of a capture and back: a plain, reproducible tar of parts that are compressed already.

The reader here takes only what :func:`pack` writes: ustar headers, ``manifest.json`` first, then regular
files in the place of parts, each with the checksum that the manifest states. It reads header by header, 512
bytes each, because a general tar reader follows extensions (links, sparse maps, long headers) that no pack
needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from leakscope.capture.layout import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    dump_manifest,
    parse_manifest,
    sync_directory,
)
from leakscope.capture.place import aside_of, put_in_place, refuse_existing
from leakscope.capture.reader import Capture
from leakscope.errors import BadInputError, OutputIncompleteError

BLOCK_BYTES = 512
COPY_BYTES = 1 << 20
MAX_UNPACKED_BYTES = 64 << 30
MAX_MEMBERS = 100_000
"""Members that a pack may have: 100,000 parts of 200,000 rows are far more than a machine records."""


def pack(capture: Capture, target: Path, *, force: bool = False) -> Path:
    """Write ``capture`` as one file ``target`` and return it; the same capture gives the same bytes.

    The manifest goes first and lists every part; damaged parts are left out and named as the reason why the
    packed capture is incomplete. Raises BadInputError when ``target`` exists (without ``force``) or cannot be
    made, OutputIncompleteError when it cannot be completed; then no ``target`` is left behind.
    """
    if os.path.lexists(target) and not (force and target.is_file()):
        raise BadInputError(f"{target}: exists already; choose another name, or --force to replace a file")
    aside = aside_of(target)
    try:
        file = aside.open("xb")
    except OSError as error:
        raise BadInputError(f"{target}: cannot be made: {error.strerror}") from None
    try:
        with file:
            _write_members(capture, file)
            file.flush()
            os.fdatasync(file.fileno())
        aside.rename(target)
    except OSError as error:
        raise OutputIncompleteError(f"{target}: could not be completed: {error.strerror}; removed") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
    return target


def _write_members(capture: Capture, file: BinaryIO) -> None:
    manifest = replace(capture.manifest, parts=sorted(capture.found, key=lambda part: part.path))
    if capture.left_out:
        reasons = [manifest.incomplete_reason, f"left out when it was packed: {'; '.join(capture.left_out)}"]
        manifest.complete = False
        manifest.incomplete_reason = "; ".join(filter(None, reasons))
    content = dump_manifest(manifest)
    file.write(_header(MANIFEST, len(content)))
    file.write(content + _padding(len(content)))
    for part in manifest.parts:
        with (capture.path / part.path).open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            file.write(_header(part.path, size))
            if _copy(source, file, size) != part.sha256:
                raise BadInputError(f"{capture.path / part.path}: changed while it was packed")
        file.write(_padding(size))
    file.write(bytes(2 * BLOCK_BYTES))


def unpack(packed: Path, target: Path, *, force: bool = False, max_bytes: int = MAX_UNPACKED_BYTES) -> Path:
    """Make the capture directory ``target`` of the file ``packed`` and return it.

    Nothing appears under ``target`` before every member is checked. ``force`` replaces a capture, as in
    :meth:`CaptureWriter.create`. Raises BadInputError for a file that is no pack, is damaged or hostile, or
    holds more than ``max_bytes``, and when ``target`` exists; OutputIncompleteError when the disk is full.
    """
    refuse_existing(target, force)
    aside = aside_of(target)
    try:
        with packed.open("rb") as file:
            try:
                aside.mkdir()
            except OSError as error:
                raise BadInputError(f"{target}: cannot be made: {error.strerror}") from None
            _read_members(packed, file, aside, max_bytes)
            sync_directory(aside)
        put_in_place(aside, target, force)
    except OSError as error:
        if error.filename == str(packed):
            raise BadInputError(f"{packed}: {error.strerror}") from None
        raise OutputIncompleteError(f"{target}: could not be completed: {error.strerror}; removed") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _read_members(packed: Path, file: BinaryIO, target: Path, max_bytes: int) -> None:
    def hostile(why: str) -> BadInputError:
        return BadInputError(f"{packed}: not unpacked: {why}")

    member = _next_member(file)
    if member is None or member[0] != MANIFEST:
        raise BadInputError(f"{packed}: not a packed leakscope capture")
    size = member[1]
    if size > min(MAX_MANIFEST_BYTES, max_bytes):
        raise hostile("its manifest is too large")
    content = file.read(size)
    file.read(len(_padding(size)))
    awaited = {part.path: part for part in parse_manifest(content, str(packed)).parts}
    if len(awaited) > MAX_MEMBERS:
        raise hostile(f"more than {MAX_MEMBERS} members")
    (target / MANIFEST).write_bytes(content)
    room = max_bytes - size
    while (member := _next_member(file)) is not None:
        name, size = member
        part = awaited.pop(name, None)
        if part is None:
            raise hostile(f"its manifest does not list the member {name!r}, or lists it once and it comes twice")
        room -= size
        if room < 0:
            raise hostile(f"it holds more than {max_bytes} bytes; --max-bytes allows more")
        (target / part.table).mkdir(exist_ok=True)
        with (target / part.path).open("xb") as copy:
            if _copy(file, copy, size) != part.sha256:
                raise hostile(f"{name} is damaged (its checksum is not the manifest's)")
        file.read(len(_padding(size)))
    if awaited:
        raise hostile(f"{len(awaited)} parts that its manifest lists are missing, {min(awaited)} first")


def _next_member(file: BinaryIO) -> tuple[str, int] | None:
    """Name and size in bytes of the next member, whose content follows; None at the end mark."""
    block = file.read(BLOCK_BYTES)
    if block == bytes(BLOCK_BYTES):
        return None
    try:
        member = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file.name}: not a packed leakscope capture, or cut short ({error})") from None
    if member.type != tarfile.REGTYPE or member.size < 0:
        raise BadInputError(f"{file.name}: not unpacked: the member {member.name!r} is not a regular file")
    return member.name, member.size


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> str:
    """Copy ``size`` bytes, or what there is of them; the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    while size > 0 and (chunk := source.read(min(size, COPY_BYTES))):
        digest.update(chunk)
        target.write(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size  # owner 0, time 0, mode 0644: the same bytes whoever packs, and whenever
    return member.tobuf(tarfile.USTAR_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCK_BYTES)

"""Names and manifest of a capture directory: what both the writer and the distrusting readers agree on.

``NAME.lscope/manifest.json`` and ``NAME.lscope/<table>/part-000001.parquet``. A file is written under its
name plus :data:`ASIDE` and renamed when it is whole, so a name without that suffix is never half a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from leakscope.errors import BadInputError
from leakscope.model.manifest import Manifest
from leakscope.model.tables import SCHEMA_VERSION

FORMAT = "leakscope-capture"
"""Value of the manifest's ``format`` key: what tells a manifest of ours from any other ``manifest.json``."""

MANIFEST = "manifest.json"
ASIDE = ".tmp"
"""Suffix of a file that is still being written; readers ignore such files."""

PART_PATH = re.compile(r"(?P<table>[a-z_]{1,64})/part-[0-9]{6,9}\.parquet", re.ASCII)
"""The only shape that the path of a part may have (use ``fullmatch``): no ``..``, no absolute path."""

MAX_MANIFEST_BYTES = 64 << 20
"""A manifest takes about 200 bytes a part; a larger file is not one of ours, or not in good faith."""


def part_path(table: str, number: int) -> str:
    """Path of part ``number`` (from 1) of ``table``, relative to the capture."""
    return f"{table}/part-{number:06d}.parquet"


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``: indented UTF-8 JSON that a person can read."""
    return json.dumps({"format": FORMAT, **manifest.to_json()}, indent=1).encode() + b"\n"


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in ``data``, which nobody vouches for; ``where`` names its origin in messages.

    Raises BadInputError when it is not a manifest of a capture, or one of a newer schema. Part entries are
    checked one by one: a path out of the layout, a duplicate or a wrong type is refused as a whole.
    """
    not_ours = BadInputError(f"{where}: not the manifest of a leakscope capture")
    if len(data) > MAX_MANIFEST_BYTES:
        raise not_ours
    try:
        fields: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise not_ours from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise not_ours
    version = fields.get("schema_version")
    if not isinstance(version, int):
        raise not_ours
    if version > SCHEMA_VERSION:
        raise BadInputError(
            f"{where}: written with schema {version}, this leakscope reads up to {SCHEMA_VERSION}; "
            "upgrade leakscope to read it"
        )
    try:
        manifest = Manifest.from_json(fields)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise BadInputError(f"{where}: the manifest is damaged") from None
    seen: set[str] = set()
    for part in manifest.parts:
        types_hold = isinstance(part.path, str) and isinstance(part.sha256, str) and type(part.rows) is int
        match = PART_PATH.fullmatch(part.path) if types_hold else None
        if match is None or match["table"] != part.table or part.path in seen:
            raise BadInputError(f"{where}: the manifest names a part {part.path!r}, which no capture has")
        seen.add(part.path)
    return manifest


def read_manifest(capture: Path) -> Manifest:
    """The manifest of the capture directory ``capture``; raises BadInputError when there is none to trust."""
    path = capture / MANIFEST
    if not path.is_file():
        raise BadInputError(f"{capture}: not a leakscope capture (no {MANIFEST} in it)")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from None
    return parse_manifest(data, str(path))


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that the file is there whole or not at all, also after a power loss.

    The bytes reach the disk before the name does. When that fails, what was written is removed and the
    OSError raised. The rename itself is durable after :func:`sync_directory`.
    """
    aside = path.with_name(path.name + ASIDE)
    try:
        with aside.open("wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fdatasync(file.fileno())
        aside.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable (the renames done in it survive a power loss)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

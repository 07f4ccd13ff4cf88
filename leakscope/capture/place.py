"""Putting outputs in place whole, and replacing nothing but what leakscope itself has written."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from pathlib import Path

from leakscope.capture.layout import ASIDE, MANIFEST, PART_PATH, part_path, read_manifest
from leakscope.errors import BadInputError


def aside_of(path: Path) -> Path:
    """A fresh hidden name next to ``path`` under which an output is made before it is renamed."""
    path = path.resolve()  # so that "." and "x/.." have a name as well
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{ASIDE}")


def refuse_existing(path: Path, force: bool) -> None:
    """Raise BadInputError when ``path`` exists, unless ``force`` is given and it is a capture (or empty).

    A directory that also holds files which leakscope did not write is refused as well: ``force`` deletes.
    """
    if not os.path.lexists(path):
        return
    if not force:
        raise BadInputError(f"{path}: exists already; choose another name, or --force to replace it")
    if path.is_symlink() or not path.is_dir():
        raise BadInputError(f"{path}: exists and is not a leakscope capture; --force does not replace it")
    try:
        foreign = next((name for name in _contents(path) if not _is_ours(name)), None)
    except OSError as error:
        raise BadInputError(f"{error.filename or path}: {error.strerror}") from None
    if foreign is not None:
        raise BadInputError(f"{path}: holds {foreign}, which leakscope did not write; --force does not delete it")
    if any(path.iterdir()):
        read_manifest(path)


def put_in_place(aside: Path, path: Path, force: bool) -> None:
    """Rename the finished directory ``aside`` to ``path``; with ``force``, in place of the capture there.

    Raises BadInputError when ``path`` must not be replaced (:func:`refuse_existing`), OSError when it cannot.
    """
    refuse_existing(path, force)
    if path.exists() and _exchange(aside, path):
        shutil.rmtree(aside, ignore_errors=True)
        return
    replaced = aside_of(path) if path.exists() else None
    if replaced is not None:
        path.rename(replaced)
    try:
        aside.rename(path)  # fails on a directory that somebody filled meanwhile: nothing is overwritten
    except OSError:
        if replaced is not None:
            replaced.rename(path)
        raise
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places at once, so that neither is missing at any time; False where that cannot be.

    renameat2(2) with RENAME_EXCHANGE: glibc 2.28, and not on every file system.
    """
    at_cwd, rename_exchange = -100, 2
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0


def _contents(path: Path) -> list[str]:
    """Relative paths of all files and empty directories below ``path``; links are named, not followed."""
    names = []
    for folder, subfolders, files in os.walk(path):
        below = Path(folder).relative_to(path)
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        names += [(below / name).as_posix() for name in [*files, *links]]
        if not subfolders and not files and folder != str(path):
            names.append(f"{below.as_posix()}/")
    return names


def _is_ours(name: str) -> bool:
    whole = name.removesuffix(ASIDE)
    if name.endswith("/"):  # a table's folder whose first part was never finished
        whole = part_path(name.removesuffix("/"), 1)
    return whole == MANIFEST or PART_PATH.fullmatch(whole) is not None

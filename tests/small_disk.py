"""A file system of a stated size, to fill."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A tmpfs of ``size`` (as ``mount -o size=`` takes it) at ``place``. Where it cannot be mounted a test is skipped,
    loudly; it fails where CI=true.

    It is unmounted lazily: whoever else looks into it at that moment (a scan of all processes' files, a clearing of
    old test folders) makes a plain umount fail with "target is busy".
    """
    place.mkdir(exist_ok=True)
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]).returncode:
        reason = "NOT TESTED: needs root, to mount a small tmpfs; CI=true makes this a failure"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)

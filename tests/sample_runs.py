"""Samples as running programs, without any probe: what the tests of the samples share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recording import BIN, SAMPLES

KIB, MIB = 1024, 1024 * 1024


def command(name: str, *options: object) -> list[str]:
    python = [sys.executable, str(SAMPLES / name)] if name.endswith(".py") else [str(BIN / name)]
    return [*python, "--pause-us", "0", *map(str, options)]


def run(name: str, *options: object, **environment: str) -> Any:
    """The report of a sample that ran to its end."""
    done = subprocess.run(
        command(name, *options), capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def held(name: str, *options: object) -> Iterator[Any]:
    """The report of a sample that stays alive meanwhile."""
    with subprocess.Popen(command(name, *options, "--hold", 60), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            report = json.loads(process.stdout.readline())
            assert report["pid"] == process.pid
            yield report
        finally:
            process.kill()


def descriptors(pid: int, pattern: str) -> int:
    """Open descriptors of the process whose target matches."""
    targets: list[str] = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as its loader does with each library
            targets.append(str(descriptor.readlink()))
    return sum(bool(re.match(pattern, target)) for target in targets)


def mapped_bytes(pid: int, name: str = "") -> int:
    """Bytes of the process's maps of that name; '' = anonymous ones without a name."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if (fields[5] if len(fields) > 5 else "") == name and fields[4] == "0":
            start, end = (int(address, 16) for address in fields[0].split("-"))
            total += end - start
    return total

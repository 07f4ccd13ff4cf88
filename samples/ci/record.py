"""Records the three versions of the service and packs what `make ci-sample` checks.

Needs root. Usage: record.py [OUTPUT]

What says something about the machine alone (mapped files, probes, names of hosts) is left out of the packed captures,
so that they stay small and may be published.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from leakscope.capture import Capture, CaptureWriter, pack
from leakscope.model.manifest import Manifest, Source
from leakscope.model.tables import TABLES

HERE = Path(__file__).resolve().parent
VERSIONS = ("base", "refactored", "leaking")
WORK = Path("/tmp/leakscope-ci-sample")
"""A fixed place, so that paths in the captures do not tell whose checkout it was."""
LEFT_OUT = {"modules"}


def record(version: str) -> Path:
    """The capture of one run of a version."""
    shutil.copytree(HERE / version, WORK / version)
    path = WORK / f"{version}.lscope"
    command = ["/usr/bin/python3", "-I", str(WORK / version / "service.py")]
    options = ["--no-nvtx", "--loader", "core", "-o", str(path)]
    subprocess.run([sys.executable, "-m", "leakscope", "record", *options, "--", *command], check=True)
    return path


def slim(recorded: Path, target: Path) -> Path:
    """A capture of what the check needs of ``recorded``, packed."""
    capture = Capture.open(recorded)
    sources = [
        replace(source, host="", boot_id="", probes=[], limits=[], facts={}) for source in capture.manifest.sources
    ]
    sources = [replace(source, name=target.name.partition(".")[0]) for source in sources]
    copy = WORK / f"{target.name}.slim"
    writer = CaptureWriter.create(copy, Manifest(sources=[Source(**vars(source)) for source in sources]))
    for name in TABLES:
        if name not in LEFT_OUT and capture.rows(name):
            writer.write(name, capture.table(name))
    writer.finish()
    target.unlink(missing_ok=True)
    return pack(Capture.open(copy), target)


def main() -> int:
    output = Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "captures").resolve()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    output.mkdir(parents=True, exist_ok=True)
    for version in VERSIONS:
        print(slim(record(version), output / f"{version}.lscope.tar"))
    shutil.rmtree(WORK)
    return 0


if __name__ == "__main__":
    sys.exit(main())

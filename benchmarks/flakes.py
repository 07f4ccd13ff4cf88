"""Does the gate flake? Many recordings of a clean program and of one that leaks 1 KiB an iteration, each judged alone.

``python -m benchmarks.flakes`` records ``LEAKSCOPE_EVAL_RECORDINGS`` (100) of each and exits with 1 unless `leakscope
check` passed all clean ones and failed all others for the leak that is there. What went wrong is kept for a look.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT
from leakscope.cli.main import main as leakscope
from leakscope.errors import ExitCode

SAMPLE = ROOT / "samples" / "bin" / "leak_message"
CULPRIT = "post_and_forget"
OBJECT_BYTES = 1024
"""One message with its header: see samples/kernel/leak_message.c."""
ITERATIONS = 300
PAUSE_US = 2000
DEFAULT_RECORDINGS = 100


@dataclass
class Tally:
    """What `check` said of the recordings of one kind; ``wrong`` names the captures that it was mistaken about."""

    what: str
    recordings: int = 0
    right: int = 0
    exit_codes: dict[int, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, capture: Path, code: int, correct: bool) -> None:
        """Count one recording."""
        self.recordings += 1
        self.right += correct
        self.exit_codes[code] = self.exit_codes.get(code, 0) + 1
        if not correct:
            self.wrong.append(str(capture))

    def __str__(self) -> str:
        codes = ", ".join(f"exit {code}: {count}" for code, count in sorted(self.exit_codes.items()))
        mistakes = "".join(f"\n    wrong: {path}" for path in self.wrong)
        return f"{self.what}: {self.right} of {self.recordings} right ({codes}){mistakes}"


def record(capture: Path, keep: bool, iterations: int = ITERATIONS, loader: str = "auto") -> None:
    """Record one run of the sample. Raises subprocess.CalledProcessError."""
    command = [str(SAMPLE), "--keep", str(int(keep)), "--count", str(iterations), "--pause-us", str(PAUSE_US)]
    options = ["--force", "--loader", loader, "-o", str(capture)]
    subprocess.run(
        [sys.executable, "-m", "leakscope", "record", *options, "--", *command],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def check(capture: Path) -> tuple[int, dict[str, Any]]:
    """(exit code, object) of ``leakscope check --json``, without the start of a process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = leakscope(["check", "--json", str(capture)])
    return code, json.loads(printed.getvalue() or "{}")


def found(report: dict[str, Any], iterations: int) -> bool:
    """Whether the leak that leads is the one that is there, to the byte."""
    verdict = report["verdict"]
    culprit = verdict.get("culprit") or {}
    return (
        verdict["verdict"] == "leak"
        and str(culprit.get("frame", "")).startswith(CULPRIT)
        and verdict["kept_bytes"] == iterations * OBJECT_BYTES
    )


def campaign(recordings: int, place: Path, iterations: int = ITERATIONS, loader: str = "auto") -> tuple[Tally, Tally]:
    """So many recordings of each kind, one of each at a time. Captures that were judged rightly are removed."""
    clean, leaking = Tally("clean"), Tally("leaking 1 KiB an iteration")
    for number in range(recordings):
        captures = [place / f"{kind}-{number:03}.lscope" for kind in ("clean", "leaking")]
        with ThreadPoolExecutor() as both:
            list(both.map(lambda capture, keep: record(capture, keep, iterations, loader), captures, (False, True)))
        for tally, capture, keep in zip((clean, leaking), captures, (False, True), strict=True):
            code, report = check(capture)
            wanted = ExitCode.LEAK_FOUND if keep else ExitCode.DONE
            correct = code == wanted and (not keep or found(report, iterations))
            tally.add(capture, code, correct)
            if correct:
                shutil.rmtree(capture)
    return clean, leaking


def main() -> int:
    """Run the campaign and print its two lines."""
    recordings = int(os.environ.get("LEAKSCOPE_EVAL_RECORDINGS") or DEFAULT_RECORDINGS)
    place = Path(tempfile.mkdtemp(prefix="leakscope-flakes-"))
    tallies = campaign(recordings, place)
    for tally in tallies:
        print(tally)
    if all(not tally.wrong for tally in tallies):
        shutil.rmtree(place)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Who is behind an alarm, while the soak goes on: the capture so far is attributed, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

PATIENCE_S = 900.0
LESS_URGENT = 15
MAX_BYTES = 64 << 20


class CulpritSearch:
    """One search at a time. Its memory and its time are not the recorder's; a failure costs the answer alone."""

    def __init__(self, capture: Path) -> None:
        self._capture = capture
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None

    def start(self) -> None:
        """Begin a search, unless one is under way."""
        if self._process is not None:
            return
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed by poll, which may come hours later
        command = [sys.executable, "-m", "leakscope", "attribute", str(self._capture), "--json"]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the soak, which ends this one itself
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LESS_URGENT)

    def poll(self) -> str | None:
        """What was found, once; '' where nobody can be named; None while it is under way, or none was begun."""
        if self._process is None or self._process.poll() is None:
            return None
        self._process = None
        assert self._answer is not None
        with self._answer as answer:
            answer.seek(0)
            try:
                report = json.loads(answer.read(MAX_BYTES))
                return said(report)
            except (ValueError, KeyError, TypeError, AttributeError):
                return ""

    def stop(self) -> None:
        """End a search that is under way."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def said(report: dict[str, object]) -> str:
    """The first leak of a report that names a frame, in words; '' for none."""
    findings = report.get("findings")
    for verdict in [report.get("verdict"), *(findings if isinstance(findings, list) else [])]:
        if not isinstance(verdict, dict) or verdict.get("verdict") != "leak":
            continue
        culprit = verdict.get("culprit") or {}
        if frame := culprit.get("frame"):
            return f"so far {frame} keeps {int(verdict['kept_bytes']):,} B of {verdict['layer']} memory"
    return ""

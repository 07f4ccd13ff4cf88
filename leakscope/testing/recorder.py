"""The recording of this very process: ``leakscope record -p`` as a child that is started before the first iteration."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from leakscope.testing.settings import Settings

START_PATIENCE_S = 60.0
END_PATIENCE_S = 60.0
POLL_S = 0.01
SETTLE_S = 0.25
"""Objects that the kernel frees after a grace period (files, sockets) are gone by then."""


class NotRecording(Exception):
    """No recording could be made; the message is one line that says why."""


class Recording:
    """A running recording of this process. :meth:`finish` ends it and leaves a capture at ``path``."""

    def __init__(self, chosen: Settings, keep: Path | None = None) -> None:
        """Start, and wait until all probes are attached. Raises NotRecording.

        :param keep: where to leave the capture; by default it is removed by :meth:`close`.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="leakscope-test-"))
        self.path = keep or self._directory / "test.lscope"
        options = ["-p", str(os.getpid()), "-o", str(self.path), "--stacks", "all", "--force", "--json"]
        if chosen.heap:
            options.append("--malloc")
        if "NVTX_INJECTION64_PATH" not in os.environ:
            options.append("--no-nvtx")
        self._errors = (self._directory / "errors").open("w+")
        try:
            # -P: a test's working directory is full of names such as random.py.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "leakscope", "record", *options],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                start_new_session=True,  # Ctrl-C ends the tests, and these end the recording
            )  # fmt: skip
        except OSError as error:
            self._remove()
            raise NotRecording(f"{sys.executable}: {error.strerror}") from None
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> None:
        """Until the manifest tells when the evidence begins."""
        manifest = self.path / "manifest.json"
        end = time.monotonic() + START_PATIENCE_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise NotRecording(self._why())
            try:
                sources = json.loads(manifest.read_text())["sources"]
            except (OSError, ValueError, KeyError):
                sources = []
            if sources and sources[0]["start_ns"] and sources[0]["scope"].get("pids") == [os.getpid()]:
                return
            time.sleep(POLL_S)
        raise NotRecording(f"not recording after {START_PATIENCE_S:.0f} s")

    def _why(self) -> str:
        """The last line that the recorder said."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read(1 << 16).splitlines() if line.strip()]
        return lines[-1] if lines else f"leakscope record ended with status {self._process.returncode}"

    def finish(self) -> dict[str, Any]:
        """End the recording; its summary (leakscope.report.recording.summary_json). Raises NotRecording."""
        time.sleep(SETTLE_S)
        if self._process.poll() is not None:
            raise NotRecording(f"the recording ended by itself: {self._why()}")
        self._process.send_signal(signal.SIGINT)
        try:
            said, _ = self._process.communicate(timeout=END_PATIENCE_S)
            return dict(json.loads(said))
        except subprocess.TimeoutExpired:
            raise NotRecording(f"the recording did not end in {END_PATIENCE_S:.0f} s") from None
        except ValueError:
            raise NotRecording(self._why()) from None

    def close(self) -> None:
        """End whatever still runs and remove what was not to be kept; safe to call twice."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._remove()

    def _remove(self) -> None:
        self._errors.close()
        shutil.rmtree(self._directory, ignore_errors=True)

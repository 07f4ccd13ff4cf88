"""Judging in a process of its own, so that the one under test keeps its memory as it is: no pandas, no database.

The process is started before it is needed, and answers requests of one line of JSON each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leakscope.errors import LeakscopeError
from leakscope.testing.settings import Settings, from_json, to_json


class Judge:
    """The judging process. Close it."""

    def __init__(self, recorded: bool) -> None:
        """Start it; it loads what it needs meanwhile: more for recordings. Raises LeakscopeError."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "leakscope.testing.judge", *(["recorded"] if recorded else [])],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise LeakscopeError(f"{sys.executable}: {error.strerror}") from None

    def rising(self, series: Mapping[str, Sequence[int]]) -> list[str]:
        """The names of the counters that rise in every part of the run. Raises LeakscopeError."""
        return list(self._ask({"ask": "rising", "series": {name: list(values) for name, values in series.items()}}))

    def outcome(
        self,
        chosen: Settings,
        series: Mapping[str, Sequence[int]],
        lines: Sequence[dict[str, Any]],
        *,
        reason: str,
        capture: Path | None,
        windows: Sequence[tuple[int, int]],
    ) -> dict[str, Any]:
        """The outcome (leakscope.testing.outcome) as JSON, with ``text``, the report in words. Raises LeakscopeError.

        ``capture`` is None where nothing was recorded; ``reason`` says why.
        """
        return dict(
            self._ask(
                {
                    "ask": "outcome",
                    "settings": to_json(chosen),
                    "series": {name: list(values) for name, values in series.items()},
                    "lines": list(lines),
                    "reason": reason,
                    "capture": str(capture) if capture else None,
                    "windows": [list(window) for window in windows],
                }
            )
        )

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read(1 << 16).strip().splitlines()
            raise LeakscopeError(f"the judgement failed: {lines[-1] if lines else self._process.returncode}")
        return json.loads(answer)

    def close(self) -> None:
        """End it; safe to call twice."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


def answer(request: Mapping[str, Any]) -> Any:
    """What the judging process says to a request."""
    from leakscope.testing.lines import Line
    from leakscope.testing.outcome import courses_of, from_recording, from_samplers
    from leakscope.testing.report import text

    courses = courses_of(request["series"])
    if request["ask"] == "rising":
        return [course.counter.name for course in courses if course.rises]
    chosen, reason = from_json(request["settings"]), request["reason"]
    outcome = None
    if request["capture"]:
        try:
            windows = [(int(start), int(end)) for start, end in request["windows"]]
            outcome = from_recording(chosen, courses, Path(request["capture"]), windows)
        except LeakscopeError as error:
            reason = str(error)
    outcome = outcome or from_samplers(chosen, courses, reason)
    outcome.lines = [Line.from_json(line) for line in request["lines"]]
    return outcome.to_json() | {"text": text(outcome)}


def _main() -> None:
    if sys.argv[1:]:
        import leakscope.detect.attribution  # noqa: F401  in time

    for request in sys.stdin:
        print(json.dumps(answer(json.loads(request))), flush=True)


if __name__ == "__main__":
    _main()

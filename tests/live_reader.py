"""A recorder that a test watches from within: `python live_reader.py MODE LOADER CAPTURE PID`.

Prints a line of JSON with each reading of the recording; a line on stdin ends it.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from leakscope.record.live import LiveReadings
from leakscope.record.options import RecordOptions
from leakscope.record.recorder import Recorder
from leakscope.report.live.names import SiteNames


class Printing:
    """Prints readings, four a second."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._names = SiteNames(budget_s=10)

    def begin(self, readings: LiveReadings) -> None:
        """Start to print."""
        self._thread = threading.Thread(target=self._run, args=(readings,))
        self._thread.start()

    def end(self) -> None:
        """Stop to print."""
        self._ended.set()
        self._thread.join()

    def _run(self, readings: LiveReadings) -> None:
        while not self._ended.wait(0.25):
            reading = readings.read(100)
            sites = [
                (s.layer, s.kind, s.frame, s.range, s.kept_bytes, s.growth_bytes)
                for s in self._names.named(reading.sites)
            ]
            print(
                json.dumps({"live_bytes": reading.live_bytes, "sites": sites, "disk": reading.disk_bytes}), flush=True
            )


def main() -> None:
    """Record until a line comes."""
    mode, loader, path, pid = sys.argv[1:]
    options = RecordOptions(output=Path(path), pids=[int(pid)], mode=mode, loader=loader, interval_s=1.0)
    recorder = Recorder(options, observer=Printing())

    def wait() -> None:
        sys.stdin.readline()
        recorder.stop()

    threading.Thread(target=wait, daemon=True).start()
    print(json.dumps({"ended_by": recorder.run().ended_by}))


if __name__ == "__main__":
    main()

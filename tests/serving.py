"""Runs `leakscope serve` and reads what it serves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families

from leakscope.report.export.metrics import Metric
from leakscope.report.export.prometheus import metric_name

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(text: str) -> Series:
    """Values by name and labels, as prometheus_client's own parser reads them."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(of: Series, name: str, **labels: str) -> float | None:
    """The one series of a name that has these labels; None where there is none."""
    found = [v for (n, have), v in of.items() if n == name and labels.items() <= set(have)]
    assert len(found) <= 1, (name, labels, found)
    return found[0] if found else None


def values(metrics: Iterable[Metric]) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name, then by labels without the evidence."""
    return {
        metric_name(metric) + ("_total" if metric.counter else ""): {key[1:]: v for key, v in metric.samples}
        for metric in metrics
    }


class Running:
    """A server; ``told``: what it wrote on stderr."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.told: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(60), "".join(self.told)
        assert self.url, "".join(self.told)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.told.append(line)
            if found := re.match(r"serving (http://\S+)", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1].split("/")[0])

    def scrape(self, accept: str = "text/plain") -> str:
        request = urllib.request.Request(self.url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: bytes = answer.read()
            return content.decode()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(30)
        self._reader.join(10)
        return code


@contextmanager
def running(*arguments: str) -> Iterator[Running]:
    """`leakscope serve` on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "leakscope", "serve", "--listen", "127.0.0.1:0", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        yield Running(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()

"""A census of a service that allocates more than a million kernel objects a second: memory, disk, exactness."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import pandas as pd

from benchmarks.results import ROOT, Bar, Options, Result, Table
from benchmarks.workloads import STORMS_DIRECTORY, build_storms
from leakscope.capture import Capture
from leakscope.correlate.aggregate import BINS
from leakscope.correlate.sites import Holdings
from leakscope.detect.attribution import Options as AttributeOptions
from leakscope.detect.attribution import attribute
from leakscope.detect.judge import State, judge
from leakscope.model.results import Report

SECONDS, QUICK_SECONDS = 600, 5
THREADS = 2
KEEPS = "keep_eventfd"
CACHES = ("filp", "dentry", "kmalloc-64")
"""What each eventfd that is kept holds one of."""
_START_LIMIT_S = 60.0
_SETTLED_S = 3.0


@dataclass
class Census:
    """One recording of the storm ``locks``: ``kept`` eventfds, ``rss_bytes`` of the recorder (time, bytes)."""

    seconds: float
    kept: int
    report: Report
    allocated_objects: int
    disk_bytes: int
    rss_bytes: list[tuple[float, int]] = field(default_factory=list)
    cpu_s: float = 0.0  # of the recorder
    storm_cpu_s: float = 0.0
    recursion_misses: int = 0

    def survivors(self) -> dict[str, int]:
        """Objects that the report keeps where eventfds are kept, by slab cache."""
        sites = [site for site in self.report.sites if any(frame.split(" ")[0] == KEEPS for frame in site.stack)]
        return {cache: sum(s.live_objects for s in sites if s.slab_cache == cache) for cache in CACHES}

    def strangers(self) -> int:
        """Objects that are kept of the churn."""
        return sum(site.live_objects for site in self.report.sites if site.slab_cache == "file_lock_cache")

    def rss_state(self) -> State:
        """What leakscope's own rules say of the recorder's resident set, its pages taken for objects."""
        return judged(self.rss_bytes)


def judged(samples: list[tuple[float, int]]) -> State:
    """The judgement of one series of (seconds, bytes), as of a site that keeps pages."""
    times, values = np.array(samples, np.float64).T
    at = np.linspace(times[0], times[-1], BINS)
    curve = values[np.minimum(np.searchsorted(times, at), len(values) - 1)][None, :]
    page = os.sysconf("SC_PAGE_SIZE")
    row = {
        "holding": 0, "site": 0, "life": 0, "kind": "mmap_anon", "alloc_objects": int(curve.max()) // page,
        "live_bytes": int(curve[0, -1]), "live_objects": int(curve[0, -1]) // page, "stands_for": 1.0,
    }  # fmt: skip
    lives = pd.DataFrame([{"life": 0, "bin_ns": int((times[-1] - times[0]) * 1e9 / BINS)}])
    holdings = Holdings(pd.DataFrame([row]), np.array([0]), curve, curve / page, np.full((1, BINS), np.nan))
    return State(judge(holdings, lives, np.array([True]), np.zeros(1), np.zeros(1, bool))["state"].iloc[0])


def measure(seconds: int, *options: str, loader: str = "auto") -> Census:
    """Record the storm for some seconds. Raises RuntimeError when it cannot be recorded."""
    build_storms()
    with tempfile.TemporaryDirectory(prefix="leakscope-census-") as folder:
        path, messages = Path(folder) / "bench.lscope", Path(folder) / "messages"
        storm = subprocess.Popen(
            [str(STORMS_DIRECTORY / "bin" / "locks"), str(seconds), str(THREADS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        recorder = None
        try:
            with messages.open("w") as stderr:
                recorder = subprocess.Popen(
                    [sys.executable, "-m", "leakscope", "record", "--mode", "census", "--loader", loader, *options,
                     "-o", str(path), "-p", str(storm.pid)],
                    cwd=ROOT, stderr=stderr, stdin=subprocess.DEVNULL,
                )  # fmt: skip
            _await_start(recorder, path, messages)
            return _run(storm, recorder, path, messages)
        finally:
            for process in (recorder, storm):
                if process is not None and process.poll() is None:
                    process.kill()
                    process.wait()


def _await_start(recorder: subprocess.Popen[bytes], path: Path, messages: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline and recorder.poll() is None:
        try:
            if json.loads((path / "manifest.json").read_text())["sources"][0]["start_ns"]:
                return
        except (OSError, ValueError, IndexError):
            pass
        time.sleep(0.05)
    raise RuntimeError(f"the census did not start: {messages.read_text()[-500:]}")


def _run(storm: subprocess.Popen[str], recorder: subprocess.Popen[bytes], path: Path, messages: Path) -> Census:
    assert storm.stdin and storm.stdout
    rss: list[tuple[float, int]] = []
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(recorder.pid, rss, over))
    watcher.start()
    began = time.monotonic()
    _say(storm.stdin, "\n")
    told = storm.stdout.readline()
    took = time.monotonic() - began
    over.set()
    watcher.join()
    cpu_s, storm_cpu_s = _cpu_seconds(recorder.pid), _cpu_seconds(storm.pid)
    time.sleep(_SETTLED_S / 3)
    recorder.send_signal(signal.SIGINT)
    if recorder.wait(timeout=120) != 130 or not told:
        raise RuntimeError(f"the census failed: {messages.read_text()[-500:]}")
    storm.stdin.close()
    storm.wait()
    capture = Capture.open(path)
    with capture.connect() as con:
        report = attribute(con, capture.manifest, AttributeOptions())
        ((allocated,),) = con.execute(
            """SELECT sum(objects)::BIGINT FROM (SELECT max(allocated_objects) AS objects FROM census_totals
               WHERE site IN (SELECT id FROM census_sites WHERE layer = 'kernel') GROUP BY site)"""
        ).fetchall()
    return Census(
        seconds=took,
        kept=json.loads(told)["kept"],
        report=report,
        allocated_objects=allocated,
        disk_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        rss_bytes=rss,
        cpu_s=cpu_s,
        storm_cpu_s=storm_cpu_s,
        recursion_misses=sum(row.value or 0 for row in report.losses if row.what == "recursion_miss"),
    )


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (/proc/PID/stat, fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _say(stream: IO[str], text: str) -> None:
    stream.write(text)
    stream.flush()


def _watch(pid: int, rss: list[tuple[float, int]], over: threading.Event) -> None:
    """The recorder's resident set four times a second (/proc/PID/statm, second field, in pages)."""
    page = os.sysconf("SC_PAGE_SIZE")
    while not over.wait(0.25):
        rss.append((time.monotonic(), int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page))


def run(options: Options) -> Result:
    """One recording of ten minutes."""
    census = measure(QUICK_SECONDS if options.quick else SECONDS)
    rate = census.allocated_objects / census.seconds / 1e6
    warm = census.rss_bytes[len(census.rss_bytes) // 5 :]
    rows = [
        ["kernel objects allocated", f"{census.allocated_objects:,} ({rate:.2f} M/s)"],
        ["of each second of the storm's CPU", f"{census.allocated_objects / census.storm_cpu_s / 1e6:.2f} M"],
        ["recorder RSS after the first fifth, at the end", f"{warm[0][1] / 2**20:.1f}, {warm[-1][1] / 2**20:.1f} MiB"],
        ["leakscope's judgement of it", census.rss_state().name],
        ["recorder CPU", f"{census.cpu_s / census.seconds:.1%}"],
        ["capture", f"{census.disk_bytes / 2**20:.2f} MiB"],
        ["eventfds kept; found, by slab cache", f"{census.kept}; {census.survivors()}"],
        ["objects of the churn that look kept, recursion misses", f"{census.strangers()}, {census.recursion_misses}"],
    ]
    result = Result("census", "Census of a busy service")
    result.tables.append(Table(f"{census.seconds:.0f} s of record locks in {THREADS} threads", ["", ""], rows))
    result.bars = [
        Bar("census: objects allocated", rate, 1.0, at_least=True, unit="M objects/s"),
        Bar("census: capture", census.disk_bytes / 1e6, 50, unit="MB"),
        Bar("census: recorder RSS judged (0 steady, 1 plateau, 2 unclear, 3 leak)", int(census.rss_state()), 1),
        Bar("census: planted survivors that differ", sum(n != census.kept for n in census.survivors().values()), 0),
    ]
    result.figures = {
        "seconds": census.seconds,
        "allocated_objects": census.allocated_objects,
        "storm_cpu_s": census.storm_cpu_s,
        "cpu_s": census.cpu_s,
        "rss_bytes": [value for _, value in census.rss_bytes],
        "disk_bytes": census.disk_bytes,
        "kept": census.kept,
        "survivors": census.survivors(),
        "strangers": census.strangers(),
        "recursion_misses": census.recursion_misses,
    }
    return result

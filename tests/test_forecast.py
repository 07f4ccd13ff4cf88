"""When a limit is reached: exact for a perfect line, from the group's own limit or a given one."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from leakscope.detect.forecast import forecast
from leakscope.detect.series.counters import Counter
from leakscope.model.results import Growth
from leakscope.report.forecast import forecast_line

GIB = 2**30
RATE = 100_000  # bytes a second, from 1 GiB on, over 10 hours


def one(name: str, value: float) -> Counter:
    return Counter(name, np.array([0.0]), np.array([value]), True)


def test_the_interval_of_the_rate_gives_that_of_the_time() -> None:
    growth = Growth("rss_bytes", 1000.0, 500.0, 2000.0)

    found = forecast([one("cgroup", 6e6), one("rss", 5e6), one("cgroup_limit", 8e6)], growth)

    assert found is not None
    assert (found.counter, found.level_bytes, found.limit_bytes) == ("cgroup", 6e6, 8e6)
    assert (found.expected_s, found.earliest_s, found.latest_s) == (2000.0, 1000.0, 4000.0)


def test_never_where_the_interval_reaches_no_growth() -> None:
    found = forecast([one("rss", 0.0)], Growth("rss_bytes", 1024.0, -1.0, 2048.0), 1024.0 * 3600)

    assert found is not None and found.latest_s is None
    assert forecast_line(found) == "rss 0 B reaches 3.5 MiB in 60 min if growth goes on (30 min … never)"


def test_no_limit_no_forecast() -> None:
    assert forecast([one("rss", 5e6)], Growth("rss_bytes", 1000.0, 500.0, 2000.0)) is None
    assert forecast([one("rss", 5e6)], None, 1e9) is None


def samples(path: Path, limit: int | None) -> Path:
    with path.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["t_s", "rss_bytes", *(["cgroup_bytes", "cgroup_limit_bytes"] if limit else [])])
        for t in range(0, 36_000, 60):
            rss = GIB + RATE * t
            rows.writerow([t, rss, *([rss, limit] if limit else [])])
    return path


def attributed(*arguments: str) -> str:
    command = [sys.executable, "-m", "leakscope", "attribute", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


LAST = GIB + RATE * 35_940


@pytest.mark.parametrize("own", [True, False], ids=["limit of the group", "--limit"])
def test_attribute_forecasts(tmp_path: Path, own: bool) -> None:
    path = samples(tmp_path / "s.csv", 8 * GIB if own else None)
    option = [] if own else ["--limit", "8GiB"]

    report = json.loads(attributed(str(path), "--json", *option))
    said = attributed(str(path), *option)

    found = report["verdict"]["forecast"]
    assert report["verdict"]["verdict"] == "leak"
    assert found["limit_bytes"] == 8 * GIB and found["level_bytes"] == LAST
    assert found["expected_s"] == pytest.approx((8 * GIB - LAST) / RATE, rel=0.01)
    assert found["earliest_s"] <= found["expected_s"] <= found["latest_s"]
    assert "reaches 8.0 GiB in" in " ".join(said.split())
    without = json.loads(attributed(str(samples(tmp_path / "n.csv", None)), "--json"))
    assert without["verdict"]["forecast"] is None

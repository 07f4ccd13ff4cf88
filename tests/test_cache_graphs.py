"""Correlation of graph-launch latency with what is bound, on traces whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from leakscope.cache.graphs import graph_launches
from leakscope.cli.cache import cache as app
from leakscope.errors import BadInputError


def trace(path: Path, n: int = 2000, per_bind_us: float = 0.05) -> Path:
    """Latency grows with binds; the page table follows the binds and has no effect of its own."""
    random = np.random.default_rng(7)
    binds = random.integers(1, 400, n)
    pages = binds * 16 + random.integers(0, 3000, n)
    latency = 30 + per_bind_us * binds + random.normal(0, 3, n)
    rows = zip(latency, binds, pages, strict=True)
    path.write_text(
        "graph,latency_us,bind_count,page_table_entries\n"
        + "".join(f"g{index % 3},{a:.6f},{b},{c}\n" for index, (a, b, c) in enumerate(rows))
    )
    return path


def test_latency_that_grows_with_binds(tmp_path: Path) -> None:
    path = trace(tmp_path / "graphs.csv")
    found = graph_launches(path)
    assert (found.launches, found.graphs, found.left_out) == (2000, 3, 0)
    binds, pages = found.correlations
    values = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(1, 2, 3))
    assert binds.spearman == pytest.approx(stats.spearmanr(values[:, 0], values[:, 1])[0])
    assert binds.verdict == "grows" and binds.low is not None and binds.high is not None
    assert binds.low < binds.spearman < binds.high < 1  # type: ignore[operator]
    assert binds.slope_us == pytest.approx(0.05, rel=0.1)
    # the page table goes with it, but not by itself
    assert pages.verdict == "grows" and pages.partial is not None and abs(pages.partial) < 0.06
    assert binds.partial is not None and binds.partial > 0.5


def test_the_interval_covers_as_often_as_it_says(tmp_path: Path) -> None:
    # given 200 traces of 60 launches without any correlation, autocorrelated ones too
    random = np.random.default_rng(11)
    for phi in (0.0, 0.8):
        shown = 0
        for _ in range(200):
            noise = random.normal(size=(2, 160))
            for t in range(1, 160):
                noise[:, t] += phi * noise[:, t - 1]
            rows = [f"{a + 100:.6f},{b:.6f}" for a, b in noise[:, 100:].T]
            (tmp_path / "t.csv").write_text("latency_us,binds\n" + "\n".join(rows) + "\n")
            shown += graph_launches(tmp_path / "t.csv").correlations[0].verdict in ("grows", "falls")
        assert shown <= 22, phi  # 5 % of 200 and 2.3 standard deviations … of a short series' effective n


def test_what_cannot_be_told_is_said(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    rows = [{"latency_ns": 1000 + i, "bind_count": 5, "page_table_bytes": 4096 if i < 4 else None} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    binds, pages = graph_launches(path).correlations
    assert (binds.verdict, binds.why_not) == ("cannot tell", "bind_count never changes")
    assert (pages.verdict, pages.launches) == ("cannot tell", 4)
    result = CliRunner().invoke(app, ["graphs", str(path)])
    assert result.exit_code == 0 and "bind_count never changes" in result.output
    body = json.loads(CliRunner().invoke(app, ["graphs", str(path), "--json"]).output)
    assert [row["verdict"] for row in body["correlations"]] == ["cannot tell"] * 2


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "latency_us,binds\nx,1\n", '{"latency_us": 3}\n'])
def test_bad_traces_are_told_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(BadInputError, match=r"bad\.csv: [^\n]+$"):
        graph_launches(path)

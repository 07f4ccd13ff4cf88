"""The HTML report of a large capture: how long it takes to write, how large it is, and how soon a browser shows it.

Beside it, the same two pictures by plotly and by vega (``pip install vl-convert-python``, which carries its scripts): a
time series of 8 × 2,000 points and an icicle of 1,000 nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attribute_scale import build
from benchmarks.results import ROOT, Bar, Options, Result, Spread, Table

MAX_BYTES, MAX_FIRST_SCREEN_S = 10e6, 3.0
_PAINTED = """new Promise(done => { const look = () => { const painted = performance.getEntriesByName(
    'first-contentful-paint'); painted.length ? done(painted[0].startTime) : setTimeout(look, 10); }; look(); })"""
_DRAWN = "id => document.getElementById(id).dataset.state === 'drawn'"


def run(options: Options) -> Result:
    """The page of 10 million events (20,000 with ``quick``), opened ``rounds`` times in headless Chromium."""
    program = os.environ.get("LEAKSCOPE_CHROMIUM") or shutil.which("chromium")
    if not program:
        raise RuntimeError("no chromium; LEAKSCOPE_CHROMIUM=PROGRAM names one")
    millions, rounds = (0.02, 1) if options.quick else (10.0, options.rounds)
    result = Result("page", "HTML report", figures={"million_events": millions})
    with tempfile.TemporaryDirectory() as folder:
        capture, page = Path(folder) / "run.lscope", Path(folder) / "out.html"
        build(capture, round(millions * 1e6))
        alone = _seconds(["attribute", str(capture), "--json"])
        written = _seconds(["attribute", str(capture), "--json", "--report", str(page)])
        size = page.stat().st_size
        opened = [_opened(program, page) for _ in range(rounds)]
        pictures = [[*row, *_drawn(program, file, rounds)] for row, file in _pictures(Path(folder))]
    first, ready, scripted, slowest = (Spread.of(one[index] for one in opened) for index in range(4))
    rows = [[f"{millions:g}", f"{written - alone:+.1f}", f"{size / 1e6:.1f}", first.text(), ready.text(),
             scripted.text(), slowest.text()]]  # fmt: skip
    headers = ["M events", "seconds more to write", "MB", "first screen, s", "page loaded, s", "first figure, s"]
    result.tables.append(Table("The page, median (lowest-highest)", [*headers, "slowest figure, s"], rows))
    result.tables.append(Table("Pictures by library", ["", "", "MB", "drawn, s"], pictures))
    result.bars.append(Bar("page of 10 M events", size / 1e6, MAX_BYTES / 1e6, unit="MB"))
    result.bars.append(Bar("first screen", first.median, MAX_FIRST_SCREEN_S, unit="s"))
    result.figures |= {"bytes": size, "first_screen_s": first.median, "slowest_figure_s": slowest.median}
    result.notes.append(
        "The first screen is text and stands before plotly's script (4.8 MB of the page) is read. A figure is drawn "
        "when it is scrolled to; the slowest is the icicle or the first that needs the script compiled."
    )
    return result


def _seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "leakscope", *arguments], cwd=ROOT, capture_output=True, check=True)
    return time.perf_counter() - began


def _opened(program: str, page: Path) -> tuple[float, float, float, float]:
    """Seconds until text is painted, the page is loaded and its first figure drawn; of the slowest figure, from when it
    is scrolled to."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        began = time.perf_counter()
        tab.goto(page.as_uri(), wait_until="load")
        loaded = time.perf_counter() - began
        first = tab.evaluate(_PAINTED) / 1000
        figures = tab.locator("figure.figure")
        drawn, slowest = 0.0, 0.0
        for number, figure in enumerate(figures.all()):
            at = time.perf_counter()
            figure.scroll_into_view_if_needed()
            tab.wait_for_function(_DRAWN, arg=figure.get_attribute("id"))
            drawn = drawn if number else time.perf_counter() - began
            slowest = max(slowest, time.perf_counter() - at)
        browser.close()
    return first, loaded, drawn, slowest


def _drawn(program: str, page: Path, rounds: int) -> list[str]:
    """MB of a page, and seconds until it has drawn: it says so (``window.drawn``), or vega's drawing is there."""
    from playwright.sync_api import sync_playwright

    seconds = []
    with sync_playwright() as playwright:
        for _ in range(rounds):
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            tab = browser.new_page()
            began = time.perf_counter()
            tab.goto(page.as_uri(), wait_until="commit")
            tab.wait_for_function("window.drawn || document.querySelector('.vega-embed canvas, .vega-embed svg')")
            seconds.append(time.perf_counter() - began)
            browser.close()
    return [f"{page.stat().st_size / 1e6:.1f}", Spread.of(seconds).text()]


def _pictures(folder: Path) -> list[tuple[list[str], Path]]:
    """Pages with one picture each, by plotly and, where it is installed, by vega."""
    from plotly.offline import get_plotlyjs

    rng = np.random.default_rng(1)
    lines = np.cumsum(rng.normal(0.1, 1, (8, 2000)), axis=1)
    parents = [0] + [int(rng.integers(max(0, i - 60), i)) for i in range(1, 1000)]
    values = np.where(np.isin(np.arange(1000), parents), 0, rng.integers(1, 100, 1000)).tolist()
    names = [f"function_{i} (file.py:{i})" for i in range(1000)]
    icicle = {"type": "icicle", "ids": [str(i) for i in range(1000)], "labels": names, "values": values,
              "parents": ["", *(str(p) for p in parents[1:])], "branchvalues": "remainder"}  # fmt: skip
    drawn: dict[tuple[str, str], str] = {}
    for what, data in (("series", [{"y": line.tolist()} for line in lines]), ("icicle", [icicle])):
        call = f"Plotly.newPlot('p', {json.dumps(data)}, {{}}).then(() => {{ window.drawn = true; }})"
        drawn["plotly", what] = f"<div id=p></div><script>{get_plotlyjs()}</script><script>{call}</script>"
    try:
        import vl_convert
    except ImportError:
        pass
    else:
        drawn["vega", "series"] = vl_convert.vega_to_html(_vega_series(lines), bundle=True)
        drawn["vega", "icicle"] = vl_convert.vega_to_html(_vega_icicle(parents, values, names), bundle=True)
    made = []
    for (library, what), text in drawn.items():
        file = folder / f"{library}-{what}.html"
        file.write_text(text)
        made.append(([library, what], file))
    return made


def _vega_series(lines: np.ndarray) -> dict[str, Any]:
    points = [{"x": x, "y": float(y), "of": n} for n, line in enumerate(lines) for x, y in enumerate(line)]
    scales = [
        {"name": axis, "range": size, "domain": {"data": "points", "field": axis}}
        for axis, size in (("x", "width"), ("y", "height"))
    ]
    line = {"type": "line", "from": {"data": "one"}, "encode": {"update": {
        "x": {"scale": "x", "field": "x"}, "y": {"scale": "y", "field": "y"}}}}  # fmt: skip
    facet = {"facet": {"name": "one", "data": "points", "groupby": "of"}}
    return {"width": 1100, "height": 400, "data": [{"name": "points", "values": points}], "scales": scales,
            "axes": [{"scale": "x", "orient": "bottom"}, {"scale": "y", "orient": "left"}],
            "marks": [{"type": "group", "from": facet, "marks": [line]}]}  # fmt: skip


def _vega_icicle(parents: list[int], values: list[int], names: list[str]) -> dict[str, Any]:
    rows = [{"id": i, "parent": parents[i] if i else None, "v": values[i], "name": names[i]} for i in range(len(names))]
    laid_out = [{"type": "stratify", "key": "id", "parentKey": "parent"},
                {"type": "partition", "field": "v", "size": [{"signal": "width"}, {"signal": "height"}]}]  # fmt: skip
    box = {"x": {"field": "x0"}, "x2": {"field": "x1"}, "y": {"field": "y0"}, "y2": {"field": "y1"}}
    label = {"x": {"field": "x0"}, "y": {"field": "y0", "offset": 10}, "text": {"field": "name"},
             "limit": {"signal": "datum.x1 - datum.x0"}}  # fmt: skip
    return {"width": 1100, "height": 400, "data": [{"name": "tree", "values": rows, "transform": laid_out}],
            "marks": [{"type": "rect", "from": {"data": "tree"}, "encode": {"update": box}},
                      {"type": "text", "from": {"data": "tree"}, "encode": {"update": label}}]}  # fmt: skip

"""The page of ``leakscope soak``: looks, restarts, gaps, the forecast; three days at a second in a small file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from browser import PHONE, draw_all, opened
from html_pages import HOSTILE, figure_of, fits, page_and_json, rows_of
from synthetic import SyntheticCapture
from test_soak import GIB, HOUR, MIB, write_service

from leakscope.capture import Capture
from leakscope.cli.main import main
from leakscope.detect.recorded import Life, Readings
from leakscope.detect.timeline import thinned
from leakscope.model.forecast import Forecast
from leakscope.model.results import Culprit, Growth, Report, Verdict
from leakscope.model.soak import Happening, Look, SoakSummary
from leakscope.model.soak_course import Gap, SoakCourse, WatchedProcess
from leakscope.model.timeline import COUNTER, Series, Timeline
from leakscope.report.html.soak import soak_page
from leakscope.report.html.soak_figures import LONGEST_SHARE, forecast_figure
from leakscope.report.text import printable
from leakscope.soak.course import soak_course, watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# --- the page of a replay


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(the page, the JSON) of a day of a service that leaks 48.6 MiB an hour."""
    folder = tmp_path_factory.mktemp("soak")
    file = folder / "page.html"
    readings = write_service(folder / "leak.csv", 48.6, hours=24)
    return file, page_and_json(file, "soak", "--replay", readings, "--look", "3h")


def test_the_page_has_the_numbers_of_the_json_report(made: tuple[Path, dict[str, Any]], browser: Browser) -> None:
    file, report = made
    soak = report["soak"]
    with opened(browser, file) as page:
        draw_all(page)
        # then every look
        looks = rows_of(page, "Every look")
        assert [(row["at"], row["evidence"], row["needed"], row["alpha"]) for row in looks] == [
            (look["elapsed_s"], look["score"], look["needed"], look["alpha"]) for look in soak["looks"]
        ]
        assert [row["said"] == "ALARM" for row in looks] == [look["alarm"] for look in soak["looks"]]
        assert [row["rate"] for row in looks] == [look["growth"]["bytes_per_s"] for look in soak["looks"]]
        assert [row["limit reached in"] for row in looks if row["said"] == "ALARM"] == [
            look["forecast"]["expected_s"] for look in soak["looks"] if look["alarm"]
        ]
        drawn = figure_of(page, "looks-figure")["data"]
        assert drawn[0]["x"] == [look["elapsed_s"] / HOUR for look in soak["looks"]] and len(drawn[0]["x"]) == 7
        assert drawn[1]["y"] == [look["needed"] for look in soak["looks"]]
        # and the forecast
        told = {row[""]: row["value"] for row in rows_of(page, "Forecast of cgroup")}
        assert told["level now"] == soak["forecast"]["level_bytes"] and told["limit"] == 8 * GIB
        assert told["reached in"] == soak["forecast"]["expected_s"]
        # and the verdict at the end, with the first alarm
        head = page.locator(".headline").inner_text()
        assert (
            "LEAK" in head
            and "rss_bytes: host grows by" in head
            and f"after {soak['first_alarm_s'] / HOUR:.1f} h" in head
        )
        # and an alarm where one was
        alarms = [row["at"] for row in rows_of(page, "Happenings") if row["what"] == "alarm"]
        assert alarms == [one["elapsed_s"] for one in soak["happenings"] if one["what"] == "alarm"] != []


def test_a_service_that_is_clean_has_no_forecast(tmp_path: Path) -> None:
    readings = write_service(tmp_path / "clean.csv", 0, hours=8)
    report = page_and_json(tmp_path / "page.html", "soak", "--replay", readings, "--look", "2h")
    text = (tmp_path / "page.html").read_text()
    assert report["verdict"]["verdict"] != "leak" and report["soak"]["forecast"] is None
    assert 'id="looks-figure"' in text and 'id="forecast-figure"' not in text and "<dd><bdi>none</bdi></dd>" in text


def test_a_page_that_has_no_place_is_said_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readings = write_service(tmp_path / "short.csv", 0, hours=1)
    assert main(["soak", "--replay", str(readings), "--report", str(tmp_path / "no" / "page.html")]) == 2
    assert capsys.readouterr().err == f"leakscope: {tmp_path}/no/page.html: there is no folder {tmp_path}/no\n"


# --- restarts and gaps


def test_restarts_are_lives_of_processes(tmp_path: Path) -> None:
    # given two hours of a process with a hostile name, and two of one that took its place
    capture = SyntheticCapture(4 * HOUR)
    capture.process(7, exit_s=2 * HOUR)
    capture.process(9, start_s=2 * HOUR + 5)
    for at in range(0, 4 * 3600, 60):
        capture.sample(at, "rss", 100.0 * MIB + at % 7 * 1000, "process", str(7 if at < 2 * HOUR else 9))
    path = capture.write(tmp_path / "run.lscope")
    course = soak_course(Capture.open(path))
    assert [(one.pid, one.start_s, one.end_s, one.root) for one in course.processes] == [
        (7, 0.0, 2 * HOUR, True),
        (9, 2 * HOUR + 5, None, True),
    ]
    assert (course.processes_total, course.gaps) == (2, ())
    # and the page tells the restart
    report = page_and_json(tmp_path / "page.html", "soak", "--replay", path)
    text = (tmp_path / "page.html").read_text()
    assert report["soak"]["generations"] == 2
    assert "2 processes, 2 of them targets, 1 alive at the end; restarted 1 time" in text
    assert "the target was started again: p9 (PID 9)" in text


def test_children_come_after_targets_and_short_ones_last() -> None:
    times = np.arange(0.0, 100.0)
    readings = Readings({("process", str(pid), "rss"): (times, times) for pid in (1, 2, 3)})
    lives = [Life(2, "short", 10.0, 20.0, root=False), Life(3, "long", 10.0, 90.0, root=False), Life(1, "main", 0.0)]
    assert [one.name for one in watched(readings, lives)] == ["main", "long", "short"]


def looked(hours: float, score: float, *, alarm: bool) -> Look:
    growth = Growth("rss_bytes", 1000.0, 900.0, 1100.0)
    return Look(hours * HOUR, 0.001, Verdict("leak", "retained_growth", growth=growth), alarm, None, score, 3.0)


def three_days(readings: int = 500) -> tuple[SoakSummary, Report, SoakCourse]:
    """A soak of hostile names with 16 counters, a gap from hour 30 to 32, and a leak of 1,000 B/s."""
    t = np.linspace(0.0, 72 * HOUR, readings)
    t = t[(t < 30 * HOUR) | (t > 32 * HOUR)]
    rng = np.random.default_rng(3)
    series = []
    for number in range(16):
        name = "rss" if number == 0 else f"c{number}{HOSTILE}"
        thin = thinned(t, 1e9 + 1000.0 * t + 1e7 * rng.normal(size=len(t)))
        series.append(Series(name, name, COUNTER, "host", True, *thin, len(t)))
    growth = Growth("rss_bytes", 1000.0, 900.0, 1100.0)
    verdict = Verdict(
        "leak", "retained_growth", "host", 0.9, Culprit(counter="rss_bytes"), growth, 0.0, reasons=(HOSTILE,)
    )
    report = Report(verdict, timelines=[Timeline(HOSTILE, 0.0, 72 * HOUR, tuple(series))])
    level = 1e9 + 1000 * 72 * HOUR
    forecast = Forecast("rss", level, 2e9, (2e9 - level) / 1000, (2e9 - level) / 1100, (2e9 - level) / 900)
    happenings = [
        Happening(30 * HOUR, "gap", "nothing was recorded for 7,200 s"),
        Happening(9 * HOUR, "alarm", HOSTILE),
    ]
    looks = [looked(hour, hour / 2, alarm=hour >= 9) for hour in range(1, 73)]
    summary = SoakSummary(HOSTILE, 72 * HOUR, "duration", 2, 2, looks, happenings, forecast, 0.05, HOUR)
    processes = (
        WatchedProcess(1, HOSTILE, 0.0, 30 * HOUR, True),
        WatchedProcess(2, "x" * 10_000, 32 * HOUR, None, True),
    )
    return summary, report, SoakCourse(processes, 2, (Gap(30 * HOUR, 32 * HOUR),))


def test_nothing_is_drawn_across_a_gap_and_hostile_names_are_text(tmp_path: Path, browser: Browser) -> None:
    file = tmp_path / "page.html"
    file.write_text(soak_page(*three_days(), HOSTILE))
    assert "\x1b" not in file.read_text() and "\u202e" not in file.read_text()
    with opened(browser, file, PHONE, "dark") as page:
        draw_all(page)
        assert page.locator("main script, main img").count() == 0
        assert fits(page)
        # then the line has a hole where nobody recorded, and the hole is shaded
        memory = figure_of(page, "time-0-host")
        line = next(trace for trace in memory["data"] if trace["name"] == "rss")
        hole = line["y"].index(None)
        assert line["y"].count(None) == 1
        day = 24.0  # the axis is in days
        assert line["x"][hole - 1] <= 30 / day < line["x"][hole] == 31 / day < 32 / day <= line["x"][hole + 1]
        shades = [shape for shape in memory["layout"]["shapes"] if shape["type"] == "rect"]
        assert [(shade["x0"], shade["x1"]) for shade in shades] == [(30 / day, 32 / day)]
        # and the alarm and the gap stand at their times
        assert {(row["at"], row["what"]) for row in rows_of(page, "Happenings")} == {
            (9 * HOUR, "alarm"),
            (30 * HOUR, "nothing recorded"),
        }
        lives = rows_of(page, "Processes")
        assert [(row["name"][:20], row["from"], row["to"]) for row in lives] == [
            (printable(HOSTILE)[:20], 0, 30 * HOUR),
            ("x" * 20, 32 * HOUR, "alive"),
        ]


def test_three_days_at_a_second_are_a_small_file() -> None:
    page = soak_page(*three_days(72 * 3600), "x.lscope")
    assert len(page.encode()) <= 10_000_000


# --- the forecast


def test_the_cone_of_a_forecast_has_the_ends_of_its_interval() -> None:
    # given 100 B left at 10 B/s (5 … 20), ten seconds watched
    forecast = Forecast("rss", 900.0, 1000.0, 10.0, 5.0, 20.0)
    timeline = Timeline(
        "x", 0.0, 10.0, (Series("rss", "RSS", COUNTER, "host", True, np.array([0.0, 10.0]), np.array([800.0, 900.0])),)
    )
    figure = forecast_figure(forecast, [timeline], 10.0)
    so_far, cone, line = figure.data
    assert (so_far["x"], so_far["y"]) == ([0, 10], [800, 900])
    assert (line["x"], line["y"]) == ([10, 20, 22], [900, 1000, 1000])
    corners = set(zip(cone["x"], cone["y"], strict=True))
    assert {(10.0, 900.0), (15.0, 1000.0), (22.0, 1000.0), (22.0, 900.0 + 100.0 * 12 / 20)} == corners
    # and where growth may be none, the cone stays open; a limit that is far is told and not drawn
    figure = forecast_figure(replace(forecast, expected_s=1e6, earliest_s=1e5, latest_s=None), [timeline], 10.0)
    assert "The limit lies beyond what is drawn." in figure.description
    assert max(figure.data[1]["x"]) == 10 + 10 * LONGEST_SHARE
    assert ("at the latest", "never") in [tuple(row) for row in figure.table.rows] if figure.table else False


def test_at_the_limit_there_is_no_way_left() -> None:
    figure = forecast_figure(Forecast("rss", 1000.0, 1000.0, 0.0, 0.0, 0.0), [], 10.0)
    assert figure.description == "rss is at its limit of 1000 B now."

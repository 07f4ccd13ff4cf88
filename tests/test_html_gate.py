"""The page of ``leakscope check``: its numbers, what was measured against what, the command that accepts a run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import PHONE, draw_all, opened
from event_files import EventFile
from html_pages import HOSTILE, figure_of, fits, page_and_json, rows_of
from synthetic import SyntheticCapture
from test_check import service

from leakscope.cli.check import judged
from leakscope.cli.main import main
from leakscope.detect.attribution import Options
from leakscope.detect.counts import least_sigmas, most_by_chance, sigmas
from leakscope.gate.budgets import parse_budgets
from leakscope.gate.decide import Rules, decide
from leakscope.model.gate import Measured
from leakscope.report.text import printable

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BUDGETS = """
[layer.host]
kept = "1KiB"
rate = "1MiB/s"
[[site]]
name = "labels"
frames = "label"
objects = 50
"""
SUPPRESSIONS = "leak:^nobody  # a reason\n# Made once, kept for good.\nleak:label\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[object]]:
    """(the page, the JSON, what was run): 60 rows of 208 B that the baseline does not keep, over a budget of a KiB."""
    folder = tmp_path_factory.mktemp("gate")
    base, head = service(folder / "base.csv", labels=40), service(folder / "head.csv", labels=40, kept=60, line=14)
    (folder / "leakscope.toml").write_text(BUDGETS)
    (folder / "suppressions.txt").write_text(SUPPRESSIONS)
    run: list[object] = ["check", head, "--baseline", base, "--budget", folder / "leakscope.toml", "--suppressions",
                         folder / "suppressions.txt"]  # fmt: skip
    file = folder / "page.html"
    return file, page_and_json(file, *run), run


def test_the_page_has_the_numbers_of_the_json_report(
    made: tuple[Path, dict[str, Any], list[object]], browser: Browser
) -> None:
    file, report, _ = made
    gate = report["gate"]
    with opened(browser, file) as page:
        draw_all(page)
        sentence = page.locator("h1").inner_text()
        assert sentence.startswith(
            "Failed: host: copy_row (q.c) keeps 12,480 B (12.2 KiB) of host memory in 60 objects"
        )
        # then every check with all of its figures
        checks = rows_of(page, "Every check")
        words = {"fail": "failed", "suppressed": "suppressed", "pass": "passed"}
        assert [(row["outcome"], row["check"], row["rule"]) for row in checks] == [
            (words[check["outcome"]], check["name"], check["rule"]) for check in gate["checks"]
        ]
        measured = rows_of(page, "Measured and allowed")
        figures = [(check["name"], one) for check in gate["checks"] for one in check["measures"]]
        assert [(row["check"], row["figure"], row["measured"]) for row in measured] == [
            (name, one["name"], one["measured"]) for name, one in figures
        ]
        assert [row["allowed"] for row in measured] == [
            "–" if one["allowed"] is None else one["allowed"] for _, one in figures
        ]
        kept = next(row for row in measured if row["figure"] == "kept")
        assert (kept["measured"], kept["allowed"], kept["95 % interval"]) == (12_480, 1024, "exact")
        # and what changed against the baseline, for the same work
        (changed,) = rows_of(page, "Sites that changed")
        (change,) = gate["difference"]["changes"]
        for column, key in (("kept objects", "kept_objects"), ("expected", "expected_objects"), ("kept", "kept_bytes"),
                            ("allowed", "allowed_objects")):  # fmt: skip
            assert changed[column] == change[key]
        assert (changed["change"], change["kept_objects"], change["kept_bytes"]) == ("new", 60, 12_480)
        assert 10 <= change["allowed_objects"] < 60
        work = gate["difference"]["work"]["head"]
        (per_unit,) = rows_of(page, "Kept for each unit of allocations")
        assert (per_unit["baseline"], per_unit["head"]) == (0, pytest.approx(12_480 / work))
        # and what is suppressed, and by what that hides nothing
        rows = rows_of(page, "Suppressions")
        assert [(r["pattern"], r["bytes"], r["objects"]) for r in rows] == [
            (f"leak:{one['pattern']}", one["bytes"], one["objects"]) for one in gate["suppressions"]
        ]
        assert [row[""] for row in rows] == ["hides nothing: remove it", "used"]
        # and the growth of what fails, to the byte
        (course,) = rows_of(page, "Kept by the sites of failing checks")[:1]
        assert (course["at the end"], course["kept"], course["objects"]) == (12_480, 12_480, 60)
        line = figure_of(page, "courses")["data"][0]
        assert line["y"][0] == 0 and line["y"][-1] * 1024 == pytest.approx(12_480, abs=0.01)
        # and the chain down to the bytes
        assert page.locator("#fail-1").inner_text().count("copy_row") >= 1
        # and what accepts it
        accept = page.locator("#accept").inner_text()
        assert f"leakscope baseline update {file.parent}/head.csv -o leakscope-baseline.json" in accept


def test_the_same_inputs_give_the_same_page(made: tuple[Path, dict[str, Any], list[object]], tmp_path: Path) -> None:
    file, _, run = made
    page_and_json(tmp_path / "again.html", *run)
    assert (tmp_path / "again.html").read_bytes() == file.read_bytes()


def test_hostile_names_are_text_on_a_phone_in_the_dark(tmp_path: Path, browser: Browser) -> None:
    # given a frame that is markup, and one of 10 kB
    hostile = HOSTILE.replace(";", "").replace("\n", "")
    events = EventFile()
    for number in range(100):
        events.keep(0.3 + number * 0.19, 100, f"main;{'x' * 10_000} (a.c:1);{hostile} (b.c:2);malloc")
    report = page_and_json(tmp_path / "page.html", "check", events.write(tmp_path / "run.csv"))
    assert report["gate"]["result"] == "fail"
    text = (tmp_path / "page.html").read_text()
    assert "\x1b" not in text and "\u202e" not in text
    with opened(browser, tmp_path / "page.html", PHONE, "dark") as page:
        draw_all(page)
        assert page.locator("main script, main img").count() == 0
        assert fits(page)
        (check,) = rows_of(page, "Every check")
        assert printable(hostile) in check["message"]


def test_a_run_that_passes_says_so_and_names_the_file_to_update(tmp_path: Path) -> None:
    base, head = service(tmp_path / "base.csv", labels=40), service(tmp_path / "head.csv", labels=40, line=14)
    committed = tmp_path / "accepted.json"
    assert main(["baseline", "update", str(base), "-o", str(committed)]) == 0
    report = page_and_json(tmp_path / "page.html", "check", head, "--baseline", committed)
    assert report["gate"]["result"] == "pass"
    text = (tmp_path / "page.html").read_text()
    assert 'class="badge good">passed' in text
    assert f"leakscope baseline update {head} -o {committed}" in text


# --- figures of checks


def test_every_limit_of_a_budget_is_measured_with_its_interval(tmp_path: Path) -> None:
    made = SyntheticCapture(10)
    made.process()
    made.leak(
        100, 64, user=("main", "serve", "keep_entry"), kernel=("k:map_alloc",), kind="kmalloc", cache="kmalloc-64"
    )
    report = judged([made.write(tmp_path / "run.lscope")], Options(), "1GiB")
    _, gate = decide(report, Rules(parse_budgets('[layer.kernel]\nkept = "1KiB"\nrate = 1\n', "b.toml")))
    (check,) = [one for one in gate.checks if one.rule == "budget"]
    kept, rate = check.measures
    assert kept == Measured("kept", 6400.0, 6400.0, 6400.0, 1024.0, "bytes", "fail") and kept.exact
    assert (rate.name, rate.allowed, rate.unit, rate.outcome) == ("rate", 1.0, "bytes/s", "fail")
    assert 1 < rate.low < rate.value < rate.high and rate.value == pytest.approx(640, rel=0.05)
    # and a leak tells its growth
    leak = gate.of("fail")[0]
    growth = report.verdict.growth
    assert growth is not None and leak.rule == "leak"
    assert leak.measures == (
        Measured("growth", growth.bytes_per_s, growth.ci_low, growth.ci_high, None, "bytes/s", "fail"),
    )


@pytest.mark.parametrize("expected", [0.0, 3.0, 500.0])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_what_is_allowed_is_where_chance_ends(expected: float, ratio: float) -> None:
    least = least_sigmas(30)
    assert sigmas(most_by_chance(expected, ratio, least), expected, ratio) == pytest.approx(least)


def test_sites_have_a_course_that_ends_with_what_they_keep(tmp_path: Path) -> None:
    # given a site that two processes use, the second for the last half alone
    made = SyntheticCapture(10)
    for pid, start in ((7, 0.0), (8, 5.0)):
        made.process(pid, start_s=start)
        for number in range(50):
            made.alloc(start + 0.05 + number * (10 - start) / 51, 1000, pid=pid, user=("main", "keep"),
                       kernel=("k:alloc",), kind="kmalloc", cache="kmalloc-1k")  # fmt: skip
    path = made.write(tmp_path / "run.lscope")
    report = judged([path], Options(timelines=True), "1GiB")
    (site,) = [one for one in report.sites if one.live_bytes]
    assert site.course is not None and site.live_bytes == 100_000
    kept = site.course.kept_bytes
    assert kept[-1] == 100_000 and all(a <= b for a, b in pairwise(kept))
    half = next(v for i, v in enumerate(kept, 1) if site.course.start_s + i * site.course.step_s >= 5.0)
    assert 24_000 <= half <= 27_000
    # and nobody pays for it who does not ask
    assert all(one.course is None for one in judged([path], Options(), "1GiB").sites)

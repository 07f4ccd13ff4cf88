"""leakscope diff --report: the page has the numbers of the difference, as tables and as a differential icicle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import draw_all, opened
from icicle import Icicle
from reports_once import reports_once
from test_diff import capture

from leakscope.cli.main import main

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><script>window.pwned=1</script>\x1b[31m\u202e`open`"
GAINED, LOST = 53 * 256, 1.5 * 67_000  # what test_diff.capture plants; B did 1.5 times the work of A


@pytest.fixture(scope="module", autouse=True)
def each_report_once() -> Iterator[None]:
    with reports_once():
        yield


@pytest.fixture(scope="module")
def a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("diff") / "a.lscope", 1, 0, "a")


@pytest.fixture(scope="module")
def b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("diff") / "b.lscope", 1.5, 53, "bb", HOSTILE)


@pytest.fixture(scope="module")
def html(a: Path, b: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "diff.html"
    assert main(["diff", str(a), str(b), "--report", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def loaded(browser: Browser, html: Path) -> Iterator[Page]:
    with opened(browser, html) as page:
        draw_all(page)
        yield page
        assert page.evaluate("window.pwned") is None


def rows(page: Page, caption: str) -> list[list[str]]:
    """Cells of the table whose caption begins so."""
    table = page.locator("table").filter(has=page.locator("caption", has_text=caption))
    return [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]


def test_the_first_screen_says_what_b_keeps(loaded: Page, a: Path, b: Path) -> None:
    first = loaded.locator(".headline")
    assert first.locator(".badge").first.inner_text().lower() == "regression"
    assert first.locator("h1").inner_text().startswith("B keeps 13.2 KiB more than A: </script><script>")
    facts = dict(
        zip(first.locator("dt").all_inner_texts(), first.locator("dd").all_inner_texts(), strict=True)
    )  # fmt: skip
    assert facts["More in B for the same work"] == "13,568 B (13.2 KiB) in 53 objects" and facts["Layer"] == "kernel"
    assert facts["Work"] == "B did 1.50 times the work of A (requests_total)"
    assert "\\x1b[31m\\u202e" in facts["Culprit"]
    assert (facts["A, the baseline"], facts["B"]) == (str(a), str(b))
    steps = first.locator(".steps li").all_inner_texts()
    assert any(f"leakscope check {b} --baseline {a}" in step for step in steps)


def test_tables_have_the_exact_numbers(loaded: Page) -> None:
    layers = {row[0]: row[1:4] for row in rows(loaded, "Layers in A and B")}
    assert layers == {
        "kernel": ["0 B", "13.2 KiB", "+13.2 KiB"],
        "host": ["145.4 KiB", "120.0 KiB", "-98.1 KiB"],
    }
    raw = loaded.locator("[data-value]").evaluate_all("cells => cells.map(cell => Number(cell.dataset.value))")
    assert {GAINED, -LOST, 20 * 4096 + 67_000, 30 * 4096} <= set(raw)
    new, gone = rows(loaded, "Sites that changed beyond chance: 2, as before: 2")
    assert new[:8] == ["+ new", "kernel", "filp", "0 B", "13.2 KiB", "+13.2 KiB", "0", "53"]
    assert gone[:6] == ["- gone", "host", "mmap_anon", "65.4 KiB", "0 B", "-98.1 KiB"]
    (rss,) = rows(loaded, "Counters: 1")
    assert (rss[0], rss[-1]) == ("rss", "apart")


def test_figures_have_the_numbers_of_the_tables(loaded: Page) -> None:
    def bars(name: str) -> Any:
        return loaded.locator(f"#{name} .plot").evaluate(
            "p => p.data.map(d => [d.name, Array.from(d.y), Array.from(d.x)])"
        )

    assert bars("layers-bars") == [
        ["A, for the same work", ["kernel", "host"], [0, 1.5 * (20 * 4096 + 67_000) / 1024]],
        ["B", ["kernel", "host"], [GAINED / 1024, 120]],
    ]
    (_, names, _), (_, _, (rate,)) = bars("counters-bars")
    assert names == ["rss"] and rate == pytest.approx(53 * 1e5 / 15 / 1024, rel=0.05)
    said = loaded.locator("#stacks-icicle figcaption").inner_text()
    assert "Stacks that keep more: +13.2 KiB in all; that keep less: -98.1 KiB." in " ".join(said.split())


def test_the_icicle_is_as_wide_as_the_change_and_says_its_sign(loaded: Page) -> None:
    icicle = Icicle(loaded)
    assert icicle.bytes == GAINED + LOST
    assert f"net {(GAINED - LOST) / 1024:.1f} KiB" in icicle.here
    trace = icicle.figure.locator(".plot").evaluate(
        "p => Object.fromEntries(p.data[0].labels.map("
        "(label, i) => [label, [p.data[0].values[i], p.data[0].marker.colors[i]]]))"
    )
    assert trace["-98.1 KiB old_cache"] == [LOST, "rgb(96,165,240)"]
    assert trace["+13.2 KiB kernel"] == [GAINED, "rgb(245,145,60)"]
    assert not any("label" in name for name in trace)  # what stayed the same has no width

    icicle.choose("Width", "the larger of both")
    assert icicle.bytes == GAINED + LOST + 30 * 4096
    trace = icicle.drawn()
    assert trace["0 B label (app.c)"] == 30 * 4096  # neither its line nor its folder is the same in A
    colours = icicle.figure.locator(".plot").evaluate("p => p.data[0].marker.colors")
    assert colours.count("rgb(226,229,234)") == 2  # label and its memory, as before
    icicle.choose("Width", "change")
    icicle.choose("Layer", "kernel")
    icicle.press("Callees first")
    icicle.click("[slab filp]")
    assert icicle.bytes == GAINED and "B 13,568 B (13.2 KiB)" in icicle.here


def test_a_baseline_file_can_be_a(a: Path, b: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, page = tmp_path / "base.json", tmp_path / "page.html"
    assert main(["baseline", "update", str(a), "-o", str(base)]) == 0
    capsys.readouterr()
    assert main(["diff", str(base), str(b), "--json", "--report", str(page)]) == 0
    of_file = json.loads(capsys.readouterr().out)
    assert main(["diff", str(a), str(b), "--json"]) == 0
    of_capture = json.loads(capsys.readouterr().out)
    assert of_file["verdict"] == of_capture["verdict"] and of_file["work"] == of_capture["work"]
    for ours, theirs in zip(of_file["sites"], of_capture["sites"], strict=True):
        assert (ours["key"], ours["more_bytes"], ours["a"]["live_bytes"]) == (
            theirs["key"], theirs["more_bytes"], theirs["a"]["live_bytes"],
        )  # fmt: skip
    layers = [
        [(row["layer"], row["a"]["live_bytes"], row["more_bytes"]) for row in found["layers"]]
        for found in (of_file, of_capture)
    ]
    assert layers[0] == layers[1]
    assert of_file["counters"][0]["a"] is None and of_file["inputs"]["a"] == [{"path": str(base), "kind": "baseline"}]
    assert "baseline" in page.read_text()


def test_a_baseline_file_cannot_be_b_nor_be_cut_into_layers(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, page = tmp_path / "base.json", tmp_path / "page.html"
    assert main(["baseline", "update", str(a), "-o", str(base)]) == 0
    assert main(["diff", str(a), str(base), "--report", str(page)]) == 2
    assert f"it can be A: leakscope diff {base} {a}" in capsys.readouterr().err
    assert main(["diff", str(base), str(a), "--layer", "host", "--report", str(page)]) == 2
    assert "of which --layer and --pid cannot take a part" in capsys.readouterr().err
    base.write_text('{\n "schema": "leakscope-baseline/1",\n "sites": 7}')
    assert main(["diff", str(base), str(a), "--report", str(page)]) == 2
    assert "damaged baseline file" in capsys.readouterr().err
    assert not page.exists()


def test_the_place_of_the_page_is_checked_before_the_work(
    a: Path, b: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(a), str(b), "--report", str(tmp_path / "none" / "page.html")]) == 2
    said = capsys.readouterr()
    assert "there is no folder" in said.err and not said.out


def test_the_same_run_twice(browser: Browser, a: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["diff", str(a), str(a), "--report", str(page)]) == 0
    with opened(browser, page, look="dark") as loaded:
        assert loaded.locator(".headline .badge").first.inner_text().lower() == "no regression"
        assert "No stack keeps more or less than in A." in loaded.locator("#stacks").inner_text()

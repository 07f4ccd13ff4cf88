"""The page of an attribution in a real browser: what stands on it, how it is used, and what it must never do."""

from __future__ import annotations

import json
import os
import re
import socket
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import DESKTOP, PHONE, draw_all, opened
from synthetic import SyntheticCapture
from three_leaks import CULPRITS, DEVICE, MMAP, three_leaks

from leakscope.cli.main import main

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

AXE = "LEAKSCOPE_AXE"
"""Path of axe.min.js of the npm package axe-core: pages are checked with it where it is given."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page of a capture in which three layers leak, and the JSON report of the same run."""
    folder = tmp_path_factory.mktemp("page")
    return written(three_leaks(folder / "run.lscope"), folder / "out.html")


def written(evidence: Path, page: Path) -> tuple[Path, dict[str, Any]]:
    """The page and the JSON report of ``evidence``."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(["attribute", str(evidence), "--json", "--report", str(page)]) == 0
    assert said.getvalue().startswith(f"report: {page} (")
    return page, json.loads(out.getvalue())


def numbers(page: Page, caption: str) -> list[list[str | float | None]]:
    """The rows of a table: the numbers behind its cells, else their texts."""
    table = page.locator("table", has=page.locator("caption", has_text=caption)).first
    read: list[list[str | float | None]] = table.evaluate(
        """table => [...table.tBodies[0].rows].map(row => [...row.cells].map(cell =>
             cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent))"""
    )
    return read


def test_the_first_screen_names_every_culprit(browser: Browser, made: tuple[Path, dict[str, Any]]) -> None:
    with opened(browser, made[0]) as page:
        # without scrolling, at 1280 × 800
        seen = page.evaluate(
            """() => { const seen = []; const walk = document.createTreeWalker(document.querySelector('.headline'), 4);
               while (walk.nextNode()) { const range = document.createRange(); range.selectNode(walk.currentNode);
                 const box = range.getBoundingClientRect();
                 if (box.bottom <= innerHeight && box.right <= innerWidth) seen.push(walk.currentNode.data); }
               return seen.join(' ') }"""
        )
        for culprit in CULPRITS:
            assert culprit in seen
        for fact in ("leak", "Rate", "Growing since", "Confidence", "What to do next", "leakscope liveness"):
            assert fact in seen
        assert page.locator("h1").count() == 1


def test_numbers_are_those_of_the_json_report(browser: Browser, made: tuple[Path, dict[str, Any]]) -> None:
    path, report = made
    verdicts = [report["verdict"], *report["findings"]]
    with opened(browser, path) as page:
        findings = numbers(page, "Findings, ranked")
        layers, sites = numbers(page, "Layers"), numbers(page, "Sites, those that keep most")
        losses = numbers(page, "What is known to be missing")
        compared = numbers(page, "Counters against events")
        chains = {figure.get_attribute("id"): figure.locator("table tbody tr").count()
                  for figure in page.locator("figure[id^=chain-]").all()}  # fmt: skip
    assert [(row[5], row[7], row[8], row[9], row[10]) for row in findings if row[1] == "leak"] == [
        (v["growth"]["bytes_per_s"], v["leak_start_s"], v["kept_bytes"], v["kept_objects"], v["confidence"])
        for v in verdicts
        if v["verdict"] == "leak"
    ]
    assert [(row[0], row[1], row[2], row[3], row[5]) for row in layers] == [
        (one["layer"], one["live_bytes"], one["live_objects"], one["growth"]["bytes_per_s"], one["allocated_bytes"])
        for one in report["layers"]
    ]
    ranked = sorted(report["sites"], key=lambda site: -site["live_bytes"])
    assert [(row[3], row[4], row[8], row[9]) for row in sites] == [
        (site["live_bytes"], site["live_objects"], site["allocated_bytes"], site["id"]) for site in ranked
    ]
    assert [(row[0], row[1], row[2]) for row in losses] == [
        (loss["source"], loss["what"], loss["count"]) for loss in report["losses"]
    ]
    rest = [row["bytes"] for row in report["reconciliation"] if row["what"] == "unexplained"]
    assert [row[5] for row in compared] == rest
    by_site = {chain["site"]: chain for chain in report["chains"]}
    shown = [by_site[v["sites"][0]] for v in verdicts if v["sites"]]
    assert list(chains.values()) == [len(chain["links"]) + len(chain["detail"]) for chain in shown]


def test_figures_are_drawn_when_scrolled_to(browser: Browser, made: tuple[Path, dict[str, Any]]) -> None:
    with opened(browser, made[0]) as page:
        last = page.locator("figure.figure").last
        assert last.get_attribute("data-state") is None
        draw_all(page)
        assert page.locator("figure[data-state=drawn] svg.main-svg").count() >= page.locator("figure.figure").count()
        # what is drawn: the live bytes of the layer end where the table says they do
        drawn = page.evaluate(
            """() => { const plot = document.querySelector('#time-0-gpu .plot');
               return plot.data.filter(trace => trace.name?.startsWith('live')).map(trace => trace.y.at(-1)) }"""
        )
        assert drawn == [53 * 65_536 / 2**20]
        # the fitted slope and its interval are drawn with it
        names = page.evaluate("document.querySelector('#time-0-gpu .plot').data.map(trace => trace.name || trace.fill)")
        assert names[0] == "toself"
        assert names[1].startswith("fitted: live GPU memory")


def test_the_look_is_that_of_the_system_and_can_be_changed(browser: Browser, made: tuple[Path, dict[str, Any]]) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    ticks = "getComputedStyle(document.querySelector('#time-0-findings .xtick text')).fill"
    with opened(browser, made[0], look="dark") as page:
        page.locator("#time-0-findings").scroll_into_view_if_needed()
        page.wait_for_function("() => document.querySelector('#time-0-findings').dataset.state === 'drawn'")
        dark = (page.evaluate(background), page.evaluate(ticks))
        page.emulate_media(color_scheme="light")
        page.wait_for_function(f"() => {ticks} !== '{dark[1]}'")  # figures follow
        light = (page.evaluate(background), page.evaluate(ticks))
        button = page.locator("#theme")
        assert button.get_attribute("aria-label") == "Change to the dark look"
        button.click()
        page.wait_for_function(f"() => {ticks} === '{dark[1]}'")
        assert page.evaluate(background) == dark[0]
        button.click()
        page.wait_for_function(f"() => {ticks} === '{light[1]}'")
        assert page.evaluate(background) == light[0] != dark[0]


def test_the_keyboard_is_enough(browser: Browser, made: tuple[Path, dict[str, Any]]) -> None:
    with opened(browser, made[0]) as page:
        focused = "document.activeElement.className || document.activeElement.id || document.activeElement.tagName"
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "skip"
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "theme"
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.keyboard.press("Tab")  # the first link of the contents
        page.keyboard.press("Enter")
        assert page.evaluate("location.hash") == "#over-time"
        # sections fold with the keyboard, and a link to a folded one unfolds it
        folded = page.locator("#losses > details")
        page.locator("#losses > details > summary").focus()
        page.keyboard.press("Enter")
        assert folded.get_attribute("open") is None
        page.locator("nav a[href='#losses']").focus()
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelector('#losses > details').open")


def test_a_phone_scrolls_in_one_direction(browser: Browser, made: tuple[Path, dict[str, Any]]) -> None:
    with opened(browser, made[0], PHONE) as page:
        draw_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        # names of a chain are cut to what there is room for
        texts = page.evaluate("document.querySelector('#chain-1 .plot').data.find(t => t.mode === 'markers+text').text")
        assert any(text.removesuffix("</b>").endswith("…") for text in texts)


def test_everything_has_a_name_and_contrast(browser: Browser, made: tuple[Path, dict[str, Any]]) -> None:
    with opened(browser, made[0]) as page:
        draw_all(page)
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll('main button, main input, main select, [role=group], [role=region]')]
               .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length ||
                              (e.getAttribute('aria-labelledby') || '').split(' ')
                                .map(id => document.getElementById(id)?.textContent).join('').trim()))
               .filter(e => !e.closest('.modebar')).map(e => e.outerHTML.slice(0, 80))"""
        )
        assert unnamed == []
        assert [page.locator(one).count() for one in ("main", "header", "footer", "nav[aria-label=Sections]")] == [
            1,
            1,
            1,
            1,
        ]
        assert page.locator(".plot svg.main-svg:not([aria-hidden=true])").count() == 0  # their words stand above them
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))")
        assert all(after - before <= 1 for before, after in pairwise(levels))
        looks = []
        for look in ("light", "dark"):
            page.emulate_media(color_scheme=look)
            looks.append(
                page.evaluate(
                    """() => { const read = name => { const one = document.createElement('i');
                         one.style.color = `var(${name})`; document.body.append(one);
                         const rgb = getComputedStyle(one).color.match(/[0-9.]+/g).map(Number);
                         one.remove(); return rgb; };
                       return Object.fromEntries(['--ink','--soft','--link','--bad','--good','--unsure','--card',
                         '--paper','--bad-tint','--good-tint','--unsure-tint','--kernel','--host','--gpu']
                         .map(name => [name, read(name)])) }"""
                )
            )
            if axe := os.environ.get(AXE):
                check_with_axe(page, Path(axe))
    assert looks[0] != looks[1]
    for colours in looks:
        for name in ("--ink", "--soft", "--link", "--bad", "--good", "--unsure"):
            for ground in ("--card", "--paper"):
                assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)  # WCAG 2.2, 1.4.3
        for tone in ("bad", "good", "unsure"):
            assert contrast(colours[f"--{tone}"], colours[f"--{tone}-tint"]) >= 4.5, tone
        for layer in ("--kernel", "--host", "--gpu"):
            assert contrast(colours[layer], colours["--card"]) >= 3, layer  # 1.4.11: what is no text


def contrast(one: list[float], other: list[float]) -> float:
    """Contrast of two colours, by the definition of WCAG 2.2."""

    def luminance(rgb: list[float]) -> float:
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in rgb[:3])]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def check_with_axe(page: Page, axe: Path) -> None:
    """Fail on what axe-core finds wrong."""
    page.evaluate(axe.read_text())
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'best-practice']})")
    assert [(v["id"], [n["html"][:120] for n in v["nodes"]][:3]) for v in found["violations"]] == []


SCRIPT = "<script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
HOSTILE = (
    SCRIPT,
    "</script></style></details><h1>gone</h1>",
    "\x1b[31mred\x07\n",
    "\u202egnp.exe\u2066",
    "%{y} $\\alpha$ <a href='javascript:window.pwned=1'>x</a>",
    "quote\"'`&lt;&#60;",
    "long_" + "x" * 10_000 + "_end",
)


def test_hostile_names_are_harmless(browser: Browser, tmp_path: Path) -> None:
    # given leaks below frames, in a file and a range whose names attack a page
    run = SyntheticCapture(10)
    run.process()
    for number, name in enumerate(HOSTILE):
        run.leak(40, 4096 << number, python=["py:main@/a.py:1"], user=["main", name], **MMAP)
    run.leak(40, 65_536, python=["py:main@/a.py:1"], user=[SCRIPT], **DEVICE)
    run.loss(SCRIPT, "recursion_miss", 3)
    evidence = run.write(tmp_path / "<b>run.lscope")
    path, _ = written(evidence, tmp_path / "out.html")
    source = path.read_text()
    assert not set(source) & {"\x1b", "\x07", "\u202e", "\u2066"}
    assert source.count("window.pwned=1</script>") == 0
    # when everything is drawn and unfolded: opened() fails on errors, dialogs and requests
    with opened(browser, path) as page:
        draw_all(page)
        page.evaluate("document.querySelectorAll('details').forEach(folded => { folded.open = true; })")
        assert page.evaluate("window.pwned") is None
        assert page.locator("h1").count() == 1
        assert page.locator("img, a[href^='javascript']").count() == 0
        for width, height in (DESKTOP, PHONE):
            page.set_viewport_size({"width": width, "height": height})
            page.wait_for_function(f"() => document.documentElement.scrollWidth === {width}")  # figures follow
        texts = page.locator("main").inner_text()
    # then the names are there as text, the long one whole
    assert SCRIPT in texts
    assert "\\x1b[31mred\\x07\\n" in texts
    assert "\\u202egnp.exe\\u2066" in texts
    assert HOSTILE[-1] in texts


def test_the_page_asks_for_nothing(browser: Browser, made: tuple[Path, dict[str, Any]]) -> None:
    outside = re.sub(r"<script>.*?</script>", "", made[0].read_text(), flags=re.DOTALL)
    assert re.findall(r"""(?:src|href|action|data|poster)\s*=\s*["']?(?!#)[^"'\s>]+""", outside) == []
    assert "url(" not in outside and "@import" not in outside
    # and were there something on it that did, it would be refused
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(made[0].as_uri())
        refused = page.evaluate(
            """to => Promise.all([
                 fetch(to).then(() => 'sent', () => 'refused'),
                 new Promise(done => { const image = new Image(); image.onload = () => done('sent');
                   image.onerror = () => done('refused'); image.src = `${to}x.png`; })])""",
            f"http://127.0.0.1:{server.getsockname()[1]}/",
        )
        context.close()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody connected
            server.accept()
    assert refused == ["refused", "refused"]


def test_print_unfolds_and_draws_everything_on_light(browser: Browser, made: tuple[Path, dict[str, Any]]) -> None:
    with opened(browser, made[0], look="dark") as page:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.wait_for_function("() => document.querySelectorAll('figure.figure:not([data-state=drawn])').length === 0")
        assert page.locator("main section > details:not([open]), .numbers:not([open])").count() == 0
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") is None


def test_counters_alone_give_a_page(browser: Browser, tmp_path: Path) -> None:
    # given a table of counters in which RSS rises
    table = tmp_path / "counters.csv"
    rows = [f"{60 * i},{200_000_000 + 3000 * 60 * i},900000000,0,0" for i in range(300)]
    table.write_text("\n".join(["t_s,rss_bytes,vss_bytes,gpu_used_bytes,cgroup_bytes", *rows]) + "\n")
    path, report = written(table, tmp_path / "out.html")
    assert report["verdict"]["verdict"] == "leak"
    with opened(browser, path) as page:
        draw_all(page)
        figures = [figure.get_attribute("id") for figure in page.locator("figure.figure").all()]
        assert figures == ["time-0-host", "time-0-space"]
        assert "leakscope record -p PID" in page.locator(".steps").inner_text()  # counters do not say who
        (row,) = numbers(page, "Host memory")
        assert row[:4] == ["RSS", 200_000_000, 200_000_000 + 3000 * 60 * 299, 200_000_000]
        assert row[5] == pytest.approx(report["verdict"]["growth"]["bytes_per_s"], abs=0.001)


def test_evidence_without_a_course_gives_a_page_without_figures(browser: Browser, tmp_path: Path) -> None:
    run = SyntheticCapture(10)
    run.process()
    path, _ = written(run.write(tmp_path / "empty.lscope"), tmp_path / "out.html")
    assert path.stat().st_size < 100_000  # no script to draw with
    with opened(browser, path) as page:
        assert page.locator("h1").inner_text() == "the evidence has no allocations (missing_data)"
        assert page.locator("figure").count() == 0


def test_a_page_without_a_place_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for where, why in ((tmp_path / "no" / "out.html", "there is no folder"), (tmp_path, "is a folder")):
        assert main(["attribute", str(tmp_path / "missing.lscope"), "--report", str(where)]) == 2
        assert why in capsys.readouterr().err


def test_the_page_replaces_one_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    page.write_text("old")
    assert main(["attribute", str(three_leaks(tmp_path / "run.lscope")), "--report", str(page)]) == 0
    said = capsys.readouterr()
    assert "Service.kv_block" in said.out  # the terminal's report is printed as ever
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.html", "run.lscope"]

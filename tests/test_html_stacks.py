"""Icicles in a real browser: layers, measures, search, zoom and directions, with the bytes that SQL gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import opened
from icicle import Icicle
from synthetic import PID, SyntheticCapture

from leakscope.cli.attribute import report_of
from leakscope.cli.main import main
from leakscope.correlate.stack_trees import stack_tree
from leakscope.detect.attribution import Options
from leakscope.model.results import Report, Verdict
from leakscope.model.stack_tree import WeighedStack
from leakscope.report.html.icicle import SCRIPT, Measure, Root, icicle_figure
from leakscope.report.html.page import json_in_html, page
from leakscope.report.html.parts import Figure, Headline, Section, Table, Text
from leakscope.report.html.stacks import stack_sections

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FILP = {"kind": "slab", "api": "kmem_cache_alloc", "cache": "filp"}
MMAP = {"layer": "host", "kind": "mmap_anon", "api": "mmap"}
DEVICE = {"layer": "gpu", "kind": "device", "api": "cudaMalloc"}
SERVE = ["py:serve@/srv/app.py:7", "py:serve@/srv/app.py:7"]
SCRIPT_FRAME = "<script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
LONG = "long_" + "x" * 10_000 + "_end"


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernel 101 × 256, host 37 × 4096 below a recursion and 11 × 8192 of a device mapping, GPU 53 × 65,536 in a range;
    heap that is not added; and 7 hostile stacks of 13 × 4096 each."""
    run = SyntheticCapture(10)
    run.process()
    run.leak(101, 256, user=["main", "open_it"], kernel=["k:do_open"], **FILP)
    run.leak(37, 4096, python=[*SERVE, "py:label@/srv/app.py:9"], **MMAP)
    run.leak(11, 8192, layer="host", kind="mmap_file", api="mmap", user=["main", "libcuda.so.1!driver_maps", "mmap"])
    run.leak(11, 1000, layer="host", kind="heap", api="malloc", user=["main", "keep"])
    run.rows["marks"].append(
        {"id": 1, "pid": PID, "tid": PID, "start_ns": run.ns(0), "end_ns": run.ns(10), "name": "request"}
    )
    for number in range(53):
        run.alloc(0.1 + number / 6, 65_536, user=["main", "fill", "libcudart.so.12!cudaMalloc"], **DEVICE)[
            "mark_id"
        ] = 1
    for name in (SCRIPT_FRAME, "\x1b[31;mred\n", "\u202egnp.exe", LONG, "</script><b>", "&lt;i&gt;", "a\u2028b"):
        run.leak(13, 4096, user=["hostile", name], **MMAP)
    return run.write(tmp_path_factory.mktemp("stacks") / "run.lscope")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 × 512 of the kernel, one in 16 with a stack of its own."""
    run = SyntheticCapture(10)
    run.process()
    for number in range(64):
        weight = 16 if number % 16 == 0 else 0
        run.alloc(number / 7, 512, user=["main", "hot"], kernel=["k:do_open"], weight=weight, **FILP)
    return run.write(tmp_path_factory.mktemp("sampled") / "run.lscope")


@pytest.fixture(scope="module")
def report(capture: Path) -> Report:
    return report_of([capture], Options(), "1GB", runs=True)


@pytest.fixture(scope="module")
def html(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page("test", Headline("leak", "test"), stack_sections(report, ["run"]), [SCRIPT]))
    return path


@pytest.fixture
def live(capture: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], int]:
    """Live bytes by SQL on the capture, of the events that a condition chooses."""

    def live_bytes(where: str) -> int:
        signed = "CASE op WHEN 'alloc' THEN size_bytes ELSE -size_bytes END"
        sql = f"SELECT sum({signed})::BIGINT AS n FROM mem_events WHERE {where}"
        assert main(["query", str(capture), sql, "--json"]) == 0
        return int(json.loads(capsys.readouterr().out)[0]["n"])

    return live_bytes


@pytest.fixture(scope="module")
def open_page(browser: Browser, html: Path) -> Iterator[Icicle]:
    with opened(browser, html) as loaded:
        yield Icicle(loaded)
        assert loaded.evaluate("window.pwned") is None


@pytest.fixture
def icicle(open_page: Icicle) -> Icicle:
    """The figure as it was at first: loading a page takes seconds."""
    if open_page.figure.get_by_label("Search frames").input_value():
        open_page.search("")
    for toggle in ("Callees first", "Flame"):
        if open_page.figure.get_by_role("button", name=toggle).get_attribute("aria-pressed") == "true":
            open_page.press(toggle)
    open_page.choose("Width", "live bytes")
    open_page.choose("Layer", "gpu")
    open_page.choose("Layer", "all layers")
    return open_page


def added(layer: str) -> str:
    return f"layer = '{layer}' AND kind NOT IN ('heap')"


# In the browser


def test_each_layer_has_the_bytes_that_sql_gives(icicle: Icicle, live: Callable[[str], int]) -> None:
    # device mappings of the driver are not added to the GPU memory that they map
    together = "kind NOT IN ('heap', 'mmap_file')"
    assert (icicle.here, icicle.bytes) == (f"all layers: live bytes {live(together):,} B (3.8 MiB)", live(together))
    assert [text.split("layer, ")[1].split(" B")[0] for text in icicle.branches] == [
        f"{live(f'{added(layer)} AND kind <> {chr(39)}mmap_file{chr(39)}'):,}" for layer in ("gpu", "host", "kernel")
    ]
    for layer in ("kernel", "host", "gpu"):
        icicle.choose("Layer", layer)
        assert icicle.bytes == live(added(layer))
        assert icicle.drawn()[layer] == live(added(layer))
    assert live(added("gpu")) == 53 * 65_536
    assert {"request", "main", "fill", "cudaMalloc", "[device cudaMalloc]"} <= icicle.drawn().keys()
    icicle.choose("Layer", "host: heap")  # its bytes are those of brk, and never added
    assert icicle.bytes == live("kind = 'heap'") == 11_000


def test_a_click_zooms_and_crumbs_and_keys_lead_back(icicle: Icicle, live: Callable[[str], int]) -> None:
    icicle.choose("Layer", "kernel")
    icicle.click("open_it")
    assert icicle.here.startswith("open_it (native): live bytes 25,856 B (25.2 KiB), 100.0 % of kernel")
    assert icicle.crumbs == ["kernel", "main", "open_it"]
    assert icicle.drawn() == {"open_it": 25_856, "do_open": 25_856, "[slab filp]": 25_856}
    icicle.figure.locator(".crumbs button", has_text="main").click()
    assert icicle.crumbs == ["kernel", "main"]

    icicle.choose("Layer", "all layers")
    icicle.click("gpu")
    icicle.click("fill")
    assert icicle.crumbs == ["all layers", "gpu", "request", "main", "fill"]
    icicle.page.keyboard.press("ArrowUp")  # the click gave the figure the focus
    assert icicle.crumbs[-1] == "main"
    icicle.page.keyboard.press("Escape")
    assert icicle.crumbs == ["all layers"]
    icicle.page.keyboard.press("Enter")  # the widest branch
    assert icicle.crumbs == ["all layers", "gpu"] and icicle.bytes == live("layer = 'gpu'")
    icicle.page.keyboard.press("ArrowRight")
    assert icicle.crumbs == ["all layers", "host"]

    icicle.figure.get_by_text("Branches here as a list (2 of 2, widest first)").click()
    icicle.figure.locator(".branches button", has_text="hostile").click()
    assert icicle.crumbs == ["all layers", "host", "hostile"] and icicle.bytes == 7 * 13 * 4096
    assert icicle.page.evaluate("document.activeElement.closest('.branches') !== null")
    icicle.page.keyboard.press("Escape")
    icicle.press("To the first fork")
    assert icicle.crumbs == ["all layers"]
    icicle.choose("Layer", "gpu")
    icicle.press("To the first fork")
    assert icicle.crumbs[-1] == "[device cudaMalloc]"


def test_a_search_sums_each_byte_once_and_lights_what_matches(icicle: Icicle) -> None:
    said = icicle.search("SERVE")  # a recursion: two frames match in one stack
    assert said.startswith("151,552 B (148.0 KiB) in 2 matching frames, ") and said.endswith(" of all layers")
    icicle.choose("Layer", "host")
    colours = icicle.figure.locator(".plot").evaluate(
        "plot => Object.fromEntries(plot.data[0].labels.map((label, i) => [label, plot.data[0].marker.colors[i]]))"
    )
    assert colours["serve (app.py:7)"] == "#ff5fb0" and colours["hostile"].startswith("rgba(")
    assert not colours["host"].startswith("rgba(")  # on the way to a match
    assert (
        f"{100 * 151_552 / (151_552 + 7 * 13 * 4096 + 11 * 8192):.1f} % of host"
        in icicle.figure.locator(".found").inner_text()
    )
    assert icicle.search("no such frame") == "no frame of host matches"
    icicle.page.keyboard.press("Escape")
    assert icicle.figure.get_by_label("Search frames").input_value() == ""
    assert icicle.figure.locator(".found").inner_text() == ""


def test_callees_first_has_the_same_bytes_from_the_other_end(icicle: Icicle, live: Callable[[str], int]) -> None:
    icicle.choose("Layer", "host")
    icicle.press("Callees first")
    assert icicle.figure.get_by_role("button", name="Callees first").get_attribute("aria-pressed") == "true"
    assert icicle.bytes == live(added("host"))
    drawn = icicle.drawn()
    assert drawn["[mmap_anon mmap]"] == live("kind = 'mmap_anon'")
    icicle.click("mmap_file")
    assert icicle.bytes == 11 * 8192
    assert list(icicle.drawn()) == ["[mmap_file mmap]", "mmap", "driver_maps", "main"]
    icicle.press("Flame")
    assert icicle.figure.locator(".plot").evaluate("plot => plot.data[0].tiling.flip") == "y"


def test_growth_and_objects_are_measures_of_their_own(icicle: Icicle, report: Report) -> None:
    icicle.choose("Layer", "gpu")
    icicle.choose("Width", "live objects")
    assert icicle.here == "gpu: live objects 53 objects"
    icicle.choose("Width", "growth")
    (site,) = [site for site in report.sites if site.layer == "gpu"]
    assert site.growth is not None
    assert icicle.here.startswith(f"gpu: growth {round(site.growth.bytes_per_s, 3):,} B/s (")
    hover = icicle.figure.locator(".plot").evaluate("plot => plot.data[0].hovertext")
    assert any("cudaMalloc<br>CUDA call<br>growth: " in text for text in hover)
    assert any("request<br>NVTX range" in text and f"live bytes: {53 * 65_536:,} B (3.3 MiB)" in text for text in hover)


def test_hostile_frames_are_text(icicle: Icicle) -> None:
    icicle.choose("Layer", "host")
    icicle.click("hostile")
    drawn = icicle.drawn()
    assert "\\x1b[31;mred\\n" in drawn and "\\u202egnp.exe" in drawn and "a\\u2028b" in drawn
    assert "&lt;/script&gt;&lt;b&gt;" in drawn and "&amp;lt;i&amp;gt;" in drawn  # what plotly gets; it shows them plain
    texts = icicle.figure.locator("g.slice text").all_text_contents()
    assert "</script><b>" in texts and "&lt;i&gt;" in texts
    assert icicle.figure.locator("g.slice img, g.slice a, .branches script, .branches img").count() == 0
    icicle.click("long_xx")
    assert LONG in icicle.here  # whole where it is looked at
    icicle.press("Callees first")
    assert icicle.page.evaluate("document.querySelectorAll('script').length") == 5


def test_captures_are_never_added_and_it_fits_a_dark_phone(
    browser: Browser, capture: Path, sampled: Path, tmp_path: Path
) -> None:
    html = tmp_path / "two.html"
    both = report_of([capture, sampled], Options(), "1GB")
    html.write_text(page("test", Headline("leak", "test"), stack_sections(both, ["run", "sampled"]), [SCRIPT]))
    with opened(browser, html, (390, 844), "dark") as loaded:
        icicle = Icicle(loaded)
        assert icicle.figure.evaluate("f => f.scrollWidth <= document.documentElement.clientWidth")
        icicle.choose("Layer", "kernel")
        assert icicle.bytes == 101 * 256
        inks = icicle.figure.locator("g.slice text").evaluate_all("all => all.map(text => text.style.fill)")
        assert set(inks) == {"rgb(22, 25, 31)"}  # dark on the fills of the frames, in both looks
        icicle.choose("Evidence", "sampled")
        assert icicle.here == "kernel: live bytes ≈ 32,768 B (32.0 KiB)"
        assert icicle.drawn()["≈ hot"] == 32_768
        icicle.click("hot")
        assert icicle.crumbs == ["kernel", "main", "hot"]
        loaded.set_viewport_size({"width": 1280, "height": 800})
        loaded.wait_for_function("() => document.querySelector('#stacks-icicle g.slice path').getBBox().width > 900")


# The section


def test_the_section_says_what_is_drawn_and_what_is_not(report: Report) -> None:
    (section,) = stack_sections(report, ["run"])
    figure, text = section.parts
    assert isinstance(figure, Figure) and isinstance(text, Text)
    assert "host 600.0 KiB, " in figure.description and "gpu 3.3 MiB" in figure.description
    assert "Fastest grows `fill` (gpu)" in figure.description
    assert any(
        "“All layers” leaves out 88.0 KiB of kernel pages and device mappings" in line for line in text.paragraphs
    )
    assert any(line.startswith("Other kinds count the bytes of heap: they have views") for line in text.paragraphs)
    assert isinstance(figure.table, Table)
    top = figure.table.rows[0]
    assert (top[0], top[1], top[5]) == ("gpu", "[device cudaMalloc]", 53)


def test_estimates_are_told(sampled: Path) -> None:
    (section,) = stack_sections(report_of([sampled], Options(), "1GB"), ["run"])
    assert "Marked ≈: the stacks of 1 site were sampled; parts of their 32.0 KiB are apportioned" in str(
        section.parts[1]
    )


def test_no_memory_no_section() -> None:
    assert stack_sections(Report(Verdict("not_leak", "nothing")), []) == []


# Size


def frames(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "native") for name in names)


@pytest.fixture(scope="module")
def huge() -> Figure:
    """10,000 stacks of 41 frames that fork at every other one, as ten million events may have them, with long names."""
    stacks = []
    for i in range(10_000):
        path = [
            f"module_{i >> max(0, 14 - d // 2)}::function_{d} (/srv/service/library/source_{d}.cc)" for d in range(40)
        ]
        stacks.append(WeighedStack(("run", "host", ""), frames(*path, f"leaf_{i}"), (4096 + i, i / 7, 1 + i % 3)))
    tree = stack_tree(stacks, 3)
    measures = (Measure("live bytes", "bytes"), Measure("growth", "bytes/s"), Measure("live objects", "objects"))
    return icicle_figure("stacks-icicle", "Huge", "", tree, measures, [Root("host")], ["run"])


def test_the_tree_of_ten_thousand_sites_is_small_and_a_thousand_nodes_are_drawn(
    browser: Browser, huge: Figure, tmp_path: Path
) -> None:
    assert len(json_in_html(huge.extra)) <= 4_000_000
    path = tmp_path / "huge.html"
    path.write_text(page("test", Headline("leak", "test"), [Section("stacks", "Stacks", [huge])], [SCRIPT]))
    with opened(browser, path) as loaded:
        icicle = Icicle(loaded)
        assert icicle.bytes == sum(4096 + i for i in range(10_000))
        assert 500 < int(icicle.figure.get_attribute("data-nodes") or 0) <= 1000
        # a frame too narrow to be drawn is found, and comes with a zoom: bits 9999 >> 4 of the leaves 9984 to 9999
        rare = "module_624::function_20"
        assert not any(rare in label for label in icicle.drawn())
        said = icicle.search(rare)
        assert said.startswith(f"{sum(4096 + i for i in range(9984, 10_000)):,} B (")
        assert icicle.hovers("::function_18 ") and not icicle.hovers("::function_21 ")
        icicle.press("To the first fork")
        icicle.figure.locator(".plot").focus()
        for _ in range(3):  # into the widest branch, behind two forks
            icicle.page.keyboard.press("Enter")
        assert icicle.hovers("::function_21 ")
        icicle.press("Callees first")
        smaller = sum(count for _, count in huge.extra["merged"])
        assert 0 < smaller < 10_000 and icicle.branches[0].startswith(
            f"({smaller:,} smaller) smaller branches together, "
        )
        assert int(icicle.figure.get_attribute("data-nodes") or 0) <= 1000

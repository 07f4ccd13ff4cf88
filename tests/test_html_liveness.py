"""The page of ``leakscope liveness``: its numbers, what it draws of a graph of any size, hostile names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from browser import PHONE, draw_all, opened
from html_pages import HOSTILE, figure_of, fits, page_and_json, rows_of
from test_liveness_cli import service

from leakscope.cli.main import main
from leakscope.liveness.graph import GraphBuilder
from leakscope.liveness.overview import MAX_NODES, dominator_tree, held_classes, idle_times
from leakscope.model.liveness import CLASSES, FAULTS
from leakscope.model.liveness_overview import HeldClass, IdleTime
from leakscope.report.text import printable

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HELD_STALE, IDLE, UNKNOWN = (CLASSES.index(name) for name in ("held-stale", "idle-cached", "unknown-ref"))
S = 1_000_000_000

# --- what is drawn


def test_of_many_nodes_those_are_drawn_that_retain_most() -> None:
    # given a holder of 1,000 objects of 1 … 1,000 B, and one of a single object of 5,000 B
    builder = GraphBuilder()
    objects = builder.add_nodes("object", [f"o{n}" for n in range(1000)], bytes=np.arange(1, 1001), objects=1, cls=IDLE)
    large = builder.add_nodes("object", ["large"], bytes=5000, objects=1, cls=IDLE)
    many, one = builder.add_nodes("holder", ["many", "one"])
    builder.add_edges("holds", np.repeat(many, 1000), objects)
    builder.add_edges("holds", [one], large)
    tree = dominator_tree(builder.build())
    # then no more are drawn than may be, and one node says what the others of "many" are
    assert (tree.drawn, tree.total, len(tree.nodes), tree.by) == (MAX_NODES - 1, 1004, MAX_NODES, "bytes")
    root, *_, others = tree.nodes
    assert (root.retained_bytes, root.retained_objects) == (500_500 + 5000, 1001)
    drawn = MAX_NODES - 1 - 4  # without the root, the holders and the large one
    assert (others.others, others.retained_objects) == (1000 - drawn, 1000 - drawn)
    assert others.retained_bytes == sum(range(1, 1001 - drawn))
    names = {node.id: node.name for node in tree.nodes}
    assert names[others.parent] == "many"
    # and each stands below who could let it go, and the parts of a parent are the whole
    parent = next(node for node in tree.nodes if node.name == "many")
    assert sum(node.retained_bytes for node in tree.nodes if node.parent == parent.id) == parent.retained_bytes
    assert next(names[node.parent] for node in tree.nodes if node.name == "large") == "one"


def test_others_below_others_count_with_them() -> None:
    # given 200 chains of three blocks each
    builder = GraphBuilder()
    first, second, third = (
        builder.add_nodes("block", [f"{name}{n}" for n in range(200)], bytes=size, objects=1, cls=UNKNOWN)
        for name, size in (("a", 100), ("b", 10), ("c", 1))
    )
    (holder,) = builder.add_nodes("holder", ["all"])
    builder.add_edges("holds", np.repeat(holder, 200), first)
    builder.add_edges("parent-block", first, second)
    builder.add_edges("parent-block", second, third)
    tree = dominator_tree(builder.build(), 50)
    others = [node for node in tree.nodes if node.others]
    # then nothing is lost: drawn ones and those that others stand for are all
    assert len(tree.nodes) <= 50
    assert tree.drawn + sum(node.others for node in others) == tree.total == 602
    of_root = sum(node.retained_bytes for node in tree.nodes if node.parent == 0)
    assert of_root == tree.nodes[0].retained_bytes == 200 * 111


def test_without_sizes_objects_are_counted() -> None:
    builder = GraphBuilder()
    objects = builder.add_nodes("object", ["x", "y"], objects=1, cls=IDLE)
    (holder,) = builder.add_nodes("cache", ["c"])
    builder.add_edges("caches", [holder, holder], objects)
    tree = dominator_tree(builder.build())
    assert (tree.by, tree.nodes[0].retained_objects, tree.nodes[0].retained_bytes) == ("objects", 2, 0)


def test_what_two_hold_counts_with_each_and_once_with_who_holds_twice() -> None:
    builder = GraphBuilder()
    both, own = builder.add_nodes("object", ["both", "own"], bytes=[7, 3], objects=1, cls=[HELD_STALE, IDLE])
    p, q = builder.add_nodes("holder", ["p", "q"])
    builder.add_edges("holds", [p, p, p, q], [both, both, own, both])
    graph = builder.build()
    assert held_classes(graph) == (
        HeldClass("holder", "p", "held-stale", 1, 7),
        HeldClass("holder", "p", "idle-cached", 1, 3),
        HeldClass("holder", "q", "held-stale", 1, 7),
    )
    assert held_classes(graph, most=1)[2:] == (HeldClass("", "", "held-stale", 1, 7, others=1),)


def test_idle_times_are_told_to_the_byte() -> None:
    builder = GraphBuilder()
    last = [100 * S, 99 * S, 41 * S, 40 * S, 0]  # of an end at 100 s
    builder.add_nodes("object", list("abcde"), bytes=[1, 2, 4, 8, 16], objects=1, cls=IDLE, last_use_ns=last,
                      approximate=[False, False, True, False, False])  # fmt: skip
    assert idle_times(builder.build(), [100 * S]) == (
        IdleTime(0.0, 1.0, 1, 1),
        IdleTime(1.0, 10.0, 1, 2),
        IdleTime(10.0, 60.0, 1, 4, 1),
        IdleTime(60.0, 600.0, 1, 8),
        IdleTime(None, None, 1, 16),
    )


# --- the page


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(the page, the JSON) of a cache in which a holder with a hostile name forgot ten objects."""
    folder = tmp_path_factory.mktemp("liveness")
    events = service(folder / "events.jsonl", HOSTILE)
    file = folder / "page.html"
    return file, page_and_json(file, "liveness", events, "--why", "block-30", "--stale-after", "30s")


def test_the_page_has_the_numbers_of_the_json_report(made: tuple[Path, dict[str, Any]], browser: Browser) -> None:
    file, report = made
    (source,) = report["sources"]
    with opened(browser, file) as page:
        draw_all(page)
        # then who keeps it
        keepers = rows_of(page, "Holders and caches, by what they retain")
        told = ("retains", "holds", "objects", "stale", "stale bytes")
        keys = ("retained_bytes", "bytes", "objects", "stale_objects", "stale_bytes")
        assert [[row[name] for name in told] for row in keepers] == [
            [k[key] for key in keys] for k in report["keepers"]
        ]
        assert {row["who"]: row["stale bytes"] for row in keepers}[printable(HOSTILE)] == 10_000
        # and the classes, also over time
        classes = {row["class"]: (row["objects"], row["bytes"]) for row in rows_of(page, "Classes of events.jsonl")}
        assert classes == {n: (c["objects"], c["bytes"]) for n, c in source["classes"].items() if c["objects"]}
        over_time = rows_of(page, "Classes of events.jsonl over time")
        assert [{name: row[name] for name in CLASSES} for row in over_time] == [w["bytes"] for w in source["windows"]]
        # and what is stale, why it is alive, and the classic scheme with its faults
        stale = rows_of(page, "Stale, by bytes × age")
        assert [(row["what"], row["age"]) for row in stale] == [(s["name"], s["age_s"]) for s in report["stale"]]
        whys = [*report["whys"], *(w for w in report["suspects"] if w["name"] != "block-30")]
        assert [row["what"] for row in rows_of(page, "Who could let it go")] == [why["name"] for why in whys]
        assert len(whys) == 5 and report["whys"][0]["name"] == "block-30"
        (rules,) = rows_of(page, "The classic scheme on the same objects")
        assert (rules["looked at"], rules["unreferenced, not seen"]) == (10, 40)
        for fault in FAULTS:
            assert fault in page.locator("#rules").inner_text()
        # and the tree retains what the graph does
        tree = figure_of(page, "tree")["data"][0]
        nodes = {node["id"]: node for node in report["graph"]["nodes"]}
        assert tree["values"][0] == sum(node["bytes"] for node in nodes.values()) == 50_000
        labels = dict(zip(tree["labels"], tree["values"], strict=True))
        assert all(labels[n["name"]] == n["retained_bytes"] for n in nodes.values() if n["kind"] == "object")


def test_a_click_goes_into_the_tree(made: tuple[Path, dict[str, Any]], browser: Browser) -> None:
    with opened(browser, made[0]) as page:
        page.wait_for_function("() => document.getElementById('tree').dataset.state === 'drawn'")
        page.locator("#tree").scroll_into_view_if_needed()
        place = page.locator("#tree .slicetext", has_text="cache events.jsonl").first.bounding_box()
        assert place is not None
        page.mouse.click(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        level = figure_of(page, "tree")["data"][0]["labels"].index("cache events.jsonl")
        page.wait_for_function(
            "level => document.querySelector('#tree .plot')._fullData[0].level === level", arg=str(level), timeout=5000
        )


def test_hostile_names_are_text_on_a_phone_in_the_dark(made: tuple[Path, dict[str, Any]], browser: Browser) -> None:
    file, _ = made
    assert "\x1b" not in file.read_text() and "\u202e" not in file.read_text()
    with opened(browser, file, PHONE, "dark") as page:  # which fails on a dialog, an error or a request
        draw_all(page)
        assert page.locator("main script, main img").count() == 0
        sentence = page.locator("h1").inner_text()
        assert sentence.startswith("<script>alert(1)</script><img src=x onerror=alert(2)>\\x1b[2J\\u202e")
        assert sentence.endswith(" holds 9.8 KiB in 10 objects that it does not use any more, some for 157.8 s.")
        assert fits(page)


def test_evidence_without_objects_gives_a_page_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "samples.csv").write_text("t_s,rss_bytes\n0,1\n1,2\n")
    report = page_and_json(tmp_path / "page.html", "liveness", tmp_path / "samples.csv")
    assert report["sources"] == []
    text = (tmp_path / "page.html").read_text()
    assert "No objects: the evidence has neither" in text
    assert len(text) < 100_000  # no figure, so no script to draw one


def test_a_page_that_has_no_place_is_said_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["liveness", str(tmp_path / "missing"), "--report", str(tmp_path / "no" / "page.html")]) == 2
    assert capsys.readouterr().err == f"leakscope: {tmp_path}/no/page.html: there is no folder {tmp_path}/no\n"

"""Pages without a browser: markup of parts, escaping, refusals."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from leakscope.report.html.page import json_in_html, page, prose, text
from leakscope.report.html.parts import Code, Figure, Headline, Lines, Section, Table, Text, Value, cut, plot_text
from leakscope.report.html.units import byte_axis, duration_text, time_axis

HEADLINE = Headline("leak", "`f` keeps 3 bytes", [("Rate", "3 B/s")], ["Look at `f`"])


class Tags(HTMLParser):
    """Elements that do not close where they should."""

    VOID = frozenset({"meta", "br", "link"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def figure(id_: str, **more: object) -> Figure:
    return Figure(id_, "T", [{"y": [1, 2]}], {}, "two points", **more)  # type: ignore[arg-type]


def test_a_page_is_well_formed_and_has_its_parts() -> None:
    table = Table(
        "t", ["a", "b", "c"], [[1, "x", None], [Value("1 KiB", 1024), Code("f (a.py:1)"), Lines("g", ["f", "g"])]]
    )
    made = page("Title", HEADLINE, [Section("one", "One", [figure("fig", table=table), Text(["p `q`"])], open=False)])
    parsed = Tags(made)
    assert (parsed.wrong, parsed.open) == ([], [])
    assert made.count("plotly.js v") >= 1
    assert '<td class="number" data-value="1024">1 KiB</td>' in made
    assert '<section id="one" class="section" aria-labelledby="h-one"><details><summary>' in made
    assert "<bdi>p </bdi><code><bdi>q</bdi></code>" in made


def test_a_page_without_figures_has_no_script_to_draw_with() -> None:
    assert len(page("T", HEADLINE, [Section("one", "One", [Text(["p"])])])) < 40_000


@pytest.mark.parametrize("sections", [
    [Section("One", "", [])],
    [Section("one", "", []), Section("one", "", [])],
    [Section("one", "", [figure("one")])],
    [Section('a"b', "", [])],
])  # fmt: skip
def test_ids_are_plain_and_occur_once(sections: list[Section]) -> None:
    with pytest.raises(ValueError, match="each once"):
        page("T", HEADLINE, sections)


def test_numbers_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        page("T", HEADLINE, [Section("one", "", [Figure("f", "", [{"y": [float("nan")]}], {}, "")])])


def test_json_cannot_leave_its_element() -> None:
    value = {"a": "</script><!--\u2028&\u202e\ud800", "b": [1.5, None]}
    written = json_in_html(value)
    assert not set(written) & set("<>&\u2028\u202e\ud800")
    assert json.loads(written) == value


def test_texts_are_escaped_isolated_and_whole() -> None:
    assert text("<b>\x1b\u202e") == "<bdi>&lt;b&gt;\\x1b\\u202e</bdi>"
    long = text("a" * 200 + "b" * 200)
    assert long.startswith('<details class="long"><summary><bdi>aaa')
    assert f"<bdi>{'a' * 200}{'b' * 200}</bdi>" in long
    assert "100,000 characters; --json has them all" in text("c" * 100_000)
    assert prose("a `b` c`") == "<bdi>a `b` c`</bdi>"  # a quote that does not close is none


def test_labels_of_figures_are_no_markup() -> None:
    assert plot_text("<b>&x</b>") == "&lt;b&gt;&amp;x&lt;/b&gt;"
    assert plot_text("a" * 300, 11) == "aaaaaa…aaaa"
    assert cut("abc", 3) == "abc"


def test_axes_have_units_that_people_read() -> None:
    assert [byte_axis(n) for n in (0, 100, 3 << 10, 1.5 * 2**20, 3 << 40)] == [
        ("B", 1.0), ("B", 1.0), ("KiB", 1024.0), ("KiB", 1024.0), ("TiB", 2.0**40),
    ]  # fmt: skip
    assert [time_axis(s)[0] for s in (9, 400, 4 * 3600, 4 * 86_400)] == ["s", "min", "h", "d"]
    assert duration_text(0.7) == "0.7 s"

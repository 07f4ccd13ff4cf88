"""The benchmarks that record nothing run at their smallest size and yield every figure."""

from __future__ import annotations

import pytest
from quick_benchmarks import run


def test_joins_yield_their_figures():
    # given the benchmark of joins, when it runs at the smallest size
    figures = run("joins")["joins"]["figures"]
    # then both find the same events nested, and every launch has its profile
    assert figures["joins"]["matched"]["nesting"] == figures["merge_asof"]["matched"]["nesting"] > 1_000
    assert figures["joins"]["matched"]["order"] == 500
    assert {"seconds", "peak_mib"} < set(figures["joins"])


@pytest.mark.usefixtures("chromium_program")
def test_the_page_yields_its_figures():
    # given the page of a small capture, when it is opened once, then it stands and its figures were drawn
    page = run("page")["page"]
    assert page["figures"]["million_events"] == 0.02
    assert 4_000_000 < page["figures"]["bytes"] < 10_000_000
    assert page["figures"]["first_screen_s"] > 0 and page["figures"]["slowest_figure_s"] > 0
    limits = {bar["what"]: (bar["limit"], bar["unit"]) for bar in page["bars"]}
    assert limits == {"page of 10 M events": (10, "MB"), "first screen": (3, "s")}

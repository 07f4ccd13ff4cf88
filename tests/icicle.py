"""The icicle of a page, used and read as someone does who looks at it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page


class Icicle:
    """The figure as someone sees it who uses it."""

    def __init__(self, page: Page, name: str = "stacks-icicle") -> None:
        self.page, self.name = page, name
        self.figure = page.locator(f"#{name}")
        self.figure.scroll_into_view_if_needed()
        page.wait_for_function("n => document.getElementById(n).dataset.nodes", arg=name)
        page.wait_for_selector(f"#{name} g.slice")

    @property
    def here(self) -> str:
        """The line that says what is looked at."""
        return self.figure.locator(".here").inner_text()

    @property
    def bytes(self) -> int:
        """The first exact number of it."""
        found = re.search(r"([\d,]+) B", self.here)
        assert found, self.here
        return int(found[1].replace(",", ""))

    @property
    def crumbs(self) -> list[str]:
        return [text.strip() for text in self.figure.locator(".crumbs > *").all_inner_texts()]

    @property
    def branches(self) -> list[str]:
        """The list of the largest branches."""
        return self.figure.locator(".branches li").all_text_contents()

    def choose(self, label: str, word: str) -> None:
        self.figure.get_by_label(label).select_option(label=word)

    def press(self, name: str) -> None:
        self.figure.get_by_role("button", name=name, exact=True).click()

    def click(self, label: str) -> None:
        """The first slice whose label has ``label``; its zoom has happened."""
        before = self.figure.get_attribute("data-drawings")
        self.figure.locator("g.slice", has_text=label).first.click()
        self.page.wait_for_function(
            "([id, before]) => document.getElementById(id).dataset.drawings !== before", arg=[self.name, before]
        )

    def search(self, text: str) -> str:
        """What the page says was found."""
        self.figure.get_by_label("Search frames").fill(text)
        found = self.figure.locator(".found")
        self.page.wait_for_function(
            "([id, text]) => document.getElementById(id).dataset.query === text", arg=[self.name, text]
        )
        return found.inner_text()

    def hovers(self, text: str) -> bool:
        """Whether something drawn has ``text`` in its hover text."""
        return bool(
            self.figure.locator(".plot").evaluate("(p, t) => p.data[0].hovertext.some(h => h.includes(t))", text)
        )

    def drawn(self) -> dict[str, float]:
        """Labels that plotly drew, with the width of each; those of one name together."""
        trace = self.figure.locator(".plot").evaluate(
            "plot => ({labels: plot.data[0].labels, values: plot.data[0].values})"
        )
        sums: dict[str, float] = {}
        for label, value in zip(trace["labels"], trace["values"], strict=True):
            sums[label] = sums.get(label, 0) + value
        return sums

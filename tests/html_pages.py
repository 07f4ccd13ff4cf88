"""Reading pages of HTML back, as a browser shows them."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakscope.cli.main import main

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\u202e&\"'`"
"""A name that must stay text."""

_TABLE = """caption => {
    const table = [...document.querySelectorAll('table')].find(t => t.caption.innerText.trim() === caption);
    if (!table) return null;
    const names = [...table.querySelectorAll('thead th')].map(cell => cell.textContent);
    const shown = cell => cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent;
    return [...table.querySelectorAll('tbody tr')].map(
        row => Object.fromEntries([...row.cells].map((cell, place) => [names[place], shown(cell)])));
}"""


def page_and_json(file: Path, *arguments: object) -> dict[str, Any]:
    """Run ``leakscope ARGUMENTS --report FILE --json`` and return what it printed; the exit code does not matter."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        main([*map(str, arguments), "--report", str(file), "--json"])
    report: dict[str, Any] = json.loads(said.getvalue())
    return report


def rows_of(page: Page, caption: str) -> list[dict[str, Any]]:
    """The rows of the table of that caption: column → number, or text where it is none."""
    page.evaluate("document.querySelectorAll('details').forEach(folded => { folded.open = true; })")
    rows = page.evaluate(_TABLE, caption)
    assert rows is not None, f"no table '{caption}'"
    found: list[dict[str, Any]] = rows
    return found


def figure_of(page: Page, name: str) -> dict[str, Any]:
    """What a figure is drawn from: data, layout, extra."""
    found: dict[str, Any] = json.loads(page.locator(f"#json-{name}").text_content() or "")
    return found


def fits(page: Page) -> bool:
    """Whether nothing is wider than the screen."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))

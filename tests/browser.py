"""A headless Chromium that opens pages of ours and fails on whatever a page of ours must not do.

Wait for functions (``"() => …"``), not for strings: the policy of a page forbids to evaluate those a second time.
Chromium is Debian's (``tools/system-packages.sh test``), or the program that LEAKSCOPE_CHROMIUM names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = "LEAKSCOPE_CHROMIUM"
DESKTOP = (1280, 800)
PHONE = (390, 844)


@pytest.fixture(scope="session")
def chromium_program() -> str:
    """Chromium. Without one a test is skipped, loudly; it fails where CI=true or LEAKSCOPE_CHROMIUM is set."""
    program = os.environ.get(CHROMIUM) or shutil.which("chromium") or ""
    if not program or not Path(program).is_file():
        reason = f"NOT TESTED: no browser at {program or 'chromium'}; {CHROMIUM}=PROGRAM names one"
        if os.environ.get("CI") == "true" or os.environ.get(CHROMIUM):
            pytest.fail(reason)
        pytest.skip(reason)
    return program


@pytest.fixture(scope="session")
def browser(chromium_program: str) -> Iterator[Browser]:
    """A running Chromium. Playwright keeps an event loop running in the thread of the tests from then on."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextmanager
def opened(browser: Browser, file: Path, size: tuple[int, int] = DESKTOP, look: str = "light") -> Iterator[Page]:
    """The page of ``file``, loaded. On leaving fails if the page wrote an error, threw, or asked for anything but
    itself."""
    wrong: list[str] = []
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if look == "dark" else "light"
    )
    try:
        page = context.new_page()
        url = file.resolve().as_uri()
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda asked: None if asked.url.split("#")[0] == url or asked.url.startswith(("data:", "blob:")) else
            wrong.append(f"request: {asked.url}"),
        )  # fmt: skip
        page.goto(url)
        yield page
    finally:
        context.close()
    assert not wrong, f"{file.name}: {wrong}"


def draw_all(page: Page) -> None:
    """Unfolds everything, scrolls to each figure in turn and waits until it is drawn."""
    page.evaluate("document.querySelectorAll('main section > details').forEach((folded) => { folded.open = true; })")
    for figure in page.locator("figure.figure").all():
        figure.scroll_into_view_if_needed()
        page.wait_for_function(
            "id => document.getElementById(id).dataset.state === 'drawn'", arg=figure.get_attribute("id")
        )

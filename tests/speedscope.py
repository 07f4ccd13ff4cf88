"""speedscope itself, from its npm package, in a browser: the parser that people use reads what we write.

``tools/speedscope.sh`` fetches it into build/speedscope; LEAKSCOPE_SPEEDSCOPE names the folder of another one.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page
else:
    Page = object

PACKAGE = "LEAKSCOPE_SPEEDSCOPE"
FETCHED = Path(__file__).parent.parent / "build/speedscope/package"


class Profile(NamedTuple):
    """A profile as its sandwich view lists it: by frame, (total, self) in speedscope's own words."""

    title: str
    frames: dict[str, tuple[str, str]]


def package() -> Path:
    """The folder of the npm package; skips the test loudly where there is none."""
    named = os.environ.get(PACKAGE)
    folder = Path(named) if named else FETCHED
    if not (folder / "dist/release/index.html").is_file():
        reason = f"NOT TESTED: speedscope's own parser; tools/speedscope.sh or {PACKAGE}=FOLDER of its npm package"
        if named:
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


def profiles(opened: Page, file: Path, folder: Path, most: int = 20) -> list[Profile]:
    """What speedscope says of ``file``: each of its profiles, at most ``most``. Fails on whatever it complains of."""
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    opened.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    script = folder / f"{file.name}.js"  # the way in for local files that its own command line uses
    script.write_text(f"speedscope.loadFileFromBase64('{file.name}', '{base64.b64encode(file.read_bytes()).decode()}')")
    opened.goto("about:blank")  # else the same page would only get another fragment
    opened.goto(f"{(package() / 'dist/release/index.html').as_uri()}#view=sandwich&localProfilePath={script}")
    opened.get_by_text("Symbol Name").first.wait_for(timeout=60_000)
    found: list[Profile] = []
    for _ in range(most):
        text = opened.inner_text("body")
        titles = [line for line in text.splitlines() if line and not line.startswith(("🕰", "⤴", "Total"))]
        found.append(Profile(titles[0], _frames(text)))
        opened.keyboard.press("n")  # the next profile
        opened.wait_for_timeout(50)
        if opened.inner_text("body") == text:
            break
    assert not wrong, wrong
    return found


def _frames(text: str) -> dict[str, tuple[str, str]]:
    cells = [cell.strip() for cell in re.split(r"[\t\n]+", text.partition("Symbol Name")[2]) if cell.strip()]
    return {name: (total, own) for total, own, name in zip(cells[::3], cells[1::3], cells[2::3], strict=True)}

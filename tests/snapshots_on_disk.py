"""Texts that are pinned in files: what people see, looked at once and then kept."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = "LEAKSCOPE_UPDATE_SNAPSHOTS"


def matches(name: str, lines: Iterable[str]) -> None:
    """Fail where ``lines`` are not those of the file ``name``; the failure names the command that writes them anew."""
    path = SNAPSHOTS / f"{name}.txt"
    text = "\n".join(lines) + "\n"
    if os.environ.get(UPDATE) == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    known = path.read_text() if path.exists() else ""
    if text != known:
        test = os.environ.get("PYTEST_CURRENT_TEST", "tests").partition("::")[0]
        pytest.fail(
            f"{path} differs from what is printed now. Look at it; if it is right, pin it with\n"
            f"  {UPDATE}=1 python -m pytest {test}\n\n{text}"
        )

"""The CI sample: its captured traces pass and fail as its README says, its files are what the tools take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from leakscope.gate.budgets import parse_budgets
from leakscope.gate.suppressions import parse_suppressions
from tests.recording import ROOT

SAMPLE = ROOT / "samples" / "ci"


def test_the_refactored_service_passes_and_the_leaking_one_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "tools" / "ci-sample.sh", Path(sys.executable).parent, tmp_path], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == [
        "same-work: exit 0, PASS  4 checks",
        "regression: exit 1, FAIL  kernel: handle_request (service.py) and 1 other",
        "leak-alone: exit 1, FAIL  kernel: open_session (service.py) and 1 other",
    ]
    # 60 cancelled requests keep a socket pair each, and its 2,000 bytes: 120 sockets, files and inodes
    text = (tmp_path / "regression.txt").read_text()
    assert "keeps 261,120 B (255.0 KiB) of kernel memory in 120 objects" in text.replace("\n  ", "")
    assert "head did 1.25 times its work" in text
    assert {path.name for path in tmp_path.iterdir()} == {"baseline.json"} | {
        f"{name}{suffix}"
        for name in ("same-work", "regression", "leak-alone")
        for suffix in (".txt", ".junit.xml", ".sarif", ".md", ".html")
    }


def test_its_files_are_small_and_valid() -> None:
    captures = list((SAMPLE / "captures").iterdir())
    assert len(captures) == 3 and sum(path.stat().st_size for path in captures) <= 1_000_000
    assert len(parse_budgets((SAMPLE / "leakscope.toml").read_text(), "leakscope.toml")) == 3
    assert len(parse_suppressions((SAMPLE / "suppressions.txt").read_text(), "suppressions.txt")) == 2

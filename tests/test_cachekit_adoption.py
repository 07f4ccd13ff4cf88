"""What docs/cachekit.md shows runs, and the sample's leak is named with its owner and the stack that made it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recording import ROOT

from leakscope.cli.main import main

DOCUMENT = ROOT / "docs" / "cachekit.md"


def attributed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["attribute", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, str(DOCUMENT), "exec"), {})

    report = attributed(capsys, "events.jsonl")
    assert report["verdict"]["verdict"] == "not_leak"
    events = [json.loads(line) for line in Path("events.jsonl").read_text().splitlines()]
    assert [event["op"] for event in events] == ["insert", "ref", "unref", "ref", "unref", "invalidate"]
    assert [event["owner"] for event in events] == ["prefixes", "decode", "decode", "prefill", "prefill", "prefixes"]


def test_the_samples_leak_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events.jsonl"
    done = subprocess.run(
        [sys.executable, str(ROOT / "samples" / "cachekit_service.py"), "--events", str(events), "--pause-us", "500"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = json.loads(done.stdout)
    (site,) = said["sites"]

    report = attributed(capsys, str(events))

    verdict = report["verdict"]
    assert (verdict["verdict"], verdict["class"], verdict["layer"]) == ("leak", "refcount", "host")
    assert (verdict["kept_objects"], verdict["kept_bytes"]) == (site["objects"], site["bytes"]) == (37, 37 * 48_000)
    assert verdict["culprit"]["owner"] == said["owner"] == "stream"
    functions = [frame.split(" (")[0] for frame in verdict["culprit"]["stack"]]
    assert functions == ["<module>", "main", "StreamServer.stream", "StreamServer.attach_prefix"]
    assert verdict["culprit"]["frame"].startswith(f"{site['function']} (")
    assert 0 <= verdict["leak_start_s"] < 1
    assert said["dropped"] == 31 and said["held_entries"] == 37
    assert any("31 handles were dropped without release, most by peek" in missing for missing in verdict["missing"])
    assert "prefixes: peek dropped " in done.stderr and "StreamServer.peek_and_forget" in done.stderr

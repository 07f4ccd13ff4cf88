"""Documents whose commands record: they are recorded, and what they show is what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_run import RECORDED, problems_of
from recording import ROOT


@pytest.mark.bpf
@pytest.mark.parametrize("name", RECORDED)
def test_a_document_that_records_runs(
    name: str, can_record: None, core: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = problems_of(ROOT / name, tmp_path)
    assert not problems, "\n\n".join(problems)

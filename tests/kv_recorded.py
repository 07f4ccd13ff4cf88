"""What a real vLLM published while three of its requests were never freed, and the blocks that they pin."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from leakscope.capture import Capture
from leakscope.detect.kv_verdicts import judge_kv

POOL = 599


def _data(name: str) -> Path:
    root = os.environ.get("LEAKSCOPE_TEST_DATA")
    if not root:
        pytest.skip("NOT TESTED: LEAKSCOPE_TEST_DATA is not set")
    return Path(root) / "cache" / name


def recorded() -> Path:
    """What vLLM 0.33.0 published while three requests were never freed; 36 of 599 blocks stay pinned."""
    return _data("vllm-0.33.0-kv-events-leaky.jsonl.gz")


def truly_pinned() -> set[str]:
    """Names of the blocks that were pinned when no request ran any more."""
    with gzip.open(_data("vllm-0.33.0-kv-events-leaky.truth.json.gz")) as file:
        return {f"{value:016x}" for value in json.load(file)["pinned_hashes_at_idle"]}


def held_in(capture: Path) -> set[str]:
    """Names of the blocks that a capture's verdict calls held."""
    opened = Capture.open(capture)
    with opened.connect() as con:
        (verdict,) = judge_kv(con, opened.manifest.sources)
    return set(verdict.culprit.objects) if verdict.culprit else set()

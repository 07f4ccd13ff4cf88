"""The gate does not flake: the short form of what `make eval` does with 100 recordings of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_runs import run

from benchmarks import flakes

pytestmark = pytest.mark.usefixtures("samples")

RECORDINGS = 5
ITERATIONS = 150


def test_the_sample_leaks_as_many_messages_as_it_says() -> None:
    report = run("leak_message", "--count", 7)
    assert report["leaked"] == {"kernel": {"objects": 7, "bytes": 7 * 976}}
    assert run("leak_message", "--count", 7, "--keep", 0)["leaked"] == {}


@pytest.mark.bpf
def test_clean_recordings_pass_and_those_that_leak_a_kibibyte_an_iteration_fail(bpf: str, tmp_path: Path) -> None:
    # when 5 runs of the sample are recorded with the leak and 5 without, and each is checked by itself
    clean, leaking = flakes.campaign(RECORDINGS, tmp_path, ITERATIONS, bpf)
    # then no clean one fails, and each leak is found: its place, and 1,024 bytes an iteration
    assert (clean.right, clean.exit_codes, clean.wrong) == (RECORDINGS, {0: RECORDINGS}, [])
    assert (leaking.right, leaking.exit_codes, leaking.wrong) == (RECORDINGS, {1: RECORDINGS}, [])
    # and what was judged rightly is not kept
    assert list(tmp_path.iterdir()) == []


def test_a_verdict_that_is_right_for_the_wrong_reason_counts_as_a_mistake() -> None:
    leak = {"verdict": "leak", "culprit": {"frame": "post_and_forget (leak_message.c:26)"}, "kept_bytes": 10 * 1024}
    assert flakes.found({"verdict": leak}, 10)
    assert not flakes.found({"verdict": leak | {"culprit": {"frame": "map_and_unmap"}}}, 10)
    assert not flakes.found({"verdict": leak | {"kept_bytes": 9 * 1024}}, 10)
    assert not flakes.found({"verdict": leak | {"verdict": "inconclusive"}}, 10)

"""`make gpu-check` runs to its end without a GPU; what can be checked with stand-ins passes with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recording import BIN, ROOT

GPU_CHECK = ROOT / "tools" / "gpu_check.py"


def check(out: Path, driver: str) -> dict[str, tuple[str, str]]:
    """The table of a run: step → (outcome, what was found)."""
    environment = {**os.environ, "GPU_CHECK_DRIVER": driver, "GPU_CHECK_TORCH_PYTHON": "", "PATH": "/usr/sbin:/usr/bin"}
    done = subprocess.run(
        [sys.executable, str(GPU_CHECK), "--out", str(out)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {step: (outcome, found) for step, outcome, found in json.loads((out / "table.json").read_text())}


@pytest.mark.bpf
def test_stand_ins_pass_what_needs_no_gpu(bpf: None, core: None, tmp_path: Path) -> None:
    # given the stand-in driver in the place of the real one
    table = check(tmp_path / "out", str(BIN))
    # then two processes are exact and every launch's pointer is known, and what needs the toolkit is told apart
    assert table["two CUDA processes, to the byte"] == (
        "pass",
        "100 blocks of 2 processes exact; 100 launches, 100 with exact pointers",
    )
    assert table["all joined"][0] == "pass" and "keep_child_block" in table["all joined"][1]
    assert table["compute-sanitizer agrees"] == ("not possible", "no compute-sanitizer on this host")
    assert {outcome for outcome, _ in table.values()} == {"pass", "not possible"}


def test_without_a_driver_each_step_says_why_it_is_not_possible(samples: None, tmp_path: Path) -> None:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    if "libcuda.so.1" in listed:
        pytest.skip("NOT TESTED: this host has a driver")
    table = check(tmp_path / "out", "")
    reasons = {step: found for step, (outcome, found) in table.items() if outcome == "not possible"}
    assert reasons["two CUDA processes, to the byte"] == "no driver's libcuda.so.1 on this host"
    assert reasons["all joined"] == "nothing was recorded"
